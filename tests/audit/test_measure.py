"""Rounds: who runs when, on what, and whose fault a failure is."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.audit import toy
from tests.audit.left import no_process_left

from kernelbraid.audit import measure, pools
from kernelbraid.audit.measure import Contender, ContenderFailure, Rounds, TooSlow
from kernelbraid.audit.pools import Machine, Sweep, TimedProgram, timed_programs
from kernelbraid.audit.process import Worker
from kernelbraid.contract import Source
from kernelbraid.ir.evidence import Status

MACHINE = Machine(cache_bytes=1 << 20, flops=1e12, bandwidth=1e12)


class Sweeps(Sweep):
    """Counts."""

    times = 0

    def __call__(self) -> None:
        self.times += 1
        super().__call__()


@pytest.fixture
def programs() -> tuple[TimedProgram, ...]:
    return timed_programs(toy.SUMS, toy.SUMS.grids["study"], MACHINE, lambda workload: 0.005)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    with no_process_left():
        yield workers
        assert all(worker.dead for worker in workers)


def rounds(started: list[Worker], tmp_path: Path, contenders: list[Contender], **more: object) -> Rounds:
    def start(contender: Contender) -> Worker:
        started.append(
            Worker(contender.source, contender.entry_points, scratch=tmp_path / "s", cache=tmp_path / "c")
        )
        return started[-1]

    return Rounds(contenders, start, Sweeps(MACHINE.cache_bytes), **more)  # type: ignore[arg-type]


def contender(name: str, source: Source, programs: tuple[TimedProgram, ...], **more: object) -> Contender:
    return Contender(name, source, toy.SUMS.entry_points, programs, **more)  # type: ignore[arg-type]


def test_batches_are_interleaved_and_one_process_runs_at_a_time(
    started: list[Worker],
    tmp_path: Path,
    programs: tuple[TimedProgram, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    honest = Worker.finish_run

    def watched(worker: Worker) -> tuple[float, float]:
        others = [each for each in started if each is not worker and not each.dead]
        assert {psutil.Process(each.pid).status() for each in others} <= {psutil.STATUS_STOPPED}
        order.append("AB"[started.index(worker) % 2])
        return honest(worker)

    monkeypatch.setattr(Worker, "finish_run", watched)
    pair = [
        contender("root", toy.root(), programs),
        contender("candidate", toy.root(), programs, like="root"),
    ]
    with rounds(started, tmp_path, pair) as timing:
        first = timing.measure()
        timed = "".join(order)[2 * measure.EMPTY_BATCHES :]
        assert timed == "ABBA" * 2, "two workloads"
        timing.measure()
    assert len({worker.pid for worker in started}) == 4, "fresh processes in every round"
    assert set(first.ms) == {"root", "candidate"}
    assert all(len(ms) == 2 and min(ms) > 0 for ms in first.ms.values())
    assert all(len(batches) == 2 for batches in first.clocks["root"])
    assert first.blocks == () and first.specialisations == {}


def test_cold_sweeps_before_every_batch_and_warm_never(
    started: list[Worker], tmp_path: Path, programs: tuple[TimedProgram, ...]
) -> None:
    for protocol, times in (("cold", 4), ("warm", 0)):
        for program in programs:
            program.protocol = protocol  # type: ignore[assignment]
        with rounds(started, tmp_path, [contender("root", toy.root(), programs)]) as timing:
            timing.measure()
            assert timing._sweep.times == times  # type: ignore[attr-defined]


def test_inputs_are_new_in_every_block(
    started: list[Worker], tmp_path: Path, programs: tuple[TimedProgram, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    honest = TimedProgram.refresh
    monkeypatch.setattr(
        TimedProgram, "refresh", lambda program, seed: (seen.append(seed), honest(program, seed))[1]
    )
    one = contender("root", toy.root(), programs, twin=True)
    with rounds(started, tmp_path, [one]) as timing:
        found = timing.measure()
    assert len(set(seen)) == len(seen) == 4
    assert [block.seed for block in found.blocks] == seen
    assert len({block.outputs for block in found.blocks}) == 4


def test_a_twin_repeats_the_blocks(
    started: list[Worker], tmp_path: Path, programs: tuple[TimedProgram, ...]
) -> None:
    with rounds(started, tmp_path, [contender("root", toy.root(), programs, twin=True)]) as timing:
        found = timing.measure()
    for source, agrees in ((toy.root(), True), (toy.variant(("BLOCK = 16", "BLOCK = 8")), False)):
        with Worker(source, toy.SUMS.entry_points, scratch=tmp_path, cache=tmp_path / "c") as twin:
            twin.build()
            if agrees:
                measure.repeat_by_twin(twin, found.blocks)
            else:
                with pytest.raises(measure.WorkerFailure, match="another process"):
                    measure.repeat_by_twin(twin, found.blocks)


@pytest.mark.parametrize(
    ("body", "status"),
    [("raise OSError('x')", Status.CRASHED), ("out[...] = 1\nreturn", Status.BITS_UNEQUAL)],
)
def test_failures_name_the_contender(
    started: list[Worker], tmp_path: Path, programs: tuple[TimedProgram, ...], body: str, status: Status
) -> None:
    pair = [
        contender("root", toy.root(), programs),
        contender("candidate", toy.hostile(body), programs, like="root"),
    ]
    with rounds(started, tmp_path, pair) as timing, pytest.raises(ContenderFailure) as caught:
        timing.measure()
    assert caught.value.name == "candidate" and caught.value.failure.status == status


def test_the_hopelessly_slow_end_a_round(
    started: list[Worker], tmp_path: Path, programs: tuple[TimedProgram, ...]
) -> None:
    slow = toy.hostile("for _ in range(500_000): pass")
    pair = [contender("root", toy.root(), programs), contender("candidate", slow, programs)]
    with (
        rounds(started, tmp_path, pair, too_slow=2.0) as timing,
        pytest.raises(TooSlow, match="times the root"),
    ):
        timing.measure()


def test_peers_are_called_by_another_name(started: list[Worker], tmp_path: Path) -> None:
    programs = timed_programs(toy.SUMS, toy.SUMS.grids["study"], MACHINE, lambda workload: 0.01)
    peer = Source(toy.ROOT.replace("def scaled_sums", "def their_sums"), "peer")
    contenders = [
        contender("root", toy.root(), programs),
        Contender("peer", peer, {"scaled_sums": "their_sums"}, programs),
    ]
    with rounds(started, tmp_path, contenders) as timing:
        assert set(timing.measure().ms) == {"root", "peer"}


def test_a_batch_has_calls_enough() -> None:
    assert pools.BATCH_SECONDS >= 0.02


def test_processes_of_several_rounds_may_start_together(
    started: list[Worker], tmp_path: Path, programs: tuple[TimedProgram, ...]
) -> None:
    """All of them have imported and stand still before any is timed, and each round has its own."""
    pair = [contender(name, toy.root(), programs) for name in ("root", "candidate")]
    with rounds(started, tmp_path, pair, ahead=2) as timing:
        timing.begin()
        assert len(started) == 4
        timing.measure()
        assert [worker.dead for worker in started] == [True, True, False, False]
        assert {psutil.Process(each.pid).status() for each in started[2:]} == {psutil.STATUS_STOPPED}
        timing.measure()
        assert len(started) == 4 and all(worker.dead for worker in started)
        timing.measure()
        assert len(started) == 8 and not started[-1].dead


def test_a_call_is_timed_roughly(tmp_path: Path) -> None:
    workload = toy.workload("decode", 8, 100)
    program = toy.timed(workload, np.random.default_rng(0), 1, 0, contiguous=False)
    slow = toy.hostile("import time; time.sleep(0.02)")
    with Worker(slow, toy.SUMS.entry_points, scratch=tmp_path / "s", cache=tmp_path / "c") as worker:
        worker.build()
        assert 0.02 < measure.call_seconds(worker, program) < 0.2
        assert worker.shared_bytes == 0, "nothing stays behind"
