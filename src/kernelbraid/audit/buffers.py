"""Shared memory between the judge and its workers: anonymous files, read-only where workers may only read."""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import TypedDict

import numpy as np

from kernelbraid.ops.problem import Array

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""

_F_SEAL_FUTURE_WRITE = 0x10
_POISON_BLOCK = 1 << 14


class Placement(TypedDict):
    """Where one array lies in an arena, in a form that JSON carries."""

    name: str
    offset: int
    shape: list[int]
    dtype: str


class Arena:
    """Named arrays in one anonymous shared file, each at a multiple of 64 bytes.

    The file has no name in any file system, so that it is gone when the last process that maps it is.

    Args:
        specifications: name -> (shape, dtype).
        label: shown by the system in the maps of a process, nothing more.
    """

    def __init__(self, specifications: Mapping[str, tuple[tuple[int, ...], str]], label: str) -> None:
        self.placements: list[Placement] = []
        end = 0
        for name, (shape, dtype) in specifications.items():
            self.placements.append({"name": name, "offset": end, "shape": list(shape), "dtype": dtype})
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.size = max(end, ALIGNMENT)
        self.fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(self.fd, self.size)
        except OSError as error:
            os.close(self.fd)
            raise RuntimeError(f"no shared memory for {self.size >> 20} MiB of {label}: {error}") from error
        self.arrays: dict[str, Array] = {
            place["name"]: np.ndarray(
                tuple(place["shape"]), place["dtype"], buffer=memory, offset=place["offset"]
            )
            for place in self.placements
        }

    @classmethod
    def holding(cls, contents: Mapping[str, Array], label: str) -> "Arena":
        """Place copies of arrays."""
        arena = cls({name: (array.shape, array.dtype.str) for name, array in contents.items()}, label)
        for name, array in contents.items():
            arena.arrays[name][...] = array
        return arena

    def seal(self) -> None:
        """From here on nobody but this process, through the mapping it has, can write to the arena.

        Kernels without this seal still hand out read-only descriptors, which cannot be mapped for writing.
        """
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)

    def reader(self) -> int:
        """Open a read-only descriptor for a worker; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the file back; its pages live on while somebody still maps them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.arrays = {}

    def __del__(self) -> None:
        self.close()


def poison(array: Array, rng: np.random.Generator) -> None:
    """Fill an array with NaNs of random payload and sign (floats) or random bits (integers), in place.

    The bits are drawn anew at each call; a block of them is repeated.
    """
    if array.size == 0:
        return
    bits = rng.integers(0, 256, _POISON_BLOCK * array.itemsize, np.uint8).view(integers(array.dtype))
    if array.dtype.kind == "f":
        information = np.finfo(array.dtype)  # type: ignore[type-var]
        exponent = ((1 << information.iexp) - 1) << information.nmant
        bits = bits | bits.dtype.type(exponent) | bits.dtype.type(1)
    flat = array.reshape(-1).view(bits.dtype)
    assert np.shares_memory(flat, array), "poison writes in place: the array must be contiguous"
    whole = flat.size - flat.size % bits.size
    flat[:whole].reshape(-1, bits.size)[...] = bits
    flat[whole:] = bits[: flat.size - whole]


def integers(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The unsigned integer type as wide as `dtype`: bits are compared in it."""
    return np.dtype(f"u{dtype.itemsize}")
