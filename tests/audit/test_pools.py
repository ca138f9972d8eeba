"""Timed programs: what changes before a batch, and what does not."""

import numpy as np
import pytest
from tests.audit import toy

from kernelbraid.audit import pools
from kernelbraid.audit.pools import Machine, TimedProgram, calls_of, digest, timed_programs
from kernelbraid.ops.problem import Call, Program

MACHINE = Machine(cache_bytes=1 << 20, flops=1e9, bandwidth=1e9)


def a_program(rng: np.random.Generator) -> Program:
    inputs = {
        "small": rng.standard_normal((50, 4), np.float32),
        "large": rng.standard_normal((4000, 4), np.float32),
        "holed": rng.standard_normal((4000, 4), np.float32),
        "table": np.arange(300, dtype=np.int32),
        "scale": np.ones((1, 3), np.float32),
    }
    inputs["holed"][::7] = np.nan
    return Program(inputs, {}, {"out": ((4,), "float32")}, (Call("f", {}),))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Program, TimedProgram]:
    monkeypatch.setattr(pools, "ROLLED_BYTES", 10_000)
    program = a_program(np.random.default_rng(0))
    copy = Program(
        {name: array.copy() for name, array in program.inputs.items()}, {}, program.outputs, program.calls
    )
    return copy, TimedProgram(toy.workload("decode", 2, 9), program, 1, 0.1)


def state(timed: TimedProgram) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in timed.inputs.arrays.items()}


def test_a_seed_names_a_state(made: tuple[Program, TimedProgram]) -> None:
    _, timed = made
    states = {}
    for seed in (1, 2, 3):
        timed.refresh(seed)
        states[seed] = state(timed)
    for seed in (2, 1, 3, 3):
        timed.refresh(seed)
        for name, array in state(timed).items():
            np.testing.assert_array_equal(array, states[seed][name], err_msg=name)


def test_what_changes_is_a_permutation(made: tuple[Program, TimedProgram]) -> None:
    first, timed = made
    for seed in (5, 6):
        timed.refresh(seed)
        for name, array in state(timed).items():
            np.testing.assert_array_equal(np.sort(array, axis=None), np.sort(first.inputs[name], axis=None))


def test_every_small_row_moves_and_many_large_elements_do(made: tuple[Program, TimedProgram]) -> None:
    first, timed = made
    timed.refresh(7)
    now = state(timed)
    assert (now["small"] != first.inputs["small"]).any(axis=1).all()
    for name in ("large", "holed"):
        moved = (now[name] != first.inputs[name]) & ~np.isnan(now[name])
        assert 500 < moved.sum() < 2 * pools.SWAPPED
        np.testing.assert_array_equal(np.isnan(now[name]), np.isnan(first.inputs[name]))
    for name in ("table", "scale"):
        np.testing.assert_array_equal(now[name], first.inputs[name])


def test_the_root_fixes_the_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [calls_of(s) for s in (1.0, 0.02, 0.019, 0.001, 1e-9)] == [1, 1, 2, 20, pools.MOST_CALLS["cpu"]]
    workloads = toy.SUMS.grids["study"]
    cold = timed_programs(toy.SUMS, workloads, MACHINE, lambda w: 0.004)
    assert [(len(p.program.calls), p.repeats, p.calls) for p in cold] == [(5, 1, 5)] * 2
    warm = timed_programs(toy.SUMS, workloads, MACHINE, lambda w: 0.004, protocol="warm")
    assert [(len(p.program.calls), p.repeats, p.calls) for p in warm] == [(1, 5, 5)] * 2


def test_pools_beyond_the_memory_are_refused() -> None:
    huge = Machine(cache_bytes=1 << 50, flops=1e9, bandwidth=1e9)
    with pytest.raises(RuntimeError, match=r"cold timing needs .* GiB"):
        timed_programs(toy.SUMS, toy.SUMS.grids["study"], huge, lambda w: 0.004)


def test_the_bound_is_the_larger_of_work_and_traffic() -> None:
    workload = toy.workload("prefill", 2, 64)
    assert Machine(1, 1e9, 1e12).bound_ms(toy.SUMS, workload) == pytest.approx(1e3 * 2 * 512 / 1e9)
    assert Machine(1, 1e12, 1e9).bound_ms(toy.SUMS, workload) == pytest.approx(1e3 * 4 * 512 / 1e9)


def test_digests_are_of_bits() -> None:
    zero, negative = np.zeros(3, np.float32), -np.zeros(3, np.float32)
    assert digest([zero]) == digest([zero.copy()])
    assert digest([zero]) != digest([negative])


def test_digests_see_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "DIGESTED", 64)
    arrays = [np.arange(100, dtype=np.int32), np.zeros(0, np.float32), np.ones(3, np.float64)]
    whole = pools.digest(arrays)
    assert pools.digest([each.copy() for each in arrays]) == whole
    for array in (arrays[0], arrays[2]):
        for place in range(array.size):
            array[place] += 1
            assert pools.digest(arrays) != whole
            array[place] -= 1
    assert pools.digest(arrays) == whole
    assert pools.digest(arrays[:1]) != whole != pools.digest(arrays[::-1])


@pytest.mark.parametrize(
    ("calls", "repeats", "inside"),
    [(1, 2048, 256), (1, 64 * 31, 248), (1, 7, 7), (300, 4, 1), (100, 6, 2), (0, 3, 3)],
)
def test_a_graph_holds_a_part_of_the_repeats(calls: int, repeats: int, inside: int) -> None:
    from kernelbraid.audit.device_worker import repeats_of_a_graph

    assert repeats_of_a_graph(calls, repeats) == inside and repeats % inside == 0


def test_a_gpu_makes_whole_graphs_of_calls() -> None:
    assert [calls_of(s, "cuda") for s in (1.0, 0.001, 1e-4, 6e-6, 1e-9)] == [1, 20, 256, 2048, 2048]
