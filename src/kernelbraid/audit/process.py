"""The judge's end of a worker: an implementation in its own process, built, loaded with programs, run."""

import contextlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernelbraid.audit import worker as worker_file
from kernelbraid.audit.buffers import Arena, Poison, Specifications, arena_type, size_of, specified
from kernelbraid.audit.confined import Confined, Limits, WorkerFailure, limits_of
from kernelbraid.contract import Contract, Source
from kernelbraid.ir.evidence import Status
from kernelbraid.ops.problem import Argument, Array, Program, View

__all__ = ["BuildReport", "Limits", "LoadedProgram", "Worker", "WorkerFailure", "prune_compiled"]

PROGRAMS = {"cpu": "worker.py", "cuda": "device_worker.py"}
"""The script that a worker runs, by device."""
KEPT_BUILDS = 64
"""Sources whose compiled code is kept for later processes, the most recent ones."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What an implementation says of itself."""

    numerics: dict[str, int]
    edges: dict[str, tuple[int, ...]]
    """Load axis -> sizes at which its schedule differs from the size below."""
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """A program in a worker's memory. The arrays are the judge's own view of it."""

    slot: int
    program: Program
    inputs: Arena
    memory: Arena

    def reset(self, rng: np.random.Generator) -> None:
        """Poison the outputs afresh and restore the state; only while the worker stands still."""
        poison = Poison(rng)
        for name in self.program.outputs:
            poison.fill(self.memory.arrays[name])
        for name, contents in self.program.state.items():
            self.memory.arrays[name][...] = contents
        self.memory.push()

    def outputs(self) -> dict[str, Array]:
        """Copies of the output buffers."""
        return {name: self.memory.arrays[name].copy() for name in self.program.outputs}


