"""Sampling by torch's sort, softmax and multinomial on a GPU: what a benchmark runs beside ours."""

import torch
from torch import Tensor


def torch_sample(
    logits: Tensor, inverse_temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, **others: Tensor
) -> Tensor:
    """The same cuts in the same order; random numbers of torch's stream."""
    rows, c, k, p, m = logits, inverse_temperature, top_k, top_p, min_p
    ordered, index = (rows * c.clamp(min=1e-3)[:, None]).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(rows.shape[1], device=rows.device)
    kept = (ordered - ordered[:, :1]).exp() >= m.clamp(max=1)[:, None]
    kept &= (rank < k[:, None]) | (k <= 0)[:, None]
    weights = torch.softmax(ordered.masked_fill(~kept, -torch.inf), -1)
    weights = weights.masked_fill(weights.cumsum(-1) - weights >= p.clamp(min=1e-6)[:, None], 0)
    return index.gather(1, torch.multinomial(weights, 1))
