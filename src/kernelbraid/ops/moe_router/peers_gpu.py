"""torch's router on a GPU: what a benchmark runs beside ours."""

import torch
from torch import Tensor


def _weights(logits: Tensor, by_sigmoid: float, renormalize: float, top_k: int) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits.float()) if by_sigmoid else torch.softmax(logits, -1, dtype=torch.float32)
    weights, experts = torch.topk(scores, top_k, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), experts


def torch_router(logits: Tensor, by_sigmoid: float, renormalize: float, top_k: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return _weights(logits, by_sigmoid, renormalize, top_k)


def torch_router_backward(
    logits: Tensor,
    weights: Tensor,
    experts: Tensor,
    dweights: Tensor,
    by_sigmoid: float,
    renormalize: float,
    top_k: int,
) -> tuple[Tensor, ...]:
    """The gradient by torch's autograd, whose forward is part of what it needs."""
    leaf = logits.detach().requires_grad_()
    found, _ = _weights(leaf, by_sigmoid, renormalize, top_k)
    return torch.autograd.grad(found, leaf, dweights)