class Worker(Confined):
    """One implementation in a fresh process.

    Args:
        source: the implementation.
        entry_points: functions it must define; a mapping gives the names by which calls know them.
        scratch: folder under which the worker gets an empty working folder of its own.
        cache: folder for compiled code, kept apart by source, so that later processes of one source reuse it.
        limits: time, memory and output.
        device: `cpu` or `cuda`: where the implementation runs.
        kin: a trusted source whose compiled kernels a first process of this one begins with: Triton finds
            those that are the same in both by their content.

    Every method raises WorkerFailure where the worker crashes, hangs, eats memory or cheats; it is dead then.
    """

    def __init__(
        self,
        source: Source,
        entry_points: Iterable[str] | Mapping[str, str],
        *,
        scratch: Path,
        cache: Path,
        limits: Limits | None = None,
        device: str = "cpu",
        kin: Source | None = None,
    ) -> None:
        self.source = source
        self.device = device
        self._arena = arena_type(device)
        self._running: LoadedProgram | None = None
        self._left = 0
        named = entry_points if isinstance(entry_points, Mapping) else {name: name for name in entry_points}
        self.entry_points = dict(named)
        self._rng = np.random.default_rng(secrets.randbits(64))
        self._file = _written_source(source, cache)
        self._slots = 0
        self._dropped: list[int] = []
        self._forgotten: list[int] = []
        self._leaving: list[Arena] = []
        """Forgotten here; the worker lets go of them with its next request, and they live until then."""
        self._granted: set[int] = set()
        self._rooms: dict[str, Arena] = {}
        compiled = self._file.parent / "compiled"
        if kin is not None and device == "cuda":
            _begin_with(compiled / "triton", cache / _folder(kin) / "compiled" / "triton")
        super().__init__(
            str(Path(worker_file.__file__).with_name(PROGRAMS[device])),
            scratch / f"worker-{secrets.token_hex(6)}",
            {"NUMBA_CACHE_DIR": str(compiled), "TRITON_CACHE_DIR": str(compiled / "triton")},
            limits or limits_of(device),
        )

    def build(
        self, contract: Contract | None = None, constant_axes: Mapping[str, int] | None = None
    ) -> BuildReport:
        """Import the source; given a contract, also ask for its numerics and its schedule's edges."""
        start = time.perf_counter()
        self.begin_build(contract, constant_axes)
        reply = self.finish()
        if contract is None:
            return BuildReport({}, {}, time.perf_counter() - start)
        numerics = reply.get("numerics")
        try:
            if not isinstance(numerics, dict):
                raise TypeError(f"numerics() must return a dict, got {numerics!r}")
            contract.check_numerics(numerics)
            loads = [axis.name for axis in contract.axes if not axis.constant]
            edges = {name: tuple(int(value) for value in reply["edges"][name]) for name in loads}
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise self.fail(Status.BUILD_FAILED, f"build: {error}") from error
        return BuildReport(numerics, edges, time.perf_counter() - start)

    def begin_build(
        self, contract: Contract | None = None, constant_axes: Mapping[str, int] | None = None
    ) -> None:
        """Send the request of `build` without waiting; `finish` waits."""
        axes = contract.axes if contract is not None else ()
        message = {
            "path": str(self._file),
            "entry_points": self.entry_points,
            "constant_axes": dict(constant_axes or {}) if contract is not None else None,
            "axes": [{"name": a.name, "low": a.low, "high": a.high} for a in axes if not a.constant],
        }
        self._ask("build", message, seconds=self.limits.build_seconds)

    def load(self, program: Program, inputs: Arena | None = None, *, capture: int = 0) -> LoadedProgram:
        """Put a program into the worker's memory; arguments as for `begin_load`."""
        loaded = self.begin_load(program, inputs, capture=capture)
        self.finish()
        return loaded

    def execute(self, program: Program) -> dict[str, Array]:
        """Run a program once in memory that is used again by the next, and return copies of its outputs."""
        inputs = self._room("inputs", specified(program.inputs))
        memory = self._room("outputs", {**specified(program.state), **program.outputs})
        _fill(inputs, program)
        loaded = self._begin(program, inputs, memory, len(program.calls))
        self.finish()
        self._collect(loaded)
        self._dropped.append(loaded.slot)
        return loaded.outputs()

    def replay(self, captured: Program, program: Program) -> dict[str, Array]:
        """Capture one program's calls in a graph, replay it on another's contents, and return the outputs.

        Args:
            captured: whose calls are made once and then captured.
            program: with equal calls on buffers of equal shapes; what they hold is put in place before the
                replay.

        Raises:
            ValueError: the calls or the buffers differ.
            RuntimeError: the device has no graphs.
        """
        if self.device != "cuda":
            raise RuntimeError(f"device {self.device} has no graphs to capture calls in")
        require_same_calls(captured, program)
        inputs = self._room("inputs", specified(captured.inputs))
        memory = self._room("outputs", {**specified(captured.state), **captured.outputs})
        _fill(inputs, captured)
        first = self._begin(captured, inputs, memory, len(captured.calls), capture=1)
        self.finish()
        self._collect(first)
        _fill(inputs, program)
        loaded = LoadedProgram(first.slot, program, inputs, memory)
        loaded.reset(self._rng)
        self.run(loaded)
        self._dropped.append(loaded.slot)
        return loaded.outputs()

    def begin_load(
        self, program: Program, inputs: Arena | None = None, *, calls: int = 0, capture: int = 0
    ) -> LoadedProgram:
        """Send the request of `load` without waiting.

        Args:
            program: buffers and calls.
            inputs: its inputs where they already lie in shared memory.
            calls: so many of the first calls are made at once.
            capture: on a device with graphs, make all calls once and capture them, so many times over, in one
                that `run` with that number of repeats replays; others take no notice.
        """
        if inputs is None:
            inputs = self._arena.holding(program.inputs, "inputs")
            inputs.seal()
            inputs.push()
        memory = self._arena.of({**specified(program.state), **program.outputs}, "outputs")
        return self._begin(program, inputs, memory, calls, capture=capture)

    def _begin(
        self, program: Program, inputs: Arena, memory: Arena, calls: int, *, capture: int = 0
    ) -> LoadedProgram:
        self._slots += 1
        loaded = LoadedProgram(self._slots, program, inputs, memory)
        loaded.reset(self._rng)
        descriptors: list[int] = []
        reader = -1
        if inputs.number not in self._granted and inputs.handle is None:
            reader = inputs.reader()
            descriptors.append(reader)
        if memory.number not in self._granted and memory.handle is None:
            descriptors.append(memory.fd)
        message = {
            "slot": loaded.slot,
            "inputs": self._granting(inputs),
            "memory": self._granting(memory),
            "calls": [
                (call.entry_point, {name: _sent(value) for name, value in call.arguments.items()})
                for call in program.calls
            ],
            "first": 0,
            "count": len(program.calls) if capture and self.device == "cuda" else calls,
            "repeats": 1,
            "capture": capture,
        }
        try:
            self._ask("load", message, seconds=self.limits.run_seconds, descriptors=tuple(descriptors))
        finally:
            if reader >= 0:
                os.close(reader)
        return loaded

    def _granting(self, arena: Arena) -> dict[str, Any]:
        """Describe an arena to the worker, which maps it when it hears of it first."""
        new = arena.number not in self._granted
        if new:
            self._granted.add(arena.number)
            self.shared_bytes += arena.size if arena.handle is None else 0
        return {
            "number": arena.number,
            "size": arena.size,
            "arrays": arena.placements,
            "new": new,
            "handle": arena.handle,
        }

    def _forget(self, arena: Arena) -> None:
        if arena.number in self._granted:
            self._granted.remove(arena.number)
            self._forgotten.append(arena.number)
            self._leaving.append(arena)
            self.shared_bytes -= arena.size if arena.handle is None else 0

    def _room(self, what: str, specifications: Specifications) -> Arena:
        """Memory that is kept from program to program, laid out for this one."""
        needed = size_of(specifications)
        arena = self._rooms.get(what)
        if arena is None or arena.size < needed:
            if arena is not None:
                self._forget(arena)
            arena = self._rooms[what] = self._arena(max(needed + needed // 2, 1 << 20), what)
            if what == "inputs":
                arena.seal()
        arena.place(specifications)
        return arena

    def run(
        self, loaded: LoadedProgram, repeats: int = 1, *, first: int = 0, count: int | None = None
    ) -> float:
        """Run a loaded program's calls and return the seconds they took by the judge's clock.

        The worker stands still from the moment it says that it is done until the next request.
        """
        self.begin_run(loaded, repeats, first=first, count=count)
        return self.finish_run()[0]

    def begin_run(
        self, loaded: LoadedProgram, repeats: int = 1, *, first: int = 0, count: int | None = None
    ) -> None:
        """Send the request of `run` without waiting; `finish_run` waits."""
        number = len(loaded.program.calls) - first if count is None else count
        message = {"slot": loaded.slot, "first": first, "count": number, "repeats": repeats}
        self._ask("run", message, seconds=self.limits.run_seconds)
        self._running = loaded

    def finish_run(self) -> tuple[float, float]:
        """Wait for a run; returns (seconds by the judge's clock, seconds by the worker's own)."""
        theirs = self.finish().get("elapsed")
        assert self._running is not None
        self._collect(self._running)
        if not isinstance(theirs, float) or not math.isfinite(theirs):
            raise self.fail(Status.TAMPERED, f"the worker reports {theirs!r} as its elapsed time")
        return self.elapsed, theirs

    def _collect(self, loaded: LoadedProgram) -> None:
        """Bring in what a program wrote, unless it wrote where it may only read."""
        if not loaded.inputs.intact():
            raise self.fail(Status.TAMPERED, "it writes to its inputs")
        loaded.memory.pull()

    def outputs(self, loaded: LoadedProgram) -> dict[str, Array]:
        """Copies of what a loaded program wrote to its outputs."""
        return loaded.outputs()

    def drop(self, loaded: LoadedProgram) -> None:
        """Forget a loaded program; the worker lets go of its memory with its next request."""
        self._dropped.append(loaded.slot)
        self._forget(loaded.inputs)
        self._forget(loaded.memory)

    def specialisations(self) -> tuple[str, ...]:
        """Compiled specialisations in the worker so far, sorted."""
        self._ask("specialisations", {}, seconds=self.limits.run_seconds)
        found = self.finish().get("specialisations")
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise self.fail(Status.TAMPERED, "the worker's list of specialisations is malformed")
        return tuple(found)

    def launches(self, loaded: LoadedProgram) -> tuple[tuple[str, float, int, int, int], ...]:
        """What one call of a program with captured calls launches, on average over its calls.

        Returns:
            Of each kernel its name, launches a call, blocks of a launch, threads of a block, and how many
            blocks the device holds at a time; nothing on a device without graphs.
        """
        self._ask("launches", {"slot": loaded.slot}, seconds=self.limits.run_seconds)
        try:
            return tuple(
                (str(name), float(count), int(blocks), int(threads), int(resident))
                for name, count, blocks, threads, resident in self.finish()["launches"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self.fail(Status.TAMPERED, "the worker's list of launches is malformed") from error

    def finish(self) -> dict[str, Any]:
        """Wait for the answer; the process stands still when this returns."""
        reply = super().finish()
        self._leaving = self._leaving[self._left :]
        self._left = 0
        return reply

    def _ask(
        self, what: str, message: Mapping[str, Any], *, seconds: float, descriptors: tuple[int, ...] = ()
    ) -> None:
        gone = {"drop": self._dropped, "forget": self._forgotten}
        self._dropped, self._forgotten = [], []
        self._left = len(self._leaving)
        self.begin({"do": what, **gone, **message}, seconds=seconds, descriptors=descriptors)


def _sent(value: Argument) -> int | float | list[Any] | None:
    """An argument as JSON carries it: a view is a list."""
    return [value.buffer, value.start, value.stop] if isinstance(value, View) else value


def _fill(inputs: Arena, program: Program) -> None:
    inputs.fill(program.inputs)
    inputs.push()


def require_same_calls(captured: Program, program: Program) -> None:
    """Raise ValueError unless two programs make equal calls on buffers of equal shapes."""
    same = captured.calls == program.calls and captured.outputs == program.outputs
    for ours, theirs in ((captured.inputs, program.inputs), (captured.state, program.state)):
        same = same and specified(ours) == specified(theirs)
    if not same:
        raise ValueError("a graph is replayed on buffers of equal shapes by equal calls")


def prune_compiled(cache: Path) -> None:
    """Remove the oldest folders of compiled code beyond `KEPT_BUILDS`."""
    with contextlib.suppress(OSError):
        folders = sorted(cache.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in folders[KEPT_BUILDS:]:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(source: Source) -> str:
    """Name of a source's folder in the cache."""
    return source.sha256[:32]


def _begin_with(target: Path, origin: Path) -> None:
    """Copy compiled kernels to where there are none yet, whole or not at all."""
    if target.exists() or not origin.is_dir():
        return
    temporary = target.with_name(f"{secrets.token_hex(6)}.tmp")
    with contextlib.suppress(OSError):
        shutil.copytree(origin, temporary)
        temporary.rename(target)
    shutil.rmtree(temporary, ignore_errors=True)


def _written_source(source: Source, cache: Path) -> Path:
    """The source's file in the cache, written once: its time stamp is a key of its compiled code."""
    file = cache / _folder(source) / "implementation.py"
    with contextlib.suppress(FileNotFoundError):
        if file.read_text() == source.text:
            os.utime(file.parent)
            return file
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{secrets.token_hex(6)}.tmp")
    temporary.write_text(source.text)
    os.replace(temporary, file)
    return file
