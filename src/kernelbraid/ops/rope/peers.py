"""The rotary embedding as models in torch write it, on the CPU: what a benchmark runs beside ours."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _looked_up(positions: Array, *tables: Array) -> list[Tensor]:
    """Rows of tables, for both halves and all heads."""
    where = torch.from_numpy(positions).long()
    return [torch.from_numpy(table)[where].repeat(1, 2)[:, None] for table in tables]


def torch_rope(q: Array, k: Array, positions: Array, cos: Array, sin: Array) -> tuple[Tensor, Tensor]:
    c, s = _looked_up(positions, cos, sin)
    return _turned(torch.from_numpy(q), c, s), _turned(torch.from_numpy(k), c, s)


def torch_rope_backward(
    positions: Array, cos: Array, sin: Array, dq_out: Array, dk_out: Array
) -> tuple[Tensor, Tensor]:
    """Gradients: turned back."""
    c, s = _looked_up(positions, cos, sin)
    return _turned(torch.from_numpy(dq_out), c, -s), _turned(torch.from_numpy(dk_out), c, -s)
