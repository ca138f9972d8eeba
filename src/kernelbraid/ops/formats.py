"""Floating-point formats of buffers as numpy sees them: its own, and bfloat16."""

from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether the elements are floating-point numbers, bfloat16 included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def information(dtype: np.dtype[Any]) -> Any:
    """`finfo` of a floating-point dtype: bits of exponent and mantissa, epsilon."""
    return ml_dtypes.finfo(dtype) if dtype == BFLOAT16 else np.finfo(dtype)  # type: ignore[no-untyped-call]


def bits_type(dtype: np.dtype[Any]) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integer type as wide as `dtype`: bits are compared in it."""
    return np.dtype(f"u{dtype.itemsize}")
