"""Sampling by torch's sort, softmax and multinomial on the CPU: what a benchmark runs beside ours."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]


def torch_sample(
    logits: Array, inverse_temperature: Array, top_k: Array, top_p: Array, min_p: Array, **others: Array
) -> Tensor:
    """The same cuts in the same order; random numbers of torch's stream."""
    given = (logits, inverse_temperature, top_k, top_p, min_p)
    rows, c, k, p, m = (torch.from_numpy(np.ascontiguousarray(each)) for each in given)
    ordered, index = (rows * c.clamp(min=1e-3)[:, None]).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(rows.shape[1])
    kept = (ordered - ordered[:, :1]).exp() >= m.clamp(max=1)[:, None]
    kept &= (rank < k[:, None]) | (k <= 0)[:, None]
    weights = torch.softmax(ordered.masked_fill(~kept, -torch.inf), -1)
    weights = weights.masked_fill(weights.cumsum(-1) - weights >= p.clamp(min=1e-6)[:, None], 0)
    return index.gather(1, torch.multinomial(weights, 1))
