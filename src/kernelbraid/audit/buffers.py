"""Shared memory between the judge and its workers: anonymous files, read-only where workers may only read."""

import contextlib
import fcntl
import itertools
import math
import mmap
import os
from collections.abc import Mapping
from typing import TypedDict

import numpy as np

from kernelbraid.ops.formats import bits_type, information, is_float
from kernelbraid.ops.problem import Array

ALIGNMENT = 256
"""Bytes: as CUDA's allocator aligns; a multiple of a cache line and of the widest vector register."""

_F_SEAL_FUTURE_WRITE = 0x10
_POISON_BYTES = 1 << 16
_numbers = itertools.count(1)


class Placement(TypedDict):
    """Where one array lies in an arena, in a form that JSON carries."""

    name: str
    offset: int
    shape: list[int]
    dtype: str


Specifications = Mapping[str, tuple[tuple[int, ...], str]]
"""Name -> (shape, dtype) of arrays."""


class Arena:
    """Named arrays in one anonymous shared file, each at a multiple of `ALIGNMENT`.

    The file has no name in any file system, so that it is gone when the last process that maps it is.
    A worker on a CPU maps the file itself: `push`, `pull` and `intact` mean something for other devices.

    Args:
        size: bytes; `place` lays arrays out in them, again and again if need be.
        label: shown by the system in the maps of a process, nothing more.

    Raises:
        RuntimeError: there is no memory for it.
    """

    pushed: int
    """Bytes from the start on that `push` may leave out."""
    handle: str | None = None
    """By which a worker opens memory that is no file."""

    def __init__(self, size: int, label: str) -> None:
        self.fd = -1
        self.pushed = 0
        self._held: list[tuple[int, int, Array]] = []
        self.number = next(_numbers)
        self.size = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        self.placements: list[Placement] = []
        self.arrays: dict[str, Array] = {}
        self.fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._memory = mmap.mmap(self.fd, self.size)
        except OSError as error:
            os.close(self.fd)
            self.fd = -1
            raise RuntimeError(f"no shared memory for {self.size >> 20} MiB of {label}: {error}") from error

    @classmethod
    def of(cls, specifications: Specifications, label: str) -> "Arena":
        """Make room for certain arrays and lay them out."""
        arena = cls(size_of(specifications), label)
        arena.place(specifications)
        return arena

    @classmethod
    def holding(cls, contents: Mapping[str, Array], label: str) -> "Arena":
        """Place copies of arrays."""
        arena = cls.of(specified(contents), label)
        for name, array in contents.items():
            arena.arrays[name][...] = array
        return arena

    def place(self, specifications: Specifications) -> None:
        """Lay arrays out from the start; what lay there before loses its name."""
        assert size_of(specifications) <= self.size, (size_of(specifications), self.size)
        self.placements, self.arrays, end = [], {}, 0
        for name, (shape, dtype) in specifications.items():
            self.placements.append({"name": name, "offset": end, "shape": list(shape), "dtype": dtype})
            self.arrays[name] = np.ndarray(shape, dtype, buffer=self._memory, offset=end)
            end += _aligned(shape, dtype)

    def fill(self, contents: Mapping[str, Array]) -> None:
        """Copy arrays to their places, but for read-only ones that were the last to be copied there.

        Nobody else may write to the arena from its first `fill` on. Of so many bytes from the start on as
        `pushed` says, workers know already.
        """
        changed = self.size
        for place in self.placements:
            array, start = contents[place["name"]], place["offset"]
            stop = start + array.nbytes
            if not any(held is array and at == start for at, _, held in self._held):
                self._held = [each for each in self._held if each[1] <= start or stop <= each[0]]
                self.arrays[place["name"]][...] = array
                changed = min(changed, start)
                if not array.flags.writeable:
                    self._held.append((start, stop, array))
        self.pushed = changed

    def push(self) -> None:
        """Let workers see what the arrays hold; only while none of them runs."""

    def pull(self) -> None:
        """Let the arrays hold what a worker wrote; only while none of them runs."""

    def intact(self) -> bool:
        """Whether a sealed arena holds what was pushed."""
        return True

    def seal(self) -> None:
        """From here on nobody but this process, through the mapping it has, can write to the arena.

        Kernels without this seal still hand out read-only descriptors, which cannot be mapped for writing.
        """
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)

    def reader(self) -> int:
        """Open a read-only descriptor for a worker; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def arena_type(device: str) -> type[Arena]:
    """The kind of arena that workers on `cpu` or `cuda` can use."""
    if device == "cpu":
        return Arena
    from kernelbraid.audit.device import DeviceArena

    return DeviceArena


def specified(contents: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of arrays."""
    return {name: (array.shape, array.dtype.name) for name, array in contents.items()}


def size_of(specifications: Specifications) -> int:
    """Bytes that an arena needs for arrays."""
    return sum(_aligned(shape, dtype) for shape, dtype in specifications.values())


def _aligned(shape: tuple[int, ...], dtype: str) -> int:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


class Poison:
    """Random NaNs (floats) or random bits (integers); the bits are drawn anew for every instance.

    One block of random bits serves all arrays, from another place of it in each.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._bits = rng.integers(0, 256, _POISON_BYTES, np.uint8)

    def fill(self, array: Array) -> None:
        """Overwrite a contiguous array."""
        if array.size == 0:
            return
        bits = self._bits.view(bits_type(array.dtype))
        if is_float(array.dtype):
            found = information(array.dtype)
            exponent = ((1 << (found.bits - 1 - found.nmant)) - 1) << found.nmant
            bits = bits | bits.dtype.type(exponent) | bits.dtype.type(1)
        flat = array.reshape(-1).view(bits.dtype)
        assert np.shares_memory(flat, array), "poison writes in place: the array must be contiguous"
        head = min(int(self._rng.integers(1, bits.size)), flat.size)
        flat[:head] = bits[-head:]
        whole = (flat.size - head) // bits.size * bits.size
        flat[head : head + whole].reshape(-1, bits.size)[...] = bits
        flat[head + whole :] = bits[: flat.size - head - whole]
