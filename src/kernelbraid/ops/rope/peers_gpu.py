"""The rotary embedding of models in torch and of Liger-Kernel on a GPU: what a benchmark runs beside ours.

Both get their tables in the dtype of q, as models give them.
"""

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@lru_cache(maxsize=64)
def _looked_up(positions: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of tables, for both halves and all heads: a model looks them up once for all its layers."""
    c, s = (table[positions.long()].repeat(1, 2)[:, None].to(dtype) for table in (cos, sin))
    return c, s


def torch_rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    c, s = _looked_up(positions, cos, sin, q.dtype)
    return _turned(q, c, s), _turned(k, c, s)


def torch_rope_backward(
    positions: Tensor, cos: Tensor, sin: Tensor, dq_out: Tensor, dk_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients: turned back."""
    c, s = _looked_up(positions, cos, sin, dq_out.dtype)
    return _turned(dq_out, c, -s), _turned(dk_out, c, -s)


def liger_rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """In place, as Liger-Kernel does it for tensors that are contiguous by tokens."""
    c, s = (table.view(1, len(q), -1) for table in _looked_up(positions, cos, sin, q.dtype))
    forward = import_module("liger_kernel.ops.rope").rope_forward
    return forward(q[None].transpose(1, 2), k[None].transpose(1, 2), c, s)
