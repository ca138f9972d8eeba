"""Evidence as it travels: the plain records that an audit writes and the store reads. Standard library only.

The types cannot hold a time for wrong bits: measurements need an accepted verdict on every requirement that
was checked.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How far an audit goes; each includes those before it."""

    SMOKE = "smoke"
    SCREEN = "screen"
    FULL = "full"


class Status(StrEnum):
    """How an audit ended."""

    VERIFIED = "verified"
    """Every requirement of the level holds, and it was timed."""
    STOPPED = "stopped"
    """Requirements of the screen hold; timing ended early, a promotion out of reach. Still a branch point."""
    TRIPWIRE = "tripwire"
    """The source uses something implementations may not use."""
    BUILD_FAILED = "build_failed"
    BITS_UNEQUAL = "bits_unequal"
    """A bitwise relation failed."""
    INACCURATE = "inaccurate"
    WRONG_BITS_ID = "wrong_bits_id"
    """The study pins the root's bits and the candidate declares others."""
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TAMPERED = "tampered"
    """It wrote to its inputs, answered out of turn, left processes behind, or launched in timing what it had
    not launched in the checks."""
    IMPLAUSIBLE = "implausible"
    """Faster than the machine allows, or its own clock disagrees with the judge's."""
    INTERRUPTED = "interrupted"
    """The audit itself was stopped; it is repeated, never counted."""


