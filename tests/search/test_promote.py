"""The promotion rule: what it takes, and that the record names what was missing."""

import pytest
from tests.search.evidence import INCUMBENT, audit, measurement

from kernelbraid.audit.timing import GAIN, LEAST_ROUNDS
from kernelbraid.contract import BitPolicy
from kernelbraid.ir.evidence import AuditEvidence, Environment, Level, Status
from kernelbraid.search.promote import Decision, Outcome, decide


def judged(
    screen: AuditEvidence,
    full: AuditEvidence | None = None,
    policy: BitPolicy = BitPolicy.MUTUAL,
    incumbent: str = INCUMBENT,
) -> Decision:
    return decide(screen, full, incumbent=incumbent, root_bits="1111", incumbent_bits="1111", policy=policy)


FAST = (measurement("w1", 0.8), measurement("w2", 0.9))


def test_a_gain_on_the_search_run_asks_for_confirmation_and_promotes_nothing() -> None:
    decision = judged(audit(*FAST))
    assert decision.outcome is Outcome.CONFIRM and not decision.granted
    assert decision.blocking == ()


def test_a_gain_seen_twice_is_granted_with_every_number() -> None:
    decision = judged(audit(*FAST), audit(*FAST, level=Level.FULL))
    assert decision.granted and not decision.bits_changed
    checks = {check.name: check for check in decision.checks}
    for level in ("screen", "full"):
        upper = checks[f"{level}/aggregate"].value
        assert upper is not None and 0.85 < upper < GAIN
        assert checks[f"{level}/limit/w1"].held and checks[f"{level}/limit/w1"].limit == 1.05
        assert checks[f"{level}/processes"].value == 4
    assert "0.8500 of the incumbent's" in decision.reason


@pytest.mark.parametrize(
    ("screen", "blocked", "reason"),
    [
        (audit(status=Status.BITS_UNEQUAL, broken="batch"), "screen/requirements", "toy/1/batch/decode"),
        (audit(status=Status.CRASHED), "screen/status", "ended crashed: the reason"),
        (audit(*FAST, status=Status.STOPPED), "screen/status", "ended stopped: the reason"),
        (audit(measurement("w1", 0.999)), "screen/aggregate", "must lie below 0.995"),
        (audit(measurement("w1", 1.2)), "screen/aggregate", "aggregate ratio 1.2"),
        (
            audit(measurement("w1", 0.9, spread=(0.8, 1.0, 1.2))),
            "screen/aggregate",
            "the smallest gain provable here",
        ),
        (audit(measurement("w1", 0.8, spread=(1.0, 1.0))), "screen/processes", "2 process pairs"),
        (audit(), "screen/processes", "0 process pairs"),
        (
            audit(measurement("w1", 0.7), measurement("w2", 1.06, weight=0.1)),
            "screen/limit/w2",
            "w2 at 1.060 of the root, limit 1.05",
        ),
    ],
)
def test_a_refusal_names_what_blocked_it(screen: AuditEvidence, blocked: str, reason: str) -> None:
    decision = judged(screen)
    assert decision.outcome is Outcome.REFUSED
    assert decision.blocking[0] == blocked
    assert reason in decision.reason


def test_a_limit_blocks_only_beyond_noise_and_is_counted_from_the_root() -> None:
    noisy = measurement("w2", 1.06, weight=0.1, spread=(0.97, 1.0, 1.03, 1.0))
    assert judged(audit(measurement("w1", 0.7), noisy)).outcome is Outcome.CONFIRM
    slower_than_incumbent = measurement("w2", 1.06, to_root=0.9, weight=0.1)
    assert judged(audit(measurement("w1", 0.7), slower_than_incumbent)).outcome is Outcome.CONFIRM


def test_the_aggregate_weighs_workloads() -> None:
    slow_heavy = (measurement("w1", 0.5, weight=1.0), measurement("w2", 1.04, weight=20.0))
    assert judged(audit(*slow_heavy)).blocking == ("screen/aggregate",)
    assert judged(audit(measurement("w1", 0.5, weight=2.0), measurement("w2", 1.04))).blocking == ()


@pytest.mark.parametrize(
    ("full", "blocked"),
    [
        (audit(*FAST, level=Level.FULL, status=Status.STOPPED), "full/status"),
        (audit(level=Level.FULL, status=Status.BITS_UNEQUAL, broken="batch"), "full/requirements"),
        (audit(measurement("w1", 0.999), level=Level.FULL), "full/aggregate"),
        (audit(measurement("w1", 0.7), measurement("w2", 1.2), level=Level.FULL), "full/limit/w2"),
        (audit(*FAST, level=Level.SCREEN, seed=2), "full/subject"),
        (audit(*FAST, level=Level.FULL, seed=1), "full/subject"),
        (audit(*FAST, level=Level.FULL, implementation="d" * 64), "full/subject"),
        (audit(*FAST, level=Level.FULL, incumbent="d" * 64), "full/incumbent"),
        (
            audit(
                *FAST,
                level=Level.FULL,
                environment=Environment("cpu", "Fake CPU", 2, 8.0, 1 << 25, (("python", "4"),)),
            ),
            "full/subject",
        ),
    ],
)
def test_the_full_audit_must_hold_by_itself(full: AuditEvidence, blocked: str) -> None:
    decision = judged(audit(*FAST), full)
    assert decision.outcome is Outcome.REFUSED
    assert blocked in decision.blocking


def test_a_failed_screen_is_not_saved_by_a_full_audit() -> None:
    decision = judged(audit(measurement("w1", 0.999)), audit(*FAST, level=Level.FULL))
    assert decision.outcome is Outcome.REFUSED and decision.blocking == ("screen/aggregate",)


def test_evidence_against_a_former_incumbent_promotes_nothing() -> None:
    assert judged(audit(*FAST), incumbent="e" * 64).blocking == ("screen/incumbent",)


def test_pinned_keeps_the_roots_bits_and_mutual_announces_new_ones() -> None:
    new = {"bits_id": "2222"}
    pinned = judged(audit(*FAST, **new), policy=BitPolicy.PINNED)
    assert pinned.blocking == ("screen/bits",) and "not the root's 1111" in pinned.reason
    assert judged(audit(*FAST), policy=BitPolicy.PINNED).outcome is Outcome.CONFIRM
    mutual = judged(audit(*FAST, **new), audit(*FAST, level=Level.FULL, **new))
    assert mutual.granted and mutual.bits_changed
    assert "bits changed: 1111 -> 2222" in mutual.reason


def test_fewer_processes_than_the_rule_needs_never_promote() -> None:
    for count in range(LEAST_ROUNDS):
        spread = (1.0,) * max(count, 1)
        measured = () if count == 0 else (measurement("w1", 0.1, spread=spread),)
        assert judged(audit(*measured)).outcome is Outcome.REFUSED
