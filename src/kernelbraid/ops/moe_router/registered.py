"""The router of a mixture as a registered operator of torch: implementation, fake kernels, autograd.

    kernelbraid::moe_router             weights and experts [T, k], weights differentiable in logits
    kernelbraid::moe_router_backward    the gradient of logits

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
    check_integer,
    check_shape,
    check_tensor,
    contract_of,
    dtypes_of,
)
from kernelbraid.ops.dispatch import is_traced, refuse_second, rows_contiguous

_call = partial(dispatch.call, "moe_router")


# ---- Calls with their checks ----


def check(logits: Tensor, top_k: int) -> None:
    """Check the arguments of the forward."""
    contract = contract_of("moe_router", "logits", logits)
    check_tensor("logits", logits, dtypes_of(contract), 2, logits.device)
    check_axis(contract, "experts", "logits", logits.shape[1])
    check_axis(contract, "tokens", "logits", logits.shape[0])
    check_integer("top_k", top_k)
    check_axis(contract, "top_k", "top_k", top_k)
    if top_k > logits.shape[1]:
        raise ValueError(f"top_k must be at most logits' {logits.shape[1]} experts, got {top_k}")


def _empty(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    size = (logits.shape[0], top_k)
    return (
        torch.empty(size, dtype=torch.float32, device=logits.device),
        torch.empty(size, dtype=torch.int32, device=logits.device),
    )


def route(logits: Tensor, top_k: int, by_sigmoid: bool, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts and weigh them; see `api.moe_router`."""
    check(logits, top_k)
    weights, experts = _empty(logits, top_k)
    if logits.numel():
        _call("moe_router", logits.device, logits, int(by_sigmoid), int(renormalize), weights, experts)
    return weights, experts


def differentiate(
    logits: Tensor, weights: Tensor, experts: Tensor, dweights: Tensor, by_sigmoid: bool, renormalize: bool
) -> Tensor:
    """Return the gradient of `route` in logits."""
    check_tensor("weights", weights, (torch.float32,), 2, logits.device)
    check(logits, weights.shape[1])
    check_tensor("experts", experts, INDEX_DTYPES, 2, logits.device)
    check_tensor("dweights", dweights, (torch.float32,), 2, logits.device)
    check_shape("weights", weights, (logits.shape[0], None), "logits")
    check_shape("experts", experts, tuple(weights.shape), "weights")
    check_shape("dweights", dweights, tuple(weights.shape), "weights")
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel():
        ways = (int(by_sigmoid), int(renormalize))
        _call("moe_router_backward", logits.device, logits, weights, experts, dweights, *ways, dlogits)
    return dlogits


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::moe_router", mutates_args=())
def moe_router(logits: Tensor, top_k: int, by_sigmoid: bool, renormalize: bool) -> tuple[Tensor, Tensor]:
    return route(logits, top_k, by_sigmoid, renormalize)


@moe_router.register_fake
def _(logits: Tensor, top_k: int, by_sigmoid: bool, renormalize: bool) -> tuple[Tensor, Tensor]:
    return _empty(logits, top_k)


@torch.library.custom_op("kernelbraid::moe_router_backward", mutates_args=())
def moe_router_backward(
    logits: Tensor, weights: Tensor, experts: Tensor, dweights: Tensor, by_sigmoid: bool, renormalize: bool
) -> Tensor:
    return differentiate(logits, weights, experts, dweights, by_sigmoid, renormalize)


@moe_router_backward.register_fake
def _(
    logits: Tensor, weights: Tensor, experts: Tensor, dweights: Tensor, by_sigmoid: bool, renormalize: bool
) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, ctx.by_sigmoid, ctx.renormalize = inputs
    weights, experts = output
    ctx.mark_non_differentiable(experts)
    ctx.save_for_backward(logits, weights, experts)


def _gradients(ctx: Any, dweights: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if not ctx.needs_input_grad[0] or dweights is None:
        return None, None, None, None
    logits, weights, experts = ctx.saved_tensors
    recorded = is_traced(logits) or torch.is_grad_enabled()
    function = moe_router_backward if recorded else differentiate
    given = rows_contiguous(dweights)
    return function(logits, weights, experts, given, ctx.by_sigmoid, ctx.renormalize), None, None, None


moe_router.register_autograd(_gradients, setup_context=_save)
moe_router_backward.register_autograd(refuse_second("moe_router"))


class MoeRouter(torch.autograd.Function):
    """The differentiable router of eager calls."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, top_k: int, by_sigmoid: bool, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        found = route(logits, top_k, by_sigmoid, renormalize)
        _save(ctx, (logits, top_k, by_sigmoid, renormalize), found)
        return found

    backward = staticmethod(_gradients)


def route_with_grad(logits: Tensor, top_k: int, by_sigmoid: bool, renormalize: bool) -> tuple[Tensor, Tensor]:
    """`route`, recorded by autograd."""
    found: tuple[Tensor, Tensor] = MoeRouter.apply(logits, top_k, by_sigmoid, renormalize)  # type: ignore[no-untyped-call]
    return found
