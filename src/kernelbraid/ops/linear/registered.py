"""The linear layer as registered operators of torch: implementation, fake kernels, autograd.

    kernelbraid::linear             rows [T, N], differentiable in x, weight and bias
    kernelbraid::linear_backward    its gradients

Outside of a trace the public function goes round the operator, whose boundary costs more than a small call:
the same functions run, the same bits come out.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelbraid.ops import dispatch
from kernelbraid.ops.arguments import (
    check_axis,
    check_is_tensor,
    check_shape,
    check_tensor,
    check_written,
    contract_of,
    dtypes_of,
)
from kernelbraid.ops.dispatch import count_write, is_traced, refuse_second, rows_contiguous

_call = partial(dispatch.call, "linear")


# ---- Calls with their checks ----


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check the arguments of the forward."""
    contract = contract_of("linear", "x", x)
    check_tensor("x", x, dtypes_of(contract), 2, x.device)
    check_tensor("weight", weight, (x.dtype,), 2, x.device)
    check_axis(contract, "in_features", "x", x.shape[1])
    check_axis(contract, "tokens", "x", x.shape[0])
    check_axis(contract, "out_features", "weight", weight.shape[0])
    check_shape("weight", weight, (None, x.shape[1]), "x")
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), 1, x.device)
        check_shape("bias", bias, (weight.shape[0],), "weight")


def check_weight_grad(x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad: Tensor) -> None:
    """Check the tensor that gradients of weight are added to."""
    check_is_tensor("weight_grad", weight_grad)
    check_tensor("weight_grad", weight_grad, (torch.float32,), 2, x.device)
    check_shape("weight_grad", weight_grad, tuple(weight.shape), "weight")
    if weight_grad.requires_grad:
        raise ValueError("weight_grad must not require a gradient: pass .detach()")
    others = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    check_written("weight_grad", weight_grad, others)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows with weight; see `api.linear`."""
    check(x, weight, bias)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if out.numel():
        _call("linear", x.device, x, weight, bias, out)
    return out


def differentiate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    needed: Sequence[bool],
    weight_grad: Tensor | None = None,
) -> list[Tensor]:
    """Return those gradients of `multiply` in x, weight and bias that are needed.

    The gradient of weight is added to `weight_grad` instead where that is given.
    """
    check(x, weight, bias)
    check_tensor("dout", dout, (x.dtype,), 2, x.device)
    check_shape("dout", dout, (x.shape[0], weight.shape[0]), "x and weight")
    if needed[2] and bias is None:
        raise ValueError("a gradient of bias is asked for, and there is no bias")
    empty = partial(torch.empty, dtype=x.dtype, device=x.device)
    dx = empty(x.shape) if needed[0] else None
    dweight = empty(weight.shape) if needed[1] and weight_grad is None else None
    dbias = empty(weight.shape[0]) if needed[2] else None
    if x.shape[0] == 0:
        return [torch.zeros_like(g) for g in (dx, dweight, dbias) if g is not None]
    call = partial(_call, "linear_backward", x.device, x, weight, dout)
    if needed[1] and weight_grad is not None:
        call(None, weight_grad, None, 1)
        count_write(weight_grad)
    if any(g is not None for g in (dx, dweight, dbias)):
        call(dx, dweight, dbias, 0)
    return [g for g in (dx, dweight, dbias) if g is not None]


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return multiply(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)


@torch.library.custom_op("kernelbraid::linear_backward", mutates_args=())
def linear_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, needed: list[bool]
) -> list[Tensor]:
    return differentiate(x, weight, bias, dout, needed)


@linear_backward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, needed: list[bool]) -> list[Tensor]:
    return [
        torch.empty(each.shape, dtype=x.dtype, device=x.device)
        for each, need in zip((x, weight, bias), needed, strict=True)
        if need and each is not None
    ]


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *rest = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.weight_grad = rest[0] if rest else None


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])
    others: tuple[None, ...] = (None,) * (len(ctx.needs_input_grad) - 3)
    if not any(needed):
        return None, None, None, *others
    x, weight, bias = ctx.saved_tensors
    dout = rows_contiguous(dout)
    added = needed[1] and ctx.weight_grad is not None
    if is_traced(x) or torch.is_grad_enabled():
        if added:
            raise RuntimeError(
                "weight_grad is added to by an eager backward only: not under torch.compile, transforms or "
                "create_graph=True; leave it out there"
            )
        found = iter(linear_backward(x, weight, bias, dout, needed))
    else:
        found = iter(differentiate(x, weight, bias, dout, needed, ctx.weight_grad))
    returned = (needed[0], needed[1] and not added, needed[2])
    return *(next(found) if each else None for each in returned), *others


linear.register_autograd(_gradients, setup_context=_save)
linear_backward.register_autograd(refuse_second("linear"))


class Linear(torch.autograd.Function):
    """The differentiable layer of eager calls."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad: Tensor | None
    ) -> Tensor:
        out = multiply(x, weight, bias)
        _save(ctx, (x, weight, bias, weight_grad), out)
        return out

    backward = staticmethod(_gradients)


def multiply_with_grad(x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad: Tensor | None) -> Tensor:
    """`multiply`, recorded by autograd."""
    out: Tensor = Linear.apply(x, weight, bias, weight_grad)  # type: ignore[no-untyped-call]
    return out
