"""The steps one after the other in torch on a GPU: what a benchmark runs beside ours."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


@lru_cache(maxsize=4)
def _caches(
    room: int, heads: int, depth: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Caches of `room` slots."""
    k_cache, v_cache = (torch.zeros(room, heads, depth, dtype=dtype, device=device) for _ in range(2))
    return k_cache, v_cache


@lru_cache(maxsize=64)
def _looked_up(positions: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of tables, for both halves and all heads: a model looks them up once for all its layers."""
    c, s = (table[positions.long()].repeat(1, 2)[:, None].to(dtype) for table in (cos, sin))
    return c, s


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def torch_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    slots: Tensor,
    room: int,
) -> Tensor:
    if q_weight is not None and k_weight is not None:
        q = rms_norm(q, q_weight.shape, q_weight, eps)
        k = rms_norm(k, k_weight.shape, k_weight, eps)
    c, s = _looked_up(positions, cos, sin, q.dtype)
    k_cache, v_cache = _caches(room, *k.shape[1:], k.dtype, k.device)
    k_cache[slots] = _turned(k, c, s)
    v_cache[slots] = v
    return _turned(q, c, s)
