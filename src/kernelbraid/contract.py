"""Numerical contracts: what an operator computes, to the bit, and what may change without changing the bits.

Everything here is frozen and hashed by content. Documentation, tests, the audit, promotion and certificates
read the same records; nothing about an operator's numbers is stated anywhere else.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Literal

Regime = Literal["prefill", "chunked_prefill", "decode", "update", "backward"]
REGIMES: tuple[Regime, ...] = ("prefill", "chunked_prefill", "decode", "update", "backward")

KnobValue = int | str


def content_hash(record: object) -> str:
    """Return the SHA-256 (hex) of a JSON-able record, independent of key order."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class KnobKind(StrEnum):
    NUMERIC = "numeric"
    """Its value changes bits, and is part of the bits id."""
    SCHEDULE = "schedule"
    """Its value cannot change bits; a relation rejects an implementation for which it does."""


class BitPolicy(StrEnum):
    PINNED = "pinned"
    """Candidates keep the root's bits id: certificates and recorded log-probabilities stay valid."""
    MUTUAL = "mutual"
    """A candidate may have a bits id of its own, in which all regimes agree."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of an operator's domain, limits inclusive."""

    name: str
    low: int
    high: int
    constant: bool
    """Constant axes belong to the model and to the bits id; the others follow load, and bits may not."""
    choices: tuple[int, ...] | None = None
    doc: str = ""

    def check(self, value: int) -> None:
        """Raise ValueError, naming the axis and its limit, if `value` lies outside."""
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{self.name} must be one of {self.choices}, got {value}")
        if not self.low <= value <= self.high:
            raise ValueError(f"{self.name} must be between {self.low} and {self.high}, got {value}")


@dataclass(frozen=True, slots=True)
class Knob:
    """A numeric knob of a contract: a constant of the reduction order."""

    name: str
    choices: tuple[int, ...]
    default: int
    doc: str


@dataclass(frozen=True, slots=True)
class RoundingPoint:
    """A place where a number is rounded, and to what."""

    place: str
    rounding: str


@dataclass(frozen=True, slots=True)
class ElementaryOperation:
    """An operation between two rounding points, with its instruction or its written-out definition."""

    name: str
    definition: str
    coefficients: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Tables of a written-out function: (table name, hexadecimal float literals in ascending powers)."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A feature that the contract does not cover yet; the public function refuses it by name."""

    feature: str
    reason: str


@dataclass(frozen=True, slots=True)
class Relation:
    """A bitwise equality between two ways of computing the same numbers."""

    name: str
    statement: str
    regimes: tuple[Regime, ...]


HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of one rounding to nearest."""


@dataclass(frozen=True, slots=True)
class AccuracyBound:
    """Error to float64: at most `factor` times the vendor's, of a single row or case `gross` times.

    `floor` is a relative error that is allowed anyway; or, where they are given, so many `half_ulps` of the
    compute dtype, each the largest relative error of one rounding to it. `audit/accuracy.py` has the
    statistics.
    """

    quantity: str
    factor: float
    floor: float
    regimes: tuple[Regime, ...]
    half_ulps: float = 0.0
    gross: float = 3.0

    def least(self, dtype: str) -> float:
        """The relative error that is always allowed, where nothing cancels."""
        return max(self.floor, self.half_ulps * HALF_ULP[dtype])


@dataclass(frozen=True, slots=True)
class Requirement:
    """What an audit gives a verdict on: a relation or an accuracy bound in one regime."""

    id: str
    kind: Literal["relation", "accuracy"]
    name: str
    regime: Regime


@dataclass(frozen=True, slots=True)
class Contract:
    """The numerical contract of one operator on one kind of hardware."""

    operator: str
    version: int
    dtypes: tuple[str, ...]
    axes: tuple[Axis, ...]
    exclusions: tuple[Exclusion, ...]
    rounding_points: tuple[RoundingPoint, ...]
    elementary_operations: tuple[ElementaryOperation, ...]
    reduction_orders: tuple[tuple[str, str], ...]
    """(sum, canonical order) for every sum."""
    special_values: tuple[tuple[str, str], ...]
    """(case, policy): signed zeros, denormals, NaN, empty inputs."""
    knobs: tuple[Knob, ...]
    relations: tuple[Relation, ...]
    accuracy: tuple[AccuracyBound, ...]
    canonical_nan: bool = False
    """Every NaN of a result is the positive quiet one without payload: no operand order shows in it."""

    @property
    def name(self) -> str:
        return f"{self.operator}/{self.version}"

    @property
    def hash(self) -> str:
        """SHA-256 of everything the contract states."""
        return content_hash(asdict(self))

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """Every relation and accuracy bound, one entry a regime, in the contract's order."""
        return tuple(self._requirements())

    def _requirements(self) -> Iterator[Requirement]:
        for relation in self.relations:
            for regime in relation.regimes:
                yield Requirement(f"{self.name}/{relation.name}/{regime}", "relation", relation.name, regime)
        for bound in self.accuracy:
            for regime in bound.regimes:
                name = f"accuracy_{bound.quantity}"
                yield Requirement(f"{self.name}/{name}/{regime}", "accuracy", name, regime)

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        known = ", ".join(axis.name for axis in self.axes)
        raise ValueError(f"{self.operator} has no axis {name!r}; it has {known}")

    def check_numerics(self, numerics: Mapping[str, int]) -> None:
        """Raise ValueError unless `numerics` gives each numeric knob, and nothing else, a lawful value."""
        known = {knob.name: knob for knob in self.knobs}
        if set(numerics) != set(known):
            raise ValueError(f"numerics must name exactly {sorted(known)}, got {sorted(numerics)}")
        for name, value in numerics.items():
            if type(value) is not int or value not in known[name].choices:
                raise ValueError(f"numeric knob {name} must be one of {known[name].choices}, got {value!r}")

    def bits_id(
        self, numerics: Mapping[str, int], dtype: str, constant_axes: Mapping[str, int], architecture: str
    ) -> str:
        """Return the identity of the bits: on one architecture, equal ids mean equal bits.

        Args:
            numerics: value of every numeric knob.
            dtype: one of the contract's dtypes.
            constant_axes: value of every constant axis.
            architecture: `cpu`, or a CUDA architecture such as `sm_90`.
        """
        self.check_numerics(numerics)
        if dtype not in self.dtypes:
            raise ValueError(f"dtype must be one of {self.dtypes}, got {dtype!r}")
        constant = {axis.name for axis in self.axes if axis.constant}
        if set(constant_axes) != constant:
            given = sorted(constant_axes)
            raise ValueError(f"constant_axes must name exactly {sorted(constant)}, got {given}")
        operations = [asdict(operation) for operation in self.elementary_operations]
        stated = [self.operator, self.version, dict(numerics), operations, dtype]
        return content_hash([*stated, dict(constant_axes), architecture])[:16]


@dataclass(frozen=True, slots=True)
class Workload:
    """A concrete shape with a phase, a weight and a slowdown limit.

    `axes` holds integers, or tuples of integers where the shape is ragged (one entry a request).
    """

    phase: Regime
    axes: tuple[tuple[str, int | tuple[int, ...]], ...]
    weight: float = 1.0
    """Calls per reinforcement-learning step."""
    limit: float = 1.05
    """Largest allowed latency as a multiple of the root's."""

    def __post_init__(self) -> None:
        if self.phase not in REGIMES:
            raise ValueError(f"phase must be one of {REGIMES}, got {self.phase!r}")
        if not self.weight > 0 or not self.limit > 0:
            raise ValueError(f"weight and limit must be positive, got {self.weight} and {self.limit}")

    @property
    def name(self) -> str:
        """A readable identity: phase and axes."""
        parts = []
        for axis, value in self.axes:
            if isinstance(value, tuple):
                parts.append(f"{axis}={min(value, default=0)}..{max(value, default=0)}x{len(value)}")
            else:
                parts.append(f"{axis}={value}")
        return f"{self.phase}[{','.join(parts)}]"

    @property
    def shape(self) -> dict[str, int | tuple[int, ...]]:
        return dict(self.axes)

    def flat(self) -> dict[str, object]:
        """The form scripts read: phase, then axes; ragged axes as lists."""
        axes = {name: list(value) if isinstance(value, tuple) else value for name, value in self.axes}
        return {"phase": self.phase, **axes}


def left_to_full(workloads: Iterable[Workload]) -> frozenset[Regime]:
    """Regimes that a screen leaves to the full audit: gradients, where no workload asks for them."""
    gradients: frozenset[Regime] = frozenset(("backward",))
    return gradients - {workload.phase for workload in workloads}


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work a workload needs: operations and bytes moved to and from memory."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Source:
    """One implementation: a Python source file, identified by the SHA-256 of its bytes."""

    text: str
    label: str = ""
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha256", hashlib.sha256(self.text.encode()).hexdigest())

    @property
    def short(self) -> str:
        """The first twelve digits of the hash, as shown to people."""
        return self.sha256[:12]
