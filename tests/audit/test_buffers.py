"""Shared memory: layout, protection, poison."""

import mmap
import os

import numpy as np
import pytest

from kernelbraid.audit.buffers import ALIGNMENT, Arena, Poison
from kernelbraid.ops.formats import bits_type

SHAPES = {
    "a": ((3, 5), "float32"),
    "empty": ((0, 4), "float32"),
    "b": ((7,), "int32"),
    "c": ((2, 2), "float64"),
}


def test_arrays_are_aligned_and_apart() -> None:
    arena = Arena.of(SHAPES, "test")
    for number, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        array = arena.arrays[name]
        assert array.shape == shape and array.dtype == dtype
        assert array.__array_interface__["data"][0] % ALIGNMENT == 0
        array[...] = number
    for number, name in enumerate(SHAPES):
        assert (arena.arrays[name] == number).all()


def test_an_arena_is_laid_out_again_in_the_same_memory() -> None:
    arena = Arena(1024, "test")
    for size in (3, 100, 250):
        arena.place({"x": ((size,), "float32")})
        arena.arrays["x"][...] = size
        assert [place["shape"] for place in arena.placements] == [[size]]
    with pytest.raises(AssertionError):
        arena.place({"x": ((129,), "float64")})


def test_a_reader_cannot_map_for_writing_and_sees_what_is_written_later() -> None:
    arena = Arena.holding({"x": np.arange(4, dtype=np.int32)}, "test")
    arena.seal()
    reader = arena.reader()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(reader, arena.size)
        seen = np.ndarray(4, np.int32, buffer=mmap.mmap(reader, arena.size, prot=mmap.PROT_READ))
        arena.arrays["x"][...] = 7
        assert (seen == 7).all()
    finally:
        os.close(reader)
    with pytest.raises(PermissionError):
        mmap.mmap(os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR), arena.size)


def test_no_memory_is_one_sentence() -> None:
    with pytest.raises(RuntimeError, match="no shared memory"):
        Arena(1 << 60, "test")


@pytest.mark.parametrize("size", [1, 5, 16_383, 16_384, 70_001])
def test_poison_is_nan_of_many_payloads_and_new_each_time(size: int) -> None:
    rng = np.random.default_rng(1)
    array = np.zeros(size, np.float32)
    seen = []
    for _ in range(2):
        array[...] = 0
        Poison(rng).fill(array)
        assert np.isnan(array).all()
        seen.append(array.view(np.int32).copy())
    if size > 100:
        assert len(np.unique(seen[0])) > 50 and (seen[0] < 0).any() and (seen[0] > 0).any()
        assert (seen[0] != seen[1]).mean() > 0.9


def test_poison_of_other_types_and_shapes() -> None:
    poison = Poison(np.random.default_rng(1))
    for dtype in ("float16", "float64"):
        array = np.zeros((3, 4), dtype)
        poison.fill(array)
        assert np.isnan(array).all()
    numbers = np.zeros((100, 10), np.int32)
    poison.fill(numbers)
    assert len(np.unique(numbers)) > 900
    poison.fill(np.zeros((0, 3), np.float32))
    with pytest.raises(AssertionError):
        poison.fill(np.zeros((4, 4), np.float32).T)


def test_bits_have_an_integer_of_their_width() -> None:
    assert [bits_type(np.dtype(d)).name for d in ("f2", "f4", "f8", "i4")] == [
        "uint16",
        "uint32",
        "uint64",
        "uint32",
    ]


def test_read_only_arrays_are_copied_once() -> None:
    """What stands at its place already is left out, until something else was there."""
    frozen, other = np.arange(300, dtype=np.float32), np.ones(300, np.float32)
    frozen.flags.writeable = False
    rows = np.zeros(5, np.float32)
    shapes = {"weight": ((300,), "float32"), "x": ((5,), "float32")}
    arena = Arena.of(shapes, "test")
    arena.fill({"weight": frozen, "x": rows})
    assert arena.pushed == 0
    rows[:] = 7
    arena.fill({"weight": frozen, "x": rows})
    assert arena.pushed == arena.placements[1]["offset"] > 0
    assert (arena.arrays["x"] == 7).all() and (arena.arrays["weight"] == frozen).all()
    arena.fill({"weight": other, "x": rows})
    assert arena.pushed == 0 and (arena.arrays["weight"] == 1).all()
    arena.fill({"weight": frozen, "x": rows})
    assert arena.pushed == 0 and (arena.arrays["weight"] == frozen).all()
    arena.place({"x": ((320,), "float32")})
    arena.fill({"x": np.full(320, 3, np.float32)})
    arena.place(shapes)
    arena.fill({"weight": frozen, "x": rows})
    assert arena.pushed == 0 and (arena.arrays["weight"] == frozen).all()
