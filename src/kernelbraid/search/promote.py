"""The promotion rule, from evidence alone, and what becomes of a winner.

A candidate replaces the incumbent if every requirement holds, its aggregate latency lies below the
incumbent's beyond noise, and no workload exceeds its limit against the root; first on the evidence of the
search run, then again on that of a full audit with fresh inputs.
"""

from collections.abc import Iterator, Set
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from kernelbraid import ops
from kernelbraid.audit.environment import fingerprint
from kernelbraid.audit.timing import CONFIDENCE, GAIN, LEAST_ROUNDS
from kernelbraid.contract import BitPolicy, Source
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Certificate, Level, Measurement, Status
from kernelbraid.ir.held_out import HELD_OUT, measured, shown
from kernelbraid.ops import installed
from kernelbraid.search.measured import aggregate, cold, processes, provable, workload_ratio
from kernelbraid.search.study import Study

LIMIT_CONFIDENCE = 0.95
"""One-sided, for a workload's ratio to the root: a limit blocks when even its lower bound exceeds it. So too
for the aggregate of held-out workloads, which must be seen to fall: the judge times until the gain over all
workloads is proven, and so seldom long enough to prove it over these alone at a promotion's confidence."""


KEPT = "held_out: it is no faster, or too slow somewhere, on workloads that proposers do not see"


class Outcome(StrEnum):
    REFUSED = "refused"
    CONFIRM = "confirm"
    """The rule holds on the search run; a full audit must repeat it."""
    GRANTED = "granted"


@dataclass(frozen=True, slots=True)
class Check:
    """One condition of a promotion, with its numbers."""

    name: str
    """`screen/requirements`, `full/aggregate`, `screen/limit/<workload>`, ..."""
    held: bool
    value: float | None
    limit: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A promotion granted or refused, with every check that led to it."""

    outcome: Outcome
    reason: str
    """One sentence: what was proven, or which requirement, workload or statistic blocked it."""
    checks: tuple[Check, ...]
    bits_changed: bool
    """The bits id differs from the incumbent's: under `mutual`, a promotion announces it."""

    @property
    def granted(self) -> bool:
        return self.outcome is Outcome.GRANTED

    @property
    def blocked_by(self) -> str | None:
        """What a refusal rests on: the first check that failed, or `held_out` and no more; or None."""
        if self.granted or not self.blocking:
            return None
        return HELD_OUT if self.blocking[0].startswith(f"{HELD_OUT}/") else self.blocking[0]

    @property
    def blocking(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if not check.held)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def decide(
    screen: AuditEvidence,
    full: AuditEvidence | None = None,
    *,
    incumbent: str,
    root_bits: str | None,
    incumbent_bits: str | None,
    policy: BitPolicy = BitPolicy.MUTUAL,
    held_out: Set[str] = frozenset(),
) -> Decision:
    """Decide on promoting the implementation that `screen` is about.

    Args:
        screen: the search run's evidence.
        full: evidence of a full audit of the same implementation, once there is some.
        incumbent: SHA-256 of the implementation to beat; evidence against another one is refused.
        root_bits: the root's bits id.
        incumbent_bits: the incumbent's bits id.
        policy: whether a bits id other than the root's may win.
        held_out: names of the workloads that proposers do not see. `full` has their times: over them, too,
            the aggregate must fall, by its 95% bound, and no limit be exceeded.

    Returns:
        REFUSED with the first failed check as the reason, CONFIRM where `full` is still missing, or GRANTED.
    """
    checks = list(_checks(screen, incumbent, root_bits, policy))
    if full is not None and all(check.held for check in checks):
        checks.append(_same_subject(screen, full))
        checks.extend(_full_checks(full, incumbent, root_bits, policy, held_out))
    failed = [check for check in checks if not check.held]
    changed = screen.bits_id is not None and screen.bits_id != incumbent_bits
    if failed:
        hidden = failed[0].name.startswith(f"{HELD_OUT}/")
        return Decision(Outcome.REFUSED, KEPT if hidden else failed[0].detail, tuple(checks), changed)
    if full is None:
        return Decision(Outcome.CONFIRM, "holds on the search run; to be confirmed", tuple(checks), changed)
    reason = f"aggregate latency is {aggregate(shown(full, held_out)).ratio:.4f} of the incumbent's"
    if changed:
        reason += f"; bits changed: {incumbent_bits} -> {screen.bits_id}"
    return Decision(Outcome.GRANTED, reason, tuple(checks), changed)


