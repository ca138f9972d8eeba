"""Implementations and peers side by side: fresh processes, interleaved batches, the clock of audits."""

import importlib.util
import secrets
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernelbraid import ops
from kernelbraid.audit.environment import COLD_CACHES
from kernelbraid.audit.measure import (
    Contender,
    ContenderFailure,
    Round,
    Rounds,
    call_seconds,
    repeat_by_twin,
)
from kernelbraid.audit.pools import Machine, Protocol, TimedProgram, sweep_of, timed_programs
from kernelbraid.audit.process import Limits, Worker
from kernelbraid.contract import Source, Workload
from kernelbraid.ir.evidence import Environment
from kernelbraid.ops import installed
from kernelbraid.ops.problem import Operator, Peer

PROCESSES = 3
"""Fresh processes of every contender; a time is the median over their means."""
GROUP_BYTES = {"cpu": 1 << 30, "cuda": 24 << 30}
"""Inputs of the workloads that are measured by the same processes; on a GPU starting one takes seconds."""
GROUP_MOST = {"cpu": 16, "cuda": 8}
"""Workloads of a group at most: what is measured is written group by group, and a GPU's batches of calls take
long to capture."""
LIMITS = Limits(run_seconds=300.0, memory_bytes=8 << 30)


@dataclass(frozen=True, slots=True)
class Row:
    """One workload under one protocol."""

    workload: Workload
    protocol: Protocol
    ms: Mapping[str, float]
    """Contender -> milliseconds of one call."""
    processes_ms: Mapping[str, tuple[float, ...]]
    """Contender -> mean of each process."""
    bound_ms: float
    """Least time that this machine's measured rates allow."""


