"""Experts of a mixture as a registered operator of torch: implementation, fake kernels, autograd.

    kernelbraid::moe_experts             rows [T, H], differentiable in x, weights, gate_up and down
    kernelbraid::moe_experts_backward    its gradients

Outside of a trace the public function goes round the operator, whose boundary costs more than a small call:
the same functions run, the same bits come out.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelbraid.ops import dispatch
from kernelbraid.ops.arguments import (
    INDEX_DTYPES,
    check_axis,
    check_shape,
    check_tensor,
    contract_of,
    dtypes_of,
)
from kernelbraid.ops.dispatch import is_traced, refuse_second, rows_contiguous

_call = partial(dispatch.call, "moe_experts")
_DIFFERENTIABLE = (0, 1, 3, 4)


# ---- Calls with their checks ----


def check(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """Check the arguments of the forward."""
    contract = contract_of("moe_experts", "x", x)
    check_tensor("x", x, dtypes_of(contract), 2, x.device)
    check_tensor("weights", weights, (torch.float32,), 2, x.device)
    check_tensor("experts", experts, INDEX_DTYPES, 2, x.device)
    check_tensor("gate_up", gate_up, (x.dtype,), 3, x.device)
    check_tensor("down", down, (x.dtype,), 3, x.device)
    check_axis(contract, "width", "x", x.shape[1])
    check_axis(contract, "tokens", "x", x.shape[0])
    check_axis(contract, "top_k", "weights", weights.shape[1])
    check_axis(contract, "experts", "gate_up", gate_up.shape[0])
    check_axis(contract, "intermediate", "down", down.shape[2])
    check_shape("weights", weights, (x.shape[0], None), "x")
    check_shape("experts", experts, tuple(weights.shape), "weights")
    check_shape("gate_up", gate_up, (None, 2 * down.shape[2], x.shape[1]), "x and down")
    check_shape("down", down, (gate_up.shape[0], x.shape[1], None), "x and gate_up")


def compute(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute rows; see `api.moe_experts`."""
    check(x, weights, experts, gate_up, down)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _call("moe_experts", x.device, x, weights, experts, gate_up, down, out)
    return out


def differentiate(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    dout: Tensor,
    needed: list[bool],
) -> list[Tensor]:
    """Return those gradients of `compute` in x, weights, gate_up and down that are needed."""
    check(x, weights, experts, gate_up, down)
    check_tensor("dout", dout, (x.dtype,), 2, x.device)
    check_shape("dout", dout, tuple(x.shape), "x")
    like = ((x, x.dtype), (weights, torch.float32), (gate_up, torch.float32), (down, torch.float32))
    found = [
        torch.empty(tensor.shape, dtype=dtype, device=x.device) if need else None
        for (tensor, dtype), need in zip(like, needed, strict=True)
    ]
    if x.numel():
        _call("moe_experts_backward", x.device, x, weights, experts, gate_up, down, dout, *found, 0)
    else:
        for each in found[2:]:
            if each is not None:
                each.zero_()
    kept = zip(found, (x, weights, gate_up, down), strict=True)
    return [each.to(like.dtype) for each, like in kept if each is not None]


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::moe_experts", mutates_args=())
def moe_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return compute(x, weights, experts, gate_up, down)


@moe_experts.register_fake
def _(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("kernelbraid::moe_experts_backward", mutates_args=())
def moe_experts_backward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    dout: Tensor,
    needed: list[bool],
) -> list[Tensor]:
    return differentiate(x, weights, experts, gate_up, down, dout, needed)


@moe_experts_backward.register_fake
def _(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    dout: Tensor,
    needed: list[bool],
) -> list[Tensor]:
    return [
        torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for each, need in zip((x, weights, gate_up, down), needed, strict=True)
        if need
    ]


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    needed = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    if not any(needed):
        return (None,) * 5
    x, weights, experts, gate_up, down = ctx.saved_tensors
    recorded = is_traced(x) or torch.is_grad_enabled()
    function = moe_experts_backward if recorded else differentiate
    found = iter(function(x, weights, experts, gate_up, down, rows_contiguous(dout), needed))
    dx, dweights, dgate_up, ddown = (next(found) if need else None for need in needed)
    return dx, dweights, None, dgate_up, ddown


moe_experts.register_autograd(_gradients, setup_context=_save)
moe_experts_backward.register_autograd(refuse_second("moe_experts"))


class MoeExperts(torch.autograd.Function):
    """The differentiable experts of eager calls."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        out = compute(x, weights, experts, gate_up, down)
        _save(ctx, (x, weights, experts, gate_up, down), out)
        return out

    backward = staticmethod(_gradients)


def compute_with_grad(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`compute`, recorded by autograd."""
    out: Tensor = MoeExperts.apply(x, weights, experts, gate_up, down)  # type: ignore[no-untyped-call]
    return out
