"""What the self-test concludes, and its hostile sources; that audits reject them is the slow test."""

import ast
import random

import psutil
import pytest

from kernelbraid import ops
from kernelbraid.audit.fixtures import FIXTURES, for_device, named
from kernelbraid.audit.selftest import Pair, cheapest, passed, selftest, smallest_gain, walk
from kernelbraid.audit.timing import Sequential, Step
from kernelbraid.audit.tripwires import scan
from kernelbraid.contract import Source
from kernelbraid.ir.evidence import AuditEvidence, Status

RULE = Sequential()


def pairs(count: int, spread: float) -> list[Pair]:
    rng = random.Random(3)

    def side() -> list[float]:
        return [10 * (1 + rng.gauss(0, spread)) for _ in range(RULE.most)]

    return [(side(), side()) for _ in range(count)]


def test_walk_stops_at_the_first_decision() -> None:
    assert walk(RULE, [5.0] * 8, [10.0] * 8) is Step.PROVEN
    assert walk(RULE, [20.0], [10.0]) is Step.HOPELESS
    assert walk(RULE, [5.0], [10.0]) is Step.CONTINUE


def test_smallest_gain_grows_with_noise_and_is_proven_in_its_share() -> None:
    quiet, noisy = pairs(50, 0.002), pairs(50, 0.02)
    gains = smallest_gain(RULE, quiet), smallest_gain(RULE, noisy)
    assert 0.005 < gains[0] < gains[1] < 0.5
    for trials, gain in zip((quiet, noisy), gains, strict=True):
        proven = [walk(RULE, [ms * (1 - gain) for ms in ours], theirs) for ours, theirs in trials]
        assert proven.count(Step.PROVEN) >= 0.8 * len(trials)


def test_identical_sources_are_hardly_ever_proven() -> None:
    proven = sum(walk(RULE, *pair) is Step.PROVEN for pair in pairs(300, 0.03))
    assert proven <= 3


def test_passed() -> None:
    good = {"unexpected": [], "promoted_exploits": 0, "false_promotions": 3, "trials": 300}
    assert passed(good)
    assert not passed({**good, "false_promotions": 4})
    assert not passed({**good, "promoted_exploits": 1})
    assert not passed({**good, "unexpected": ["hung"]})
    assert passed({**good, "trials": 0, "false_promotions": 0})


def test_fixtures_are_distinct_and_parse() -> None:
    honest = Source("def attention(q, out):\n    out[...] = q\n")
    names = [fixture.name for fixture in FIXTURES]
    assert len(set(names)) == len(names) >= 25
    for fixture in FIXTURES:
        source = fixture.source(honest, ["attention"])
        tree = ast.parse(source.text)
        assert {"_exploit", "attention"} <= {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    with pytest.raises(ValueError, match="no fixture 'kind'"):
        named(["kind"])


def test_fixtures_that_expect_a_tripwire_alone_touch_one() -> None:
    honest = Source("def attention(q, out):\n    out[...] = q\n")
    for fixture in FIXTURES:
        found = scan(fixture.source(honest, ["attention"]).text)
        if fixture.expected == (Status.TRIPWIRE,):
            assert found, fixture.name
        if fixture.name.endswith("_hidden"):
            assert not found, f"{fixture.name} is not hidden: {found[0]}"


def test_cheapest_workloads_differ_in_phase() -> None:
    workloads = cheapest(ops.get("attention"))
    assert len({each.phase for each in workloads}) == len(workloads) == 2


def nothing(evidence: AuditEvidence) -> bool:
    return False


@pytest.mark.slow
def test_audits_reject_hostile_candidates() -> None:
    chosen = named(
        ["raising", "counts_calls", "keeps_the_last_answer", "daemonising_hidden", "executes_a_string"]
    )
    document = selftest(ops.get("attention"), nothing, trials=1, fixtures=chosen)
    observed = {each["name"]: each["observed"] for each in document["fixtures"]}
    assert observed["raising"] == "crashed"
    assert observed["counts_calls"] == "bits_unequal"
    assert observed["daemonising_hidden"] == "tampered"
    assert observed["executes_a_string"] == "tripwire"
    assert document["promoted_exploits"] == 0
    assert not {each.name for each in chosen} & set(document["unexpected"])
    assert not psutil.Process().children(), "a hostile candidate left processes behind"


def test_fixtures_are_for_the_cpu() -> None:
    with pytest.raises(ValueError, match="written for the CPU, not for cuda"):
        selftest(ops.get("attention", "cuda"), lambda _: False, trials=0, fixtures=FIXTURES[:1])
    assert for_device("cuda") == () and for_device("cpu") == FIXTURES