class SideBySide:
    """Measures named sources of one operator beside its peers.

    Args:
        operator: whose implementations they are.
        sources: name -> source; the first one sets the number of calls of a batch.
        environment: of this machine, with measured rates.
        scratch: folder for workers.
        confirm: name of the source whose timed calls another process must repeat bit for bit.
    """

    def __init__(
        self,
        operator: Operator,
        sources: Mapping[str, Source],
        environment: Environment,
        scratch: Path,
        confirm: str | None = None,
    ) -> None:
        self.operator = operator
        self.sources = dict(sources)
        self.machine = Machine.of(environment)
        self.confirm = confirm
        self.left_out: dict[str, str] = {}
        """Entry point of a peer that failed, and the constant axes for which it did -> why."""
        self._peer_file = ops.source(operator, operator.peer_file)
        self._sweep = sweep_of(operator.backend, environment.cache_bytes)
        self._scratch = scratch

    def worker(self, source: Source, entry_points: Sequence[str] | Mapping[str, str] = ()) -> Worker:
        """Start a process of a source."""
        return Worker(
            source,
            entry_points or self.operator.entry_points,
            scratch=self._scratch / "run",
            cache=installed.home() / "compiled",
            limits=LIMITS,
            device=self.operator.backend,
        )

    def rows(
        self,
        workloads: Sequence[Workload],
        protocols: Sequence[Protocol],
        tell: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Row]:
        """Measure workloads, several by the same processes where their inputs fit into memory together.

        A peer that fails is left out from then on where constant axes are the same.

        Raises:
            ContenderFailure: a source's process failed.
            WorkerFailure: another process gave other bits.
        """
        waiting = list(self._groups(workloads, len(protocols)))
        while waiting:
            group = waiting.pop(0)
            phases = Counter(each.phase for each in group)
            counts = ", ".join(f"{count} {phase}" for phase, count in phases.items())
            tell(f"measuring {' and '.join(protocols)}: {counts}")
            try:
                yield from self._measure(group, protocols)
            except ContenderFailure as failed:
                if failed.name in self.sources:
                    raise
                waiting[:0] = self._without(failed, group)

    def _without(
        self, failed: ContenderFailure, group: tuple[Workload, ...]
    ) -> tuple[tuple[Workload, ...], ...]:
        """What to measure in place of a group in which a peer failed: its parts by axes, or it without."""
        apart: dict[tuple[tuple[str, int], ...], list[Workload]] = {}
        for workload in group:
            apart.setdefault(tuple(self.operator.constant_axes(workload).items()), []).append(workload)
        if len(apart) == 1:
            peer = next(peer for peer in self._peers(group[0]) if peer.name == failed.name)
            self.left_out[self._place(peer, group[0])] = failed.failure.reason
        return tuple(tuple(each) for each in apart.values())

    def _measure(self, workloads: Sequence[Workload], protocols: Sequence[Protocol]) -> Iterator[Row]:
        """Both protocols by the same processes: their first calls, which compile and plan, are made once."""
        seconds = self._estimate(workloads)
        ours, theirs = (
            tuple(
                program
                for protocol in protocols
                for program in timed_programs(
                    self.operator, workloads, self.machine, seconds, protocol=protocol, contiguous=contiguous
                )
            )
            for contiguous in (False, True)
        )
        measured = self._rounds(workloads[0], ours, theirs)
        if self.confirm is not None:
            with self.worker(self.sources[self.confirm]) as twin:
                twin.build()
                repeat_by_twin(twin, [block for each in measured for block in each.blocks])
        for index, program in enumerate(ours):
            means = {name: tuple(r.ms[name][index] for r in measured) for name in measured[0].ms}
            ms = {name: statistics.median(values) for name, values in means.items()}
            yield Row(program.workload, program.protocol, ms, means, program.bound_ms)

    def _rounds(
        self, workload: Workload, ours: tuple[TimedProgram, ...], theirs: tuple[TimedProgram, ...]
    ) -> list[Round]:
        """Rounds of the sources and of the peers of such a workload."""
        contenders = [
            Contender(name, source, self.operator.entry_points, ours, twin=name == self.confirm)
            for name, source in self.sources.items()
        ]
        for peer in self._peers(workload):
            contenders.append(Contender(peer.name, self._peer_file, {"peer": peer.entry_point}, theirs))
        ahead = PROCESSES if self.operator.backend == "cuda" else 1
        with Rounds(contenders, self._start, self._sweep, ahead=ahead) as rounds:
            return [rounds.measure() for _ in range(PROCESSES)]

    def _start(self, contender: Contender) -> Worker:
        return self.worker(contender.source, contender.entry_points)

    def _estimate(self, workloads: Sequence[Workload]) -> Callable[[Workload], float]:
        """Seconds of the first source's call of each workload: compiled, and warm."""
        found: dict[Workload, float] = {}
        with self.worker(next(iter(self.sources.values()))) as worker:
            worker.build()
            for workload in workloads:
                rng = np.random.default_rng(secrets.randbits(64))
                program = self.operator.timed(workload, rng, 1, 0, contiguous=False)
                found[workload] = call_seconds(worker, program)
        return found.__getitem__

    def _groups(self, workloads: Sequence[Workload], protocols: int) -> Iterator[tuple[Workload, ...]]:
        """Consecutive workloads with the same peers whose inputs, in both forms, fit into memory together."""
        members: list[Workload] = []
        held = 0.0
        for workload in workloads:
            size = max(self.operator.cost(workload).bytes, COLD_CACHES * self.machine.cache_bytes)
            size *= 2 * protocols
            full = held + size > GROUP_BYTES[self.operator.backend]
            other = bool(members) and self._peers(workload) != self._peers(members[0])
            if members and (full or other or len(members) == GROUP_MOST[self.operator.backend]):
                yield tuple(members)
                members, held = [], 0.0
            members.append(workload)
            held += size
        if members:
            yield tuple(members)

    def _place(self, peer: Peer, workload: Workload) -> str:
        axes = ", ".join(f"{name} {value}" for name, value in self.operator.constant_axes(workload).items())
        return f"{peer.entry_point} ({axes})" if axes else peer.entry_point

    def _peers(self, workload: Workload) -> tuple[Peer, ...]:
        ragged = any(isinstance(sizes, tuple) and len(set(sizes)) > 1 for sizes in workload.shape.values())
        return tuple(
            peer
            for peer in self.operator.peers
            if workload.phase in peer.phases
            and not (peer.uniform and ragged)
            and (not peer.module or importable(peer.module))
            and self._place(peer, workload) not in self.left_out
        )


def importable(module: str) -> bool:
    """Whether a module is there, without importing more than its package."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
