"""Experts of a mixture by torch on a GPU: what a benchmark runs beside ours."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def _grouped(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Tokens sorted by expert, two grouped products, and the sum over slots in float32."""
    tokens, top_k = experts.shape
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(1, len(down) + 1, device=x.device, dtype=torch.int32))
    offsets = ends.to(torch.int32)
    block = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offsets)
    gate, up = block.chunk(2, -1)
    found = torch._grouped_mm(silu(gate) * up, down.transpose(1, 2), offsets)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    rows = found[back].view(tokens, top_k, -1)
    return (rows * weights[..., None]).sum(1).to(x.dtype)


def torch_grouped(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    with torch.no_grad():
        return _grouped(x, weights, experts, gate_up, down)


def torch_grouped_backward(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """Gradients by torch's autograd, whose forward is part of what they need."""
    leaves = [each.detach().requires_grad_() for each in (x, weights, gate_up, down)]
    out = _grouped(leaves[0], leaves[1], experts, leaves[2], leaves[3])
    return torch.autograd.grad(out, leaves, dout)


def torch_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every expert for every token, the weights of those not chosen 0: no index leaves the device."""
    with torch.no_grad():
        share = torch.zeros(len(x), len(down), device=x.device)
        share.scatter_add_(1, experts.long(), weights)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number, (first, second) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
            gate, up = (x @ first.T).chunk(2, -1)
            out += ((silu(gate) * up) @ second.T).float() * share[:, number, None]
        return out.to(x.dtype)