def _full_checks(
    full: AuditEvidence, incumbent: str, root_bits: str | None, policy: BitPolicy, held_out: Set[str]
) -> Iterator[Check]:
    """The conditions on the full audit, first for the workloads that are shown and then for the others."""
    visible = shown(full, held_out)
    if not held_out:
        yield from _checks(full, incumbent, root_bits, policy)
        return
    kept = replace(full, measurements=measured(full, held_out))
    if _stopped_by(full, visible, kept, held_out):
        detail = f"the full audit ended {full.status}: {full.reason}"
        yield Check(f"{HELD_OUT}/status", False, None, None, detail)
        return
    yield from _checks(visible, incumbent, root_bits, policy)
    if full.status in ACCEPTED:
        yield from _speed(kept, HELD_OUT, LIMIT_CONFIDENCE)


def _stopped_by(full: AuditEvidence, visible: AuditEvidence, kept: AuditEvidence, held_out: Set[str]) -> bool:
    """Whether a full audit gave up on the candidate for what it does on held-out workloads alone."""
    if full.status is not Status.STOPPED:
        return False
    if any(name in full.reason for name in held_out):
        return True
    timed = min(processes(visible), processes(kept)) > 0
    return timed and aggregate(visible).ratio < GAIN <= aggregate(kept).ratio


def _checks(
    evidence: AuditEvidence, incumbent: str, root_bits: str | None, policy: BitPolicy
) -> Iterator[Check]:
    """The conditions on one audit, in order, up to the first that leaves the rest without meaning."""
    level = evidence.level.value
    for check in _correctness(evidence, level, incumbent, root_bits, policy):
        yield check
        if not check.held:
            return
    yield from _speed(evidence, level)


def _correctness(
    evidence: AuditEvidence, level: str, incumbent: str, root_bits: str | None, policy: BitPolicy
) -> Iterator[Check]:
    broken = [verdict for verdict in evidence.verdicts if not verdict.held]
    names = ", ".join(verdict.requirement for verdict in broken)
    comparisons = sum(verdict.comparisons for verdict in evidence.verdicts)
    detail = f"{len(evidence.verdicts)} requirements held over {comparisons} comparisons"
    if broken:
        detail = f"the {level} audit broke {names}"
    yield Check(f"{level}/requirements", not broken, float(len(broken)), 0.0, detail)
    accepted = evidence.status is Status.VERIFIED
    ended = f"the {level} audit ended {evidence.status}: {evidence.reason}"
    detail = "verified and timed" if accepted else ended
    yield Check(f"{level}/status", accepted, None, None, detail)
    same = evidence.incumbent == incumbent
    detail = "measured against the incumbent" if same else "measured against a former incumbent"
    yield Check(f"{level}/incumbent", same, None, None, detail)
    if policy is BitPolicy.PINNED:
        kept = evidence.bits_id is not None and evidence.bits_id == root_bits
        other = f"bits id {evidence.bits_id} is not the root's {root_bits}"
        detail = "the bits are the root's" if kept else other
        yield Check(f"{level}/bits", kept, None, None, detail)


def _speed(evidence: AuditEvidence, level: str, confidence: float = CONFIDENCE) -> Iterator[Check]:
    pairs = processes(evidence)
    detail = f"{pairs} process pairs, at least {LEAST_ROUNDS} needed"
    yield Check(f"{level}/processes", pairs >= LEAST_ROUNDS, pairs, LEAST_ROUNDS, detail)
    if pairs < LEAST_ROUNDS:
        return
    gain = aggregate(evidence, confidence=confidence)
    detail = f"aggregate ratio {gain.ratio:.4f}, upper bound {gain.upper:.4f}, must lie below {GAIN}"
    if gain.ratio < GAIN <= gain.upper and confidence == CONFIDENCE:
        least = provable(evidence)
        detail += f"; the smallest gain provable here is {100 * (least or 0.0):.1f}%"
    yield Check(f"{level}/aggregate", gain.upper < GAIN, gain.upper, GAIN, detail)
    for measurement in cold(evidence):
        yield _limit(measurement, level)


