"""Evidence written by hand, for tests of what is decided from it."""

from collections.abc import Sequence
from dataclasses import replace

from kernelbraid.ir.evidence import (
    AuditEvidence,
    Difference,
    Environment,
    Level,
    Measurement,
    Status,
    Verdict,
)

ENVIRONMENT = Environment("cpu", "Fake CPU", 2, 8.0, 1 << 25, (("python", "3"),))
ROOT, INCUMBENT, CANDIDATE = "a" * 64, "b" * 64, "c" * 64
SPREAD = (0.999, 1.0, 1.001, 1.0)
"""Process means of one side, as multiples."""


def measurement(
    workload: str,
    ratio: float,
    *,
    to_root: float | None = None,
    weight: float = 1.0,
    limit: float = 1.05,
    spread: Sequence[float] = SPREAD,
) -> Measurement:
    """A workload at `ratio` of the incumbent (10 ms) and at `to_root` of the root, by default the same."""
    root_ms = 10.0 * ratio / (ratio if to_root is None else to_root)
    return Measurement(
        workload=workload,
        phase="decode",
        weight=weight,
        limit=limit,
        protocol="cold",
        candidate_ms=tuple(10.0 * ratio * each for each in spread),
        root_ms=tuple(root_ms for _ in spread),
        incumbent_ms=tuple(10.0 for _ in spread),
        calls=20,
        bound_ms=0.1,
    )


def audit(
    *measurements: Measurement,
    level: Level = Level.SCREEN,
    status: Status = Status.VERIFIED,
    broken: str | None = None,
    **changes: object,
) -> AuditEvidence:
    verdicts = [Verdict("toy/1/batch/decode", broken != "batch", 3, 100)]
    if broken == "batch":
        difference = Difference("toy/1", 1, "out 0", "1", "2", 1, 5)
        verdicts = [replace(verdicts[0], difference=difference)]
    evidence = AuditEvidence(
        job=f"request-{level}",
        implementation=CANDIDATE,
        root=ROOT,
        incumbent=INCUMBENT,
        level=level,
        status=status,
        reason="" if status is Status.VERIFIED else "the reason",
        bits_id="1111",
        numerics=(("chunk", 512),),
        verdicts=tuple(verdicts),
        measurements=measurements,
        specialisations=(),
        seconds=(("screen", 1.0),),
        seed=1 if level is Level.SCREEN else 2,
        environment=ENVIRONMENT,
        harness="h" * 64,
    )
    return replace(evidence, **changes)  # type: ignore[arg-type]
