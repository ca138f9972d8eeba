"""RMS norm as a registered operator of torch: implementation, fake kernels, autograd.

    kernelbraid::rms_norm             rows [T, width], differentiable in x and weight
    kernelbraid::rms_norm_backward    its gradients

Outside of a trace the public function goes round the operator, whose boundary costs more than a small call:
the same functions run, the same bits come out.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelbraid.ops import dispatch
from kernelbraid.ops.arguments import (
    check_axis,
    check_number,
    check_shape,
    check_tensor,
    contract_of,
    dtypes_of,
)
from kernelbraid.ops.dispatch import is_traced, refuse_second, rows_contiguous

LARGEST_EPS = 1.0

_call = partial(dispatch.call, "rms_norm")


# ---- Calls with their checks ----


def check(x: Tensor, weight: Tensor, eps: float) -> None:
    """Check the arguments of the forward."""
    contract = contract_of("rms_norm", "x", x)
    check_tensor("x", x, dtypes_of(contract), 2, x.device)
    check_tensor("weight", weight, (x.dtype,), 1, x.device)
    check_axis(contract, "width", "x", x.shape[1])
    check_axis(contract, "tokens", "x", x.shape[0])
    check_shape("weight", weight, (x.shape[1],), "x")
    check_number("eps", eps, 0.0, LARGEST_EPS)


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize rows; see `api.rms_norm`."""
    check(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _call("rms_norm", x.device, x, weight, eps, out)
    return out


def differentiate(x: Tensor, weight: Tensor, dout: Tensor, eps: float, needed: list[bool]) -> list[Tensor]:
    """Return those gradients of `normalize` in x and weight that are needed."""
    check(x, weight, eps)
    check_tensor("dout", dout, (x.dtype,), 2, x.device)
    check_shape("dout", dout, x.shape, "x")
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if needed[1] else None
    if x.numel():
        _call("rms_norm_backward", x.device, x, weight, dout, eps, dx, dweight, 0)
    return [g for g in (dx, None if dweight is None else dweight.to(weight.dtype)) if g is not None]


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normalize(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("kernelbraid::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    x: Tensor, weight: Tensor, dout: Tensor, eps: float, needed: list[bool]
) -> list[Tensor]:
    return differentiate(x, weight, dout, eps, needed)


@rms_norm_backward.register_fake
def _(x: Tensor, weight: Tensor, dout: Tensor, eps: float, needed: list[bool]) -> list[Tensor]:
    return [
        torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for each, need in zip((x, weight), needed, strict=True)
        if need
    ]


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:2])
    if not any(needed):
        return None, None, None
    x, weight = ctx.saved_tensors
    recorded = is_traced(x) or torch.is_grad_enabled()
    function = rms_norm_backward if recorded else differentiate
    found = iter(function(x, weight, rows_contiguous(dout), ctx.eps, needed))
    return (*(next(found) if need else None for need in needed), None)


rms_norm.register_autograd(_gradients, setup_context=_save)
rms_norm_backward.register_autograd(refuse_second("rms_norm"))


class RmsNorm(torch.autograd.Function):
    """The differentiable norm of eager calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = normalize(x, weight, eps)
        _save(ctx, (x, weight, eps), out)
        return out

    backward = staticmethod(_gradients)


def normalize_with_grad(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`normalize`, recorded by autograd."""
    out: Tensor = RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out
