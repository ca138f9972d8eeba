"""Workers on a GPU: what honest ones give, and how the others end."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.audit import toy
from tests.audit.left import no_process_left
from tests.gpu import toy_cuda

from kernelbraid.audit.buffers import arena_type
from kernelbraid.audit.process import Limits, Worker, WorkerFailure
from kernelbraid.contract import Source
from kernelbraid.ir.evidence import Status
from kernelbraid.ops.problem import Program

MakeWorker = Callable[..., Worker]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeWorker]:
    workers: list[Worker] = []

    def start(source: Source, **limits: float) -> Worker:
        given = {"build_seconds": 90.0, "run_seconds": 30.0, "memory_bytes": 8 << 30, **limits}
        workers.append(
            Worker(
                source,
                toy.SUMS.entry_points,
                scratch=tmp_path / "scratch",
                cache=tmp_path.parent / "cache",
                limits=Limits(**given),  # type: ignore[arg-type]
                device="cuda",
            )
        )
        return workers[-1]

    with no_process_left():
        yield start
        for worker in workers:
            worker.kill()


def failure(worker: Worker, capture: bool = False) -> WorkerFailure:
    """How a worker fails when it runs the small program twice."""
    with pytest.raises(WorkerFailure) as caught:
        worker.build()
        for _ in range(2):
            worker.execute(toy.small_program())
        if capture:
            worker.replay(toy.small_program(), toy.small_program())
    assert worker.dead
    return caught.value


def changed(program: Program) -> Program:
    """The small program with its two requests in another order."""
    other = toy.small_program((40, 5))
    return replace(program, inputs=other.inputs)


def exact(program: Program) -> np.ndarray:
    ends = program.inputs["ends0"]
    x = program.inputs["x0"].astype(np.float64) * 0.5
    return np.concatenate([np.cumsum(x[a:b], axis=0) for a, b in pairwise(ends)])


def close(found: np.ndarray, program: Program) -> bool:
    return bool(np.allclose(found, exact(program), rtol=1e-5, atol=1e-5))


# ---- memory


def test_an_arena_mirrors_device_memory() -> None:
    arena = arena_type("cuda").holding({"a": np.arange(5, dtype=np.float32), "b": np.ones(3, np.int32)}, "x")
    arena.push()
    arena.arrays["a"][...] = 0
    arena.pull()
    assert arena.arrays["a"].tolist() == [0, 1, 2, 3, 4] and arena.arrays["b"].tolist() == [1, 1, 1]
    assert arena.intact() and len(arena.handle) == 128


def test_memory_comes_back_when_arenas_go() -> None:
    from kernelbraid.audit.device import driver

    before = driver().free_bytes()
    for _ in range(8):
        arena = arena_type("cuda")(256 << 20, "large")
        arena.seal()
        del arena
    assert driver().free_bytes() > before - (256 << 20)


# ---- honest


def test_an_honest_worker_builds_and_computes(make: MakeWorker) -> None:
    worker = make(toy_cuda.root())
    report = worker.build(toy_cuda.SUMS.contract, {"width": 4})
    assert report.numerics == {"block": 16}
    program = toy.small_program()
    first = worker.execute(program)["out"]
    assert close(first, program)
    np.testing.assert_array_equal(first.view(np.int32), worker.execute(program)["out"].view(np.int32))
    (kernel,) = worker.specialisations()
    assert kernel.startswith("sums_kernel(x: *fp32, ") and "BLOCK=16" in kernel and "warps=1" in kernel


def test_launches_are_those_of_the_captured_calls(make: MakeWorker) -> None:
    from kernelbraid.audit.device import driver

    worker = make(toy_cuda.root())
    worker.build()
    program = toy.small_program()
    assert worker.launches(worker.load(program)) == ()
    for repeats in (1, 6, 512):
        ((name, count, blocks, threads, resident),) = worker.launches(worker.load(program, capture=repeats))
        assert (name, count, blocks, threads) == ("sums_kernel", 1.0, 2, 32)
        assert resident % driver().multiprocessors() == 0
        assert 1 <= resident // driver().multiprocessors() <= 32


def test_a_loaded_program_runs_eagerly_and_as_a_graph(make: MakeWorker) -> None:
    worker = make(toy_cuda.root())
    worker.build()
    program = toy.small_program()
    wanted = worker.execute(program)["out"].view(np.int32)
    for capture in (0, 3):
        loaded = worker.load(program, capture=capture)
        loaded.reset(np.random.default_rng(0))
        assert worker.run(loaded, 3) > 0
        np.testing.assert_array_equal(worker.outputs(loaded)["out"].view(np.int32), wanted)
        loaded.reset(np.random.default_rng(0))
        worker.run(loaded, count=0)
        assert np.isnan(worker.outputs(loaded)["out"]).all()
        worker.drop(loaded)


def test_a_graph_reads_what_is_there_at_its_replay(make: MakeWorker) -> None:
    worker = make(toy_cuda.root())
    worker.build()
    program = toy.small_program()
    other = changed(program)
    np.testing.assert_array_equal(
        worker.replay(program, other)["out"].view(np.int32), worker.execute(other)["out"].view(np.int32)
    )
    with pytest.raises(ValueError, match="equal shapes"):
        worker.replay(program, toy.small_program((5, 41)))


def test_a_second_process_loads_compiled_kernels(make: MakeWorker, tmp_path: Path) -> None:
    for _ in range(2):
        worker = make(toy_cuda.root())
        worker.build()
        worker.execute(toy.small_program())
        worker.kill()
    assert len(list((tmp_path.parent / "cache").rglob("sums_kernel.cubin"))) >= 1


def test_a_worker_stands_still_between_requests(make: MakeWorker) -> None:
    worker = make(toy_cuda.root())
    worker.build()
    loaded = worker.load(toy.small_program(), capture=100)
    for _ in range(3):
        worker.run(loaded, 100)
        assert psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
        time.sleep(0.3)


# ---- hostile


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        (toy_cuda.WRITES_INPUTS, Status.TAMPERED, "writes to its inputs"),
        (toy_cuda.ILLEGAL_ADDRESS, Status.CRASHED, ""),
        (toy_cuda.EATS_MEMORY, Status.OUT_OF_MEMORY, ""),
        (toy_cuda.hostile("raise KeyError('lost')"), Status.CRASHED, "lost"),
        (toy_cuda.hostile("sums_kernel[(1,)](x, 1)"), Status.CRASHED, ""),
        (toy_cuda.variant(("tl.program_id(0)", "tl.program_idea(0)")), Status.BUILD_FAILED, "program_idea"),
    ],
)
def test_failing_calls(make: MakeWorker, source: Source, status: Status, words: str) -> None:
    found = failure(make(source))
    assert found.status == status and words in found.reason, found.reason


@pytest.mark.parametrize("source", [toy_cuda.HANGS, toy_cuda.HANGS_ON_THE_DEVICE])
def test_a_hung_worker_is_ended(make: MakeWorker, source: Source) -> None:
    start = time.monotonic()
    found = failure(make(source, run_seconds=6.0))
    assert found.status == Status.TIMED_OUT and time.monotonic() - start < 30


def test_calls_that_cannot_be_captured_do_not_build(make: MakeWorker) -> None:
    found = failure(make(toy_cuda.READS_LENGTHS), capture=True)
    assert found.status == Status.BUILD_FAILED and "captur" in found.reason, found.reason


def test_a_stale_output_stays_poison(make: MakeWorker) -> None:
    worker = make(toy_cuda.STALE)
    worker.build()
    assert not np.isnan(worker.execute(toy.small_program())["out"]).any()
    assert np.isnan(worker.execute(toy.small_program())["out"]).all()


def test_lengths_baked_in_at_capture_show(make: MakeWorker) -> None:
    worker = make(toy_cuda.BAKED)
    worker.build()
    program = toy.small_program()
    other = changed(program)
    assert close(worker.replay(program, program)["out"], program)
    assert not close(worker.replay(program, other)["out"], other)
