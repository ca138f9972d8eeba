"""Timed programs in shared memory: inputs that change before every batch, and caches that are swept."""

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import psutil

from kernelbraid.audit.buffers import arena_type
from kernelbraid.audit.environment import COLD_CACHES
from kernelbraid.contract import Workload
from kernelbraid.ir.evidence import Environment
from kernelbraid.ops.formats import is_float
from kernelbraid.ops.problem import Array, Operator, Program

Protocol = Literal["cold", "warm"]

BATCH_SECONDS = 0.020
"""Least length of a timed batch of the root; the number of calls follows from it and is then fixed."""
MOST_CALLS = {"cpu": 512, "cuda": 2048}
"""Calls of a batch at most, whatever the root's speed: on a GPU small ones take microseconds."""
ROLLED_BYTES = 32 << 20
"""Inputs up to this size have their rows rolled before a batch; in larger ones elements change places."""
SHARE_OF_MEMORY = 0.7
"""Share of the free memory that pools may take."""
SWAPPED = 2048
"""Pairs of elements that change places in a large input."""
DIGESTED = 8 << 20
"""Bytes of outputs that a core digests at a time."""


class Sweep:
    """Reads four times the last-level cache, every core a part, so that what was used before has left it.

    All cores are also awake then: on a virtual machine, one that was idle answers milliseconds late.
    """

    def __init__(self, cache_bytes: int) -> None:
        cores = len(os.sched_getaffinity(0))
        self._parts = np.array_split(np.ones(COLD_CACHES * cache_bytes // 8, np.uint64), cores)
        self._threads = ThreadPoolExecutor(cores)

    def __call__(self) -> None:
        list(self._threads.map(np.max, self._parts))


def sweep_of(device: str, cache_bytes: int) -> Callable[[], None]:
    """What empties the caches of `cpu` or `cuda`."""
    if device == "cpu":
        return Sweep(cache_bytes)
    from kernelbraid.audit.device import DeviceSweep

    return DeviceSweep(COLD_CACHES * cache_bytes)


class TimedProgram:
    """One workload's calls on inputs that nobody can know in advance.

    All workers that are timed on it share the inputs, read-only to them. `refresh` changes them before a
    batch: floating-point inputs have their rows rolled, or, where they are larger than `ROLLED_BYTES`, random
    elements exchanged; integers stay. So neither a result nor anything derived from a large input can be kept
    from an earlier call.

    Args:
        workload: what is timed.
        program: its calls, distinct ones; a batch makes all of them.
        repeats: times that a batch goes through the calls.
        bound_ms: the least time of one call that the machine allows.
        device: `cpu` or `cuda`.
        protocol: `cold`, the caches are swept before every batch; or `warm`.
    """

    def __init__(
        self,
        workload: Workload,
        program: Program,
        repeats: int,
        bound_ms: float,
        device: str = "cpu",
        protocol: Protocol = "cold",
    ) -> None:
        self.workload = workload
        self.device = device
        self.protocol = protocol
        self.repeats = repeats
        self.bound_ms = bound_ms
        self.inputs = arena_type(device).holding(program.inputs, "inputs")
        self.inputs.seal()
        self.program = Program(
            inputs=self.inputs.arrays,
            state=program.state,
            outputs=program.outputs,
            calls=program.calls,
            constant_axes=program.constant_axes,
        )
        self._rolled: dict[str, Array] = {}
        self._swapped: list[str] = []
        for name, array in program.inputs.items():
            if is_float(array.dtype) and array.shape[0] > 1:
                if array.nbytes <= ROLLED_BYTES and np.isfinite(array).all():
                    self._rolled[name] = array
                else:
                    self._swapped.append(name)
        self._undo: list[tuple[Array, Array, Array]] = []
        self.refresh(secrets.randbits(63))

    @property
    def calls(self) -> int:
        """Calls of one batch."""
        return len(self.program.calls) * self.repeats

    def refresh(self, seed: int) -> None:
        """Bring the inputs into the state that `seed` names, whatever state they are in."""
        rng = np.random.default_rng(seed)
        for name, master in self._rolled.items():
            shift = int(rng.integers(1, master.shape[0]))
            target = self.inputs.arrays[name]
            target[:shift] = master[-shift:]
            target[shift:] = master[:-shift]
        for array, left, right in self._undo:
            array[left], array[right] = array[right], array[left]
        self._undo = []
        for name in self._swapped:
            flat = self.inputs.arrays[name].reshape(-1)
            places = np.unique(rng.integers(0, flat.size, 2 * SWAPPED))
            places = rng.permutation(places[np.isfinite(flat[places])])
            half = len(places) // 2
            left, right = places[:half], places[half : 2 * half]
            flat[left], flat[right] = flat[right], flat[left]
            self._undo.append((flat, left, right))
        self.inputs.push()


def digest(arrays: Sequence[Array]) -> bytes:
    """SHA-256 of several contiguous arrays: of the digests of their pieces, taken side by side."""
    pieces = []
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        pieces += [flat[at : at + DIGESTED] for at in range(0, max(1, flat.size), DIGESTED)]
    if len(pieces) == 1:
        return _sha256(pieces[0])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return hashlib.sha256(b"".join(threads.map(_sha256, pieces))).digest()


def _sha256(piece: Array) -> bytes:
    return hashlib.sha256(piece.data).digest()


@dataclass(frozen=True, slots=True)
class Machine:
    """What bounds a call from below, and what makes it cold."""

    cache_bytes: int
    flops: float
    """Operations a second."""
    bandwidth: float
    """Bytes a second."""

    @classmethod
    def of(cls, environment: Environment) -> Self:
        return cls(environment.cache_bytes, environment.flops, environment.bandwidth)

    def bound_ms(self, operator: Operator, workload: Workload) -> float:
        """The least milliseconds in which this machine can do the workload's work and move its bytes."""
        cost = operator.cost(workload)
        return 1e3 * max(cost.flops / self.flops, cost.bytes / self.bandwidth)


def calls_of(seconds: float, device: str = "cpu") -> int:
    """Number of calls in a batch, from the root's time for one."""
    needed = max(1, min(MOST_CALLS[device], -int(-BATCH_SECONDS // max(seconds, 1e-9))))
    whole = 64 if device == "cuda" and needed > 64 else 1  # graphs of some of them are replayed
    return -(-needed // whole) * whole


def _require_memory(needed: int) -> None:
    available = psutil.virtual_memory().available
    if needed > available * SHARE_OF_MEMORY:
        raise RuntimeError(
            f"cold timing needs {needed / 2**30:.1f} GiB for pools of {COLD_CACHES} last-level caches each, "
            f"and {available / 2**30:.1f} GiB are free: time fewer workloads, or use fewer cores (taskset)"
        )


def timed_programs(
    operator: Operator,
    workloads: Sequence[Workload],
    machine: Machine,
    seconds: Callable[[Workload], float],
    *,
    protocol: Protocol = "cold",
    contiguous: bool = False,
) -> tuple[TimedProgram, ...]:
    """Make the timed programs of several workloads from fresh entropy.

    Args:
        operator: whose workloads they are.
        workloads: what to time.
        machine: cache size and rates.
        seconds: the root's time for one call of a workload; fixes the number of calls for everybody.
        protocol: `cold`, distinct calls over a pool of more than four caches; `warm`, one call repeated.
        contiguous: the form that peers read.

    Raises:
        RuntimeError: the pools need more memory than is there.
    """
    if protocol == "cold":
        _require_memory(len(workloads) * COLD_CACHES * machine.cache_bytes)
    rng = np.random.default_rng(secrets.randbits(128))
    made = []
    for workload in workloads:
        calls = calls_of(seconds(workload), operator.backend)
        variants, pool = (calls, COLD_CACHES * machine.cache_bytes) if protocol == "cold" else (1, 0)
        program = operator.timed(workload, rng, variants, pool, contiguous=contiguous)
        bound = machine.bound_ms(operator, workload)
        repeats = 1 if protocol == "cold" else calls
        made.append(TimedProgram(workload, program, repeats, bound, operator.backend, protocol))
    return tuple(made)