def _limit(measurement: Measurement, level: str) -> Check:
    found = workload_ratio(measurement, "root", LIMIT_CONFIDENCE)
    held = not found.lower > measurement.limit
    detail = f"{measurement.workload} at {found.ratio:.3f} of the root, limit {measurement.limit:g}"
    if not held:
        detail += f", exceeded even by the lower bound {found.lower:.3f}"
    return Check(f"{level}/limit/{measurement.workload}", held, found.lower, measurement.limit, detail)


def _same_subject(screen: AuditEvidence, full: AuditEvidence) -> Check:
    held = (
        full.level is Level.FULL
        and full.implementation == screen.implementation
        and full.root == screen.root
        and full.bits_id == screen.bits_id
        and full.seed != screen.seed
        and full.environment.comparable(screen.environment)
    )
    detail = "a full audit of the same source on fresh inputs, in the same environment"
    if not held:
        detail = "the second audit is not a full one of this source on fresh inputs in the same environment"
    return Check("full/subject", held, None, None, detail)


def install(study: Study) -> tuple[Path, Certificate]:
    """Make the study's incumbent the implementation that the public operator finds on this machine.

    Returns:
        The installed file and the certificate beside it.

    Raises:
        ValueError: nothing was promoted, or it was proven under another contract or on another CPU model.
        RuntimeError: the user's data folder cannot be written.
    """
    study.require_contract()
    winner, contract = study.incumbent, study.contract
    if winner == study.root:
        raise ValueError(
            f"{study.folder} has promoted nothing: search on, or keep the shipped implementation"
        )
    proof = study.standings()[winner].full
    assert proof is not None and proof.status is Status.VERIFIED
    evidence = study.whole(proof)
    here = fingerprint(study.store.study.device, rates=False)
    if (evidence.environment.architecture, evidence.environment.device) != (here.architecture, here.device):
        raise ValueError(
            f"{winner[:12]} was proven on {evidence.environment.device} and this machine is {here.device}: "
            "search here, or install it there"
        )
    source = study.store.source(winner)
    certificate = certify(study, evidence, source)
    path = installed.install(
        study.operator.name,
        source,
        architecture=here.architecture,
        device=here.device,
        contract=contract.hash,
        record={"certificate": asdict(certificate), "study": study.store.study.name},
    )
    return path, certificate


def uninstall(operator: str, device: str = "cpu") -> bool:
    """Go back to the shipped implementation on this machine; return whether a winner was installed.

    Raises:
        ValueError: no such operator or device.
        RuntimeError: the user's data folder cannot be written.
    """
    here = fingerprint(device, rates=False)
    return installed.remove(ops.get(operator, device).name, here.architecture, here.device)


def certify(study: Study, evidence: AuditEvidence, source: Source) -> Certificate:
    """Return the certificate that a full audit's evidence amounts to."""
    record, contract = study.store.study, study.contract
    numerics, architecture = dict(evidence.numerics), evidence.environment.architecture
    ids = []
    for axes in record.constant_axes:
        named = " ".join([*(f"{name}={value}" for name, value in axes.items()), record.dtype])
        ids.append((named, contract.bits_id(numerics, record.dtype, axes, architecture)))
    return Certificate(
        operator=study.operator.name,
        contract=contract.hash,
        implementation=source.sha256,
        file=source.label,
        bits_ids=tuple(ids),
        verdicts=evidence.verdicts,
        specialisations=evidence.specialisations,
        environment=evidence.environment,
        harness=evidence.harness,
        seed=evidence.seed,
        issued=evidence.started,
    )
