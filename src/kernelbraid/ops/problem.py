"""How any operator is exercised: problems, layouts, and the programs that they become.

A problem is a set of independent requests with their inputs and nothing about how they are run. A layout says
how: in which regime, in which order, cut into which pieces, on which pages, beside which neighbours. An
operator's `lower` turns both into a program, a list of calls on named buffers, and says where each request's
rows come out. A bitwise relation is then always the same test: one problem, two layouts, equal rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from kernelbraid.contract import Contract, Cost, Regime, Workload

Array = npt.NDArray[np.generic]

WHOLE_PROBLEM = -1
"""The request of a quantity that belongs to all requests together, such as the gradient of a weight."""

InputKind = Literal[
    "normal",
    "heavy_tailed",
    "cancelling",
    "signed_zeros",
    "denormals",
    "saturated",
    "non_finite",
    "captured",
]
INPUT_KINDS: tuple[InputKind, ...] = (
    "normal",
    "heavy_tailed",
    "cancelling",
    "signed_zeros",
    "denormals",
    "saturated",
    "non_finite",
    "captured",
)


@dataclass(frozen=True, slots=True)
class ProblemShape:
    """What a problem is drawn from: everything but the random numbers."""

    constant_axes: tuple[tuple[str, int], ...]
    lengths: tuple[int, ...]
    """Positions of each request, context included."""
    rows: tuple[int, ...]
    """Output rows wanted of each request: its last `rows[b]` positions, at most `lengths[b]`."""
    kind: InputKind = "normal"
    dtype: str = "float32"
    shared_prefix: int = 0
    """Leading positions at which all requests, as far as they go, have the same keys and values."""

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.rows):
            raise ValueError("lengths and rows must have one entry a request")
        if any(not 0 <= r <= n for r, n in zip(self.rows, self.lengths, strict=True)):
            raise ValueError("rows must lie between 0 and the request's length")
        if self.shared_prefix < 0:
            raise ValueError(f"shared_prefix must not be negative, got {self.shared_prefix}")


@dataclass(frozen=True, slots=True)
class Problem:
    """A drawn problem: for each request, its named input arrays (leading axis: positions or rows)."""

    shape: ProblemShape
    requests: tuple[Mapping[str, Array], ...]
    scalars: Mapping[str, float]
    shared: Mapping[str, Array] = field(default_factory=dict)
    """Parameters, the same for all requests."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to run a problem's requests. An operator's `lower` ignores the fields that it cannot use."""

    regime: Regime
    requests: tuple[int, ...]
    """Which requests take part, in call order; alone is `(b,)`, one named twice takes part in two copies."""
    partition: tuple[tuple[int, ...], ...] = ()
    """For each entry of `requests`, the sizes of the pieces its rows are cut into; empty: one piece.

    The t-th call holds the t-th piece of every request that has one.
    """
    page_size: int = 16
    page_seed: int = 0
    """0: pages in ascending order; otherwise the seed of their permutation in the pool."""
    padding: int = 0
    """Extra pages, table columns and rows, all poisoned, that must not matter."""
    poison_seed: int = 1
    """Seed of the NaN payloads in unused slots, tails and unwritten outputs."""
    shared_prefix: int = 0
    """Leading positions, at most the problem's, whose whole pages are stored once for all requests."""


@dataclass(frozen=True, slots=True)
class View:
    """A slice along the leading axis of a buffer; the whole buffer by default."""

    buffer: str
    start: int = 0
    stop: int | None = None


Argument = View | int | float | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an implementation's entry point, by keyword."""

    entry_point: str
    arguments: Mapping[str, Argument]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where a request's rows come out: `start:stop` of a buffer's `axis` are its rows from `first_row` on.

    A quantity of `WHOLE_PROBLEM` has rows of its own number; its name tells which requests took part.
    """

    quantity: str
    buffer: str
    axis: int
    start: int
    stop: int
    request: int
    first_row: int
    leading: int = 1
    """Leading axes of the buffer that count as one, such as the pages and slots of a cache."""


@dataclass(frozen=True, slots=True)
class Program:
    """Calls on named buffers. Inputs are read-only to the implementation, state and outputs are written."""

    inputs: Mapping[str, Array]
    state: Mapping[str, Array]
    """Initial contents of buffers that calls read and write, such as a KV cache."""
    outputs: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype; poisoned before the first call."""
    calls: tuple[Call, ...]
    spans: tuple[RowSpan, ...] = ()
    constant_axes: Mapping[str, int] = field(default_factory=dict)


Rows = dict[tuple[str, int], Array]
"""(quantity, request) -> rows along the leading axis, in the request's own order."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's implementation that a benchmark runs beside ours."""

    name: str
    entry_point: str
    phases: tuple[Regime, ...]
    module: str = ""
    """The module that it needs: without it the peer is left out."""
    uniform: bool = False
    """Whether it takes only requests of equal lengths."""


class Timed(Protocol):
    def __call__(
        self,
        workload: Workload,
        rng: np.random.Generator,
        variants: int,
        pool_bytes: int,
        *,
        contiguous: bool,
    ) -> Program: ...


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator on one backend, as audit, search and command line see it. Built in its `spec.py`."""

    name: str
    backend: str
    """`cpu` or `cuda`."""
    contract: Contract
    files: tuple[str, ...]
    """Names of the shipped implementations in the operator's folder, the default one first."""
    entry_points: tuple[str, ...]
    regimes: tuple[Regime, ...]
    grids: Mapping[str, tuple[Workload, ...]]
    """Named lists of workloads; a study's default is `study`."""
    draw: Callable[[ProblemShape, np.random.Generator], Problem]
    lower: Callable[[Problem, Layout], Program]
    reference: Callable[[Problem], Rows]
    """float64 rows of every request, computed by the oracle."""
    vendor: Callable[[Problem], Rows]
    """The same rows from the vendor's kernel in the problem's dtype; quantities that it lacks are absent."""
    cost: Callable[[Workload], Cost]
    load_axes: Callable[[ProblemShape, Layout], dict[str, int]]
    """The axes that an implementation's `schedule` is asked with for such a call."""
    timed: Timed
    """Program of `variants` distinct calls of a workload: own queries and page permutations over one pool.

    The pool has at least `pool_bytes`. `contiguous` gives the form that peers read, with calls of `peer`.
    """
    peers: tuple[Peer, ...]
    peer_file: str
    """File in the operator's folder with the peers' entry points; needs torch."""
    scopes: tuple[Mapping[str, int], ...] = ()
    """Sets of constant axes that a verification covers beside those of the grids."""
    figures: tuple[str, ...] = ()
    """Grids whose constant axes a verification leaves out: a benchmark of them checks its own."""
    left_to_full: tuple[Mapping[str, int], ...] = ()
    """Scopes whose tensors are so large that a screening verification leaves them out."""
    kinds: tuple[InputKind, ...] = INPUT_KINDS
    """Kinds of numbers that `draw` knows."""

    def constant_axes(self, workload: Workload) -> dict[str, int]:
        """Return a workload's values of the contract's constant axes; raises ValueError if it lacks one."""
        axes: dict[str, int] = {}
        for name in [axis.name for axis in self.contract.axes if axis.constant]:
            value = workload.shape.get(name)
            if not isinstance(value, int):
                raise ValueError(f"workload {workload.name} must give the constant axis {name} as an integer")
            axes[name] = value
        return axes
