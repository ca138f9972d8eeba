"""Timing by rounds: fresh processes of every contender, interleaved batches, one process active at a time."""

import math
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from kernelbraid.audit.pools import TimedProgram, digest
from kernelbraid.audit.process import LoadedProgram, Worker, WorkerFailure
from kernelbraid.contract import Source
from kernelbraid.ir.evidence import Status
from kernelbraid.ops.formats import bits_type, information, is_float
from kernelbraid.ops.problem import Array, Program

ROLES = ("root", "incumbent", "candidate")
BATCHES = {"cpu": 2, "cuda": 4}
"""Batches of each contender in a round, half of them in reverse order: a GPU's are shorter than its start."""
EMPTY_BATCHES = 5
"""Batches without a call; the shortest is what a request costs by itself."""
ESTIMATES = 3
"""Tries of the first estimate of a call's time; the shortest counts."""
SHORT_SECONDS = 2e-3
"""On a device with graphs, a shorter call is estimated again by `REPEATED` in one graph."""
REPEATED = 64
DISTANCE = {2: 1.0, 4: 32.0, 8: 32.0}
"""By bytes of a number: how many roundings, as a share of the norm, timed outputs may lie from the root's."""


Clock = tuple[float, float]
"""Seconds of one batch by the judge's clock, less an empty batch, and by the worker's own."""


class ContenderFailure(RuntimeError):  # noqa: N818 - whose failure it is
    """A contender's worker failed while it was timed."""

    def __init__(self, name: str, failure: WorkerFailure) -> None:
        super().__init__(f"{name}: {failure.reason}")
        self.name = name
        self.failure = failure


class TooSlow(Exception):  # noqa: N818 - a result
    """A batch took so much longer than the root's that no round is worth finishing."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An implementation to be timed beside others.

    `like` names the contender whose output bits it must repeat; `twin` asks for a record of its outputs,
    which another process of its own must repeat.
    """

    name: str
    source: Source
    entry_points: tuple[str, ...] | Mapping[str, str]
    programs: tuple[TimedProgram, ...]
    """One a workload, in the same order for all contenders."""
    like: str | None = None
    twin: bool = False
    watched: bool = False
    """Ask for the compiled specialisations after each round."""


def contenders_of(
    sources: Sequence[Source],
    entry_points: tuple[str, ...],
    programs: tuple[TimedProgram, ...],
    agrees: bool,
    separate: bool,
) -> tuple[list[Contender], dict[str, str]]:
    """Who is timed, and which contender stands for each role.

    Args:
        sources: of the root, the incumbent and the candidate.
        entry_points: the operator's.
        programs: what they are timed on.
        agrees: the candidate has the root's bits id, so that its timed outputs must have the root's bits.
        separate: equal sources get processes of their own all the same.
    """
    of: dict[str, str] = {}
    contenders: list[Contender] = []
    for role, source in zip(ROLES, sources, strict=True):
        same = [] if separate else [c.name for c in contenders if c.source.sha256 == source.sha256]
        of[role] = same[0] if same else role
        if not same:
            judged = role == "candidate"
            like, twin = ("root", False) if agrees else (None, True)
            contenders.append(
                Contender(
                    role, source, entry_points, programs, like if judged else None, judged and twin, judged
                )
            )
    return contenders, of


@dataclass(frozen=True, slots=True)
class Block:
    """Batches of all contenders on equal inputs: what a twin must repeat."""

    program: TimedProgram
    seed: int
    outputs: bytes
    """Digest of what the contender with a twin wrote."""


@dataclass(frozen=True, slots=True)
class Round:
    """One fresh process of every contender."""

    ms: Mapping[str, tuple[float, ...]]
    """Contender -> mean milliseconds of one call, one entry a workload."""
    clocks: Mapping[str, tuple[tuple[Clock, ...], ...]]
    """Contender -> both clocks of every batch, one entry a workload."""
    blocks: tuple[Block, ...]
    specialisations: Mapping[str, tuple[str, ...]]
    """Of the watched contenders."""


@dataclass(slots=True)
class _Entry:
    """A contender's process in one round."""

    contender: Contender
    worker: Worker
    loaded: list[LoadedProgram] = field(default_factory=list)
    empty: float = 0.0

    def arrays(self, index: int) -> list[Array]:
        names = self.contender.programs[index].program.outputs
        return [self.loaded[index].memory.arrays[name] for name in names]


