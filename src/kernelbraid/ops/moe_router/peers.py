"""torch's router on the CPU: what a benchmark runs beside ours."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


def _weights(logits: Tensor, by_sigmoid: float, renormalize: float, top_k: int) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits) if by_sigmoid else torch.softmax(logits, -1)
    weights, experts = torch.topk(scores, top_k, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), experts


def torch_router(logits: Array, by_sigmoid: float, renormalize: float, top_k: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return _weights(torch.from_numpy(logits), by_sigmoid, renormalize, top_k)


def torch_router_backward(
    logits: Array,
    weights: Array,
    experts: Array,
    dweights: Array,
    by_sigmoid: float,
    renormalize: float,
    top_k: int,
) -> tuple[Tensor, ...]:
    """The gradient by torch's autograd, whose forward is part of what it needs."""
    leaf = torch.from_numpy(logits).requires_grad_()
    found, _ = _weights(leaf, by_sigmoid, renormalize, top_k)
    return torch.autograd.grad(found, leaf, torch.from_numpy(dweights))
