"""The steps one after the other in torch on the CPU: what a benchmark runs beside ours."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

Array = npt.NDArray[np.generic]


@lru_cache(maxsize=4)
def _caches(room: int, heads: int, depth: int) -> tuple[Tensor, Tensor]:
    """Caches of `room` slots."""
    return torch.zeros(room, heads, depth), torch.zeros(room, heads, depth)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def torch_steps(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    cos: Array,
    sin: Array,
    q_weight: Array | None,
    k_weight: Array | None,
    eps: float,
    slots: Array,
    room: int,
) -> Tensor:
    queries, keys = torch.from_numpy(q), torch.from_numpy(k)
    if q_weight is not None and k_weight is not None:
        queries = rms_norm(queries, q_weight.shape, torch.from_numpy(q_weight), eps)
        keys = rms_norm(keys, k_weight.shape, torch.from_numpy(k_weight), eps)
    rows = torch.from_numpy(positions).long()
    c, s = (torch.from_numpy(table)[rows].repeat(1, 2)[:, None] for table in (cos, sin))
    k_cache, v_cache = _caches(room, *k.shape[1:])
    where = torch.from_numpy(slots)
    k_cache[where] = _turned(keys, c, s)
    v_cache[where] = torch.from_numpy(v)
    return _turned(queries, c, s)