ACCEPTED = (Status.VERIFIED, Status.STOPPED)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first unequal element of a failed comparison."""

    case: str
    """Id that repeats this case alone."""
    seed: int
    place: str
    """Quantity, request, row and index."""
    left: str
    right: str
    """Value and bits of both sides."""
    ulp: int | None
    """Distance in units in the last place; None where a NaN or infinity is involved."""
    unequal: int
    """Unequal elements in this case."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One requirement, checked."""

    requirement: str
    held: bool
    cases: int
    comparisons: int
    """Elements compared as bits, or elements entering an error norm."""
    error: float | None = None
    """Accuracy bounds: the largest ratio of our error to the bound."""
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """Latency of one workload in one audit: means of fresh processes, paired with root's and incumbent's."""

    workload: str
    phase: str
    weight: float
    limit: float
    protocol: str
    """`cold` or `warm`."""
    candidate_ms: tuple[float, ...]
    root_ms: tuple[float, ...]
    incumbent_ms: tuple[float, ...]
    """One mean a process, same order: entry i of all three was measured interleaved."""
    calls: int
    """Calls timed for the candidate in all."""
    bound_ms: float
    """Least time that this machine's measured rates allow."""

    def __post_init__(self) -> None:
        counts = {len(self.candidate_ms), len(self.root_ms), len(self.incumbent_ms)}
        if len(counts) != 1:
            raise ValueError("a measurement needs one mean a process of candidate, root and incumbent")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel that one call of a timed workload launches on a device."""

    workload: str
    kernel: str
    count: float
    """Launches a call, on average."""
    blocks: int
    """Thread blocks of a launch."""
    threads: int
    """Of a block."""
    resident: int
    """Blocks that the device holds at a time."""

    @property
    def waves(self) -> float:
        """How often the device is filled by a launch."""
        return self.blocks / max(1, self.resident)


@dataclass(frozen=True, slots=True)
class Environment:
    """Fingerprint of the machine and the software an audit ran on."""

    architecture: str
    """`cpu` or a CUDA architecture: what the bits id knows."""
    device: str
    """CPU or GPU model: what certificates and installed winners name."""
    cores: int
    memory_gib: float
    cache_bytes: int
    versions: tuple[tuple[str, str], ...]
    flops: float = 0.0
    """Measured rate, operations a second; 0 where not measured."""
    bandwidth: float = 0.0
    """Measured rate, bytes a second."""

    def comparable(self, other: "Environment") -> bool:
        """Whether ratios measured in both may be compared."""
        return self.architecture == other.architecture and self.versions == other.versions


@dataclass(frozen=True, slots=True)
class AuditEvidence:
    """Everything one audit of one implementation found."""

    job: str
    """Id of the request this answers; the store records each once."""
    implementation: str
    """SHA-256 of the source that was audited."""
    root: str
    incumbent: str
    level: Level
    status: Status
    reason: str
    """One sentence, for people; empty when verified."""
    bits_id: str | None
    numerics: tuple[tuple[str, int], ...]
    verdicts: tuple[Verdict, ...]
    measurements: tuple[Measurement, ...]
    specialisations: tuple[str, ...]
    """Compiled specialisations that the checks launched."""
    seconds: tuple[tuple[str, float], ...]
    """(stage, wall seconds): where the time went."""
    seed: int
    """Entropy of this audit's inputs, revealed afterwards."""
    environment: Environment
    harness: str
    """Hash of the code that judged."""
    output: str = ""
    """What the worker printed, capped."""
    started: float = 0.0
    """Unix time, seconds."""
    launches: tuple[Launch, ...] = ()
    """What a call of each timed workload launches; empty where the device has no graphs."""

    def __post_init__(self) -> None:
        if self.measurements and (self.status not in ACCEPTED or not all(v.held for v in self.verdicts)):
            raise ValueError("evidence cannot hold a time unless every requirement that was checked holds")
        if self.status in ACCEPTED and not (self.verdicts and all(v.held for v in self.verdicts)):
            raise ValueError("accepted evidence needs a held verdict on every requirement")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "AuditEvidence":
        """Rebuild a record written by `to_json`; raises ValueError on anything malformed."""
        try:
            for name in ("job", "implementation", "root", "incumbent", "reason", "harness", "output"):
                if not isinstance(data[name], str):
                    raise ValueError(f"{name} of audit evidence must be a text, got {data[name]!r}")
            return cls(
                **{
                    **data,
                    "started": float(data["started"]),
                    "seed": int(data["seed"]),
                    "level": Level(data["level"]),
                    "status": Status(data["status"]),
                    "numerics": _pairs(data["numerics"]),
                    "seconds": _pairs(data["seconds"]),
                    "specialisations": tuple(data["specialisations"]),
                    "verdicts": tuple(verdict_from_json(item) for item in data["verdicts"]),
                    "measurements": tuple(_measurement(item) for item in data["measurements"]),
                    "launches": tuple(Launch(**item) for item in data.get("launches", ())),
                    "environment": environment_from_json(data["environment"]),
                }
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a record of audit evidence: {error}") from error


def _pairs(items: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in items)


def verdict_from_json(item: Mapping[str, Any]) -> Verdict:
    """Rebuild a verdict from its JSON form."""
    difference = item["difference"]
    return Verdict(**{**item, "difference": Difference(**difference) if difference else None})


def _measurement(item: Mapping[str, Any]) -> Measurement:
    means = {key: tuple(item[key]) for key in ("candidate_ms", "root_ms", "incumbent_ms")}
    return Measurement(**{**item, **means})


def environment_from_json(item: Mapping[str, Any]) -> Environment:
    """Rebuild an environment fingerprint from its JSON form."""
    return Environment(**{**item, "versions": _pairs(item["versions"])})


@dataclass(frozen=True, slots=True)
class Certificate:
    """Requirements held by one implementation on one environment, with the specialisations it launched."""

    operator: str
    contract: str
    """Contract hash."""
    implementation: str
    """SHA-256 of the source."""
    file: str
    """Name of the source in the operator's folder."""
    bits_ids: tuple[tuple[str, str], ...]
    """(constant axes and dtype, bits id)."""
    verdicts: tuple[Verdict, ...]
    specialisations: tuple[str, ...]
    environment: Environment
    harness: str
    seed: int
    issued: float = field(default=0.0)

    def dumps(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def loads(cls, text: str) -> "Certificate":
        """Rebuild a certificate; raises ValueError on anything malformed."""
        try:
            data = json.loads(text)
            return cls(
                **{
                    **data,
                    "bits_ids": _pairs(data["bits_ids"]),
                    "verdicts": tuple(verdict_from_json(item) for item in data["verdicts"]),
                    "specialisations": tuple(data["specialisations"]),
                    "environment": environment_from_json(data["environment"]),
                }
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"not a certificate: {error}") from error