class Rounds:
    """Times contenders round by round.

    Args:
        contenders: the first one is the root, by whose batches the others are found too slow.
        start: starts a worker of a contender.
        sweep: empties the caches; called before every batch of a program of the `cold` protocol.
        too_slow: a workload of which every batch takes this many times the root's ends the timing.
        ahead: rounds whose processes are started together, where starting one takes long.

    Raises (from every method): ContenderFailure; TooSlow.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        start: Callable[[Contender], Worker],
        sweep: Callable[[], None],
        too_slow: float = math.inf,
        ahead: int = 1,
    ) -> None:
        self._contenders = tuple(contenders)
        self._start = start
        self._sweep = sweep
        self._too_slow = too_slow
        self._rng = np.random.default_rng(secrets.randbits(64))
        self._ahead = ahead
        self._importing: list[list[_Entry]] = []
        self._ready: list[list[_Entry]] = []
        self._entries: list[_Entry] = []
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for group in (*self._importing, *self._ready):
            _end(group)
        self._importing, self._ready = [], []
        self._end()

    def _end(self) -> None:
        _end(self._entries)
        self._entries = []

    @property
    def have_twin(self) -> bool:
        """Whether a contender's outputs are recorded for another process to repeat."""
        return any(contender.twin for contender in self._contenders)

    def begin(self) -> None:
        """Start the next rounds' processes and let them import, without waiting."""
        if self._importing or self._ready:
            return
        for _ in range(self._ahead):
            self._importing.append([])
            for contender in self._contenders:
                self._importing[-1].append(_Entry(contender, self._start(contender)))
                with _blaming(contender):
                    self._importing[-1][-1].worker.begin_build()

    def measure(self) -> Round:
        """Measure one round: processes begun before or now, warmed up, then timed in quiet."""
        self.begin()
        self._wait_for_imports()
        self._entries = self._ready.pop(0)
        self._warm_up()
        samples: dict[str, list[float]] = {entry.contender.name: [] for entry in self._entries}
        clocks: dict[str, list[tuple[Clock, ...]]] = {name: [] for name in samples}
        blocks: list[Block] = []
        for index in range(len(self._contenders[0].programs)):
            times: dict[str, list[Clock]] = {name: [] for name in samples}
            device = self._contenders[0].programs[index].device
            for order in (self._entries, self._entries[::-1]) * (BATCHES[device] // 2):
                blocks += self._block(index, order, times)
            self._not_too_slow(index, times)
            for entry in self._entries:
                name, program = entry.contender.name, entry.contender.programs[index]
                clocks[name].append(tuple(times[name]))
                samples[name].append(1e3 * statistics.fmean(t for t, _ in times[name]) / program.calls)
        found = {}
        for entry in self._entries:
            if entry.contender.watched:
                with _blaming(entry.contender):
                    found[entry.contender.name] = entry.worker.specialisations()
        self._end()
        self._done += 1
        return Round(
            {name: tuple(ms) for name, ms in samples.items()},
            {name: tuple(batches) for name, batches in clocks.items()},
            tuple(blocks),
            found,
        )

    def _wait_for_imports(self) -> None:
        """All that were started stand still before any is timed."""
        for group in self._importing:
            for entry in group:
                with _blaming(entry.contender):
                    entry.worker.finish()
        self._ready += self._importing
        self._importing = []

    def _warm_up(self) -> None:
        for index in range(len(self._contenders[0].programs)):
            for entry in self._entries:
                program = entry.contender.programs[index]
                with _blaming(entry.contender):
                    loaded = entry.worker.begin_load(
                        program.program, program.inputs, calls=1, capture=program.repeats
                    )
                entry.loaded.append(loaded)
            for entry in self._entries:
                with _blaming(entry.contender):
                    entry.worker.finish()
        empty: list[float] = []
        for entry in self._entries:
            with _blaming(entry.contender):
                empty.append(min(entry.worker.run(entry.loaded[0], count=0) for _ in range(EMPTY_BATCHES)))
        for entry in self._entries:
            entry.empty = min(empty)  # the same for all: nobody gains by a slow one

    def _block(self, index: int, order: Sequence[_Entry], times: dict[str, list[Clock]]) -> Iterator[Block]:
        """One batch of every contender on inputs that nobody has seen."""
        seed = secrets.randbits(63)
        for program in {id(e.contender.programs[index]): e.contender.programs[index] for e in order}.values():
            program.refresh(seed)
        for entry in order:
            times[entry.contender.name].append(self._batch(entry, index))
        by_name = {entry.contender.name: entry for entry in order}
        for entry in order:
            contender = entry.contender
            if contender.like is not None:
                _equal_bits(entry, by_name[contender.like], index)
            if contender.twin:
                root = by_name[self._contenders[0].name]
                if self._done == 0 and entry is not root:
                    _near_the_root(entry, root, index)
                yield Block(contender.programs[index], seed, digest(entry.arrays(index)))

    def _batch(self, entry: _Entry, index: int) -> Clock:
        entry.loaded[index].reset(self._rng)
        if entry.contender.programs[index].protocol == "cold":
            self._sweep()
        with _blaming(entry.contender):
            entry.worker.begin_run(entry.loaded[index], entry.contender.programs[index].repeats)
            seconds, theirs = entry.worker.finish_run()
        return max(seconds - entry.empty, seconds / 2), theirs

    def _not_too_slow(self, index: int, times: Mapping[str, list[Clock]]) -> None:
        root = max(ours for ours, _ in times[self._contenders[0].name])
        for contender in self._contenders:
            slower = min(ours for ours, _ in times[contender.name]) / root
            if slower > self._too_slow:
                workload = contender.programs[index].workload.name
                raise TooSlow(f"it takes {slower:.1f} times the root's time for {workload}")


def _end(entries: Sequence[_Entry]) -> None:
    for entry in entries:
        entry.worker.kill()


@contextmanager
def _blaming(contender: Contender) -> Iterator[None]:
    try:
        yield
    except WorkerFailure as failure:
        raise ContenderFailure(contender.name, failure) from failure


def _rejection(entry: _Entry, status: Status, reason: str) -> ContenderFailure:
    return ContenderFailure(entry.contender.name, entry.worker.fail(status, reason))


def _equal_bits(entry: _Entry, other: _Entry, index: int) -> None:
    for ours, theirs in zip(entry.arrays(index), other.arrays(index), strict=True):
        width = bits_type(ours.dtype)
        if not np.array_equal(ours.view(width), theirs.view(width)):
            workload = entry.contender.programs[index].workload.name
            reason = f"outputs of timed calls differ from the {other.contender.name}'s in {workload}"
            raise _rejection(entry, Status.BITS_UNEQUAL, reason)


def _near_the_root(entry: _Entry, root: _Entry, index: int) -> None:
    """Other bits than the root's are allowed, other numbers are not."""
    for ours, theirs in zip(entry.arrays(index), root.arrays(index), strict=True):
        if not is_float(ours.dtype) or not theirs.size:
            continue
        allowed = DISTANCE[ours.dtype.itemsize] * float(information(ours.dtype).eps)
        distance = float(np.linalg.norm(np.subtract(ours, theirs).reshape(-1)))
        norm = float(np.linalg.norm(theirs.reshape(-1)))
        if not distance <= allowed * norm:
            workload = entry.contender.programs[index].workload.name
            reason = (
                f"outputs of timed calls are {distance / max(norm, 1e-300):.1g} of their norm off the root's"
            )
            raise _rejection(entry, Status.INACCURATE, f"{reason} in {workload}")


def call_seconds(worker: Worker, program: Program) -> float:
    """Roughly the seconds of one call, from a program with a single one: fixes the calls of a batch.

    Raises WorkerFailure.
    """
    loaded = worker.load(program)
    seconds = min(worker.run(loaded) for _ in range(ESTIMATES))
    worker.drop(loaded)
    if worker.device == "cpu" or seconds > SHORT_SECONDS:
        return seconds
    loaded = worker.load(program, capture=REPEATED)
    empty = min(worker.run(loaded, count=0) for _ in range(ESTIMATES))
    batch = min(worker.run(loaded, REPEATED) for _ in range(ESTIMATES))
    worker.drop(loaded)
    return max(batch - empty, batch / 2) / REPEATED


def repeat_by_twin(twin: Worker, blocks: Sequence[Block]) -> None:
    """Let a second process of the contender repeat what was timed, in reverse order, and compare the bits.

    Reversed, so that code which changes its ways after some number of calls meets itself honest.

    Raises WorkerFailure where the outputs differ.
    """
    loaded = {}
    for block in reversed(blocks):
        program = block.program
        if id(program) not in loaded:
            loaded[id(program)] = twin.load(program.program, program.inputs, capture=program.repeats)
        program.refresh(block.seed)
        target = loaded[id(program)]
        target.reset(np.random.default_rng(secrets.randbits(64)))
        twin.run(target, program.repeats)
        if digest([target.memory.arrays[name] for name in program.program.outputs]) != block.outputs:
            reason = f"outputs of timed calls differ from those of another process in {program.workload.name}"
            raise twin.fail(Status.BITS_UNEQUAL, reason)
