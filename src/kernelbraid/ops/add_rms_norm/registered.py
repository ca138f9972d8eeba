"""The residual add and RMS norm as a registered operator of torch: implementation, fake kernels, autograd.

    kernelbraid::add_rms_norm             rows [T, width], differentiable in x, residual and weight
    kernelbraid::add_rms_norm_backward    its gradients

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

_call = partial(dispatch.call, "add_rms_norm")


# ---- Calls with their checks ----


def check(name: str, x: Tensor, weight: Tensor, eps: float) -> None:
    """Check rows and weight."""
    contract = contract_of("add_rms_norm", name, x)
    check_tensor(name, x, dtypes_of(contract), 2, x.device)
    check_tensor("weight", weight, (x.dtype,), 1, x.device)
    check_axis(contract, "width", name, x.shape[1])
    check_axis(contract, "tokens", name, x.shape[0])
    check_shape("weight", weight, (x.shape[1],), name)
    check_number("eps", eps, 0.0, LARGEST_EPS)


def check_like(name: str, tensor: Tensor, x: Tensor, like: str = "x") -> None:
    """Check other rows by the first ones."""
    check_tensor(name, tensor, (x.dtype,), 2, x.device)
    check_shape(name, tensor, x.shape, like)


def normalize(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalize rows; see `api.add_rms_norm`."""
    check("x", x, weight, eps)
    check_like("residual", residual, x)
    out, residual_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if x.numel():
        _call("add_rms_norm", x.device, x, residual, weight, eps, out, residual_out)
    return out, residual_out


def differentiate(
    residual_out: Tensor,
    weight: Tensor,
    dout: Tensor,
    dresidual_out: Tensor | None,
    eps: float,
    needed: list[bool],
) -> list[Tensor]:
    """Return those gradients of `normalize` that are needed: in x and residual (one), and in weight."""
    x = residual_out
    check("residual_out", x, weight, eps)
    check_like("dout", dout, x, "residual_out")
    if dresidual_out is not None:
        check_like("dresidual_out", dresidual_out, x, "residual_out")
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if needed[1] else None
    if x.numel():
        given = (x, weight, dout, dresidual_out, eps)
        _call("add_rms_norm_backward", x.device, *given, dx, dweight, 0)
    return [g for g in (dx, None if dweight is None else dweight.to(weight.dtype)) if g is not None]


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::add_rms_norm", mutates_args=())
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return normalize(x, residual, weight, eps)


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    empty = partial(torch.empty, dtype=x.dtype, device=x.device)
    return empty(x.shape), empty(x.shape)


@torch.library.custom_op("kernelbraid::add_rms_norm_backward", mutates_args=())
def add_rms_norm_backward(
    residual_out: Tensor,
    weight: Tensor,
    dout: Tensor,
    dresidual_out: Tensor | None,
    eps: float,
    needed: list[bool],
) -> list[Tensor]:
    return differentiate(residual_out, weight, dout, dresidual_out, eps, needed)


@add_rms_norm_backward.register_fake
def _(
    residual_out: Tensor,
    weight: Tensor,
    dout: Tensor,
    dresidual_out: Tensor | None,
    eps: float,
    needed: list[bool],
) -> list[Tensor]:
    return [
        torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for each, need in zip((residual_out, weight), needed, strict=True)
        if need
    ]


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dresidual_out: Tensor | None) -> tuple[Tensor | None, ...]:
    of_x, of_residual, of_weight = ctx.needs_input_grad[:3]
    needed = [of_x or of_residual, of_weight]
    if not any(needed) or (dout is None and dresidual_out is None):
        return None, None, None, None
    residual_out, weight = ctx.saved_tensors
    dout = torch.zeros_like(residual_out) if dout is None else rows_contiguous(dout)
    others = None if dresidual_out is None else rows_contiguous(dresidual_out)
    recorded = is_traced(residual_out) or torch.is_grad_enabled()
    function = add_rms_norm_backward if recorded else differentiate
    found = iter(function(residual_out, weight, dout, others, ctx.eps, needed))
    dx, dweight = (next(found) if need else None for need in needed)
    return dx if of_x else None, dx if of_residual else None, dweight, None


add_rms_norm.register_autograd(_gradients, setup_context=_save)
add_rms_norm_backward.register_autograd(refuse_second("add_rms_norm"))


class AddRmsNorm(torch.autograd.Function):
    """The differentiable add and norm of eager calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        found = normalize(x, residual, weight, eps)
        _save(ctx, (x, residual, weight, eps), found)
        return found

    backward = staticmethod(_gradients)


def normalize_with_grad(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`normalize`, recorded by autograd."""
    found: tuple[Tensor, Tensor] = AddRmsNorm.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call]
    return found
