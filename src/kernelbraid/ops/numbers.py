"""Numbers that problems are made of: normal ones, NaNs with payloads, and the poison where nobody may look.

numpy only.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kernelbraid.ops.formats import bits_type, information
from kernelbraid.ops.problem import Array

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]

DRAWN_PERIOD = (1 << 20) - 3
"""Larger arrays repeat this many drawn numbers; odd, so that no two pages hold the same."""
POISON_PERIOD = (1 << 14) - 3


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32
) -> npt.NDArray[Any]:
    """Standard normal numbers, drawn in float32 and rounded once."""
    size = int(np.prod(shape))
    drawn = rng.standard_normal(min(size, DRAWN_PERIOD), np.float32).astype(dtype, copy=False)
    return repeated(drawn, size).reshape(shape)


def repeated(block: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """`block` repeated to `size` elements."""
    if size <= block.size:
        return block[:size]
    whole, rest = divmod(size, block.size)
    out = np.empty(size, block.dtype)
    out[: whole * block.size].reshape(whole, block.size)[...] = block
    out[size - rest :] = block[:rest]
    return out


def spoil(block: Array, rng: np.random.Generator, first: int, stop: int) -> None:
    """Put three NaNs with payloads and infinities into the rows `first` to `stop - 1`, in place."""
    for _ in range(3):
        where = (rng.integers(first, stop), *(rng.integers(size) for size in block.shape[1:]))
        choice = int(rng.integers(4))
        if choice < 2:
            block[where] = (np.inf, -np.inf)[choice]
        else:
            block.view(bits_type(block.dtype))[where] = _payloads(rng, 1, block.dtype)[0]


def _payloads(rng: np.random.Generator, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Quiet NaNs of either sign with random payloads, as bits."""
    bits, mantissa = bits_type(dtype), information(dtype).nmant
    infinity = np.array(np.inf, dtype).view(bits)
    sign = rng.integers(0, 2, count, np.uint32) << np.uint32(8 * bits.itemsize - 1)
    payload = rng.integers(1, 1 << (mantissa - 1), count, np.uint32)
    return np.asarray(sign | np.uint32(infinity) | np.uint32(1 << (mantissa - 1)) | payload).astype(bits)


def poison(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32") -> npt.NDArray[Any]:
    """Return an array full of NaNs whose payloads come from `rng`."""
    size = int(np.prod(shape))
    bits = _payloads(rng, min(size, POISON_PERIOD), np.dtype(dtype))
    return repeated(bits.view(dtype), size).reshape(shape)


def garbage(rng: np.random.Generator, shape: tuple[int, int], pages: int) -> Integers:
    """Page numbers that nobody may follow: half of them in the pool, half of them any int32."""
    wild = rng.integers(-(2**31), 2**31, shape, np.int32)
    valid = rng.integers(0, max(pages, 1), shape, np.int32)
    return np.where(rng.integers(0, 2, shape) == 0, wild, valid)
