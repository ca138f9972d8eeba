"""SwiGLU as a registered operator of torch: implementation, fake kernels, autograd.

    kernelbraid::swiglu             rows of gate and up [T, width], differentiable in both
    kernelbraid::swiglu_backward    their gradients, halves of one tensor [T, 2 * width]

Outside of a trace the public function goes round the operator, whose boundary costs more than a small call:
the same functions run, the same bits come out.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelbraid.ops import dispatch
from kernelbraid.ops.arguments import check_axis, check_shape, check_tensor, contract_of, dtypes_of
from kernelbraid.ops.dispatch import is_traced, refuse_second, rows_contiguous

_call = partial(dispatch.call, "swiglu")


# ---- Calls with their checks ----


def check(gate: Tensor, up: Tensor) -> None:
    """Check the arguments of the forward."""
    contract = contract_of("swiglu", "gate", gate)
    check_tensor("gate", gate, dtypes_of(contract), 2, gate.device)
    check_tensor("up", up, (gate.dtype,), 2, gate.device)
    check_axis(contract, "width", "gate", gate.shape[1])
    check_axis(contract, "tokens", "gate", gate.shape[0])
    check_shape("up", up, gate.shape, "gate")


def activate(gate: Tensor, up: Tensor) -> Tensor:
    """Activate rows; see `api.swiglu`."""
    check(gate, up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gate.numel():
        _call("swiglu", gate.device, gate, up, out)
    return out


def differentiate(gate: Tensor, up: Tensor, dout: Tensor) -> Tensor:
    """Return the gradients of `activate` in gate and up, side by side in [T, 2 * width]."""
    check(gate, up)
    check_tensor("dout", dout, (gate.dtype,), 2, gate.device)
    check_shape("dout", dout, gate.shape, "gate")
    tokens, width = gate.shape
    dx = torch.empty(tokens, 2 * width, dtype=gate.dtype, device=gate.device)
    if gate.numel():
        _call("swiglu_backward", gate.device, gate, up, dout, dx[:, :width], dx[:, width:])
    return dx


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return activate(gate, up)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@torch.library.custom_op("kernelbraid::swiglu_backward", mutates_args=())
def swiglu_backward(gate: Tensor, up: Tensor, dout: Tensor) -> Tensor:
    return differentiate(gate, up, dout)


@swiglu_backward.register_fake
def _(gate: Tensor, up: Tensor, dout: Tensor) -> Tensor:
    return torch.empty(gate.shape[0], 2 * gate.shape[1], dtype=gate.dtype, device=gate.device)


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _both(ctx: Any, dout: Tensor) -> Tensor | None:
    """Gradients of gate and up side by side, or None if nobody wants them."""
    if not any(ctx.needs_input_grad):
        return None
    gate, up = ctx.saved_tensors
    recorded = is_traced(gate) or torch.is_grad_enabled()
    function = swiglu_backward if recorded else differentiate
    found: Tensor = function(gate, up, rows_contiguous(dout))
    return found


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx = _both(ctx, dout)
    if dx is None:
        return None, None
    halves = dx.chunk(2, 1)
    return tuple(half if need else None for half, need in zip(halves, ctx.needs_input_grad, strict=True))


swiglu.register_autograd(_gradients, setup_context=_save)
swiglu_backward.register_autograd(refuse_second("swiglu"))


class Swiglu(torch.autograd.Function):
    """The differentiable activation of eager calls with gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        out = activate(gate, up)
        _save(ctx, (gate, up), out)
        return out

    backward = staticmethod(_gradients)


class PackedSwiglu(torch.autograd.Function):
    """The same with both halves in one tensor, whose gradient is written once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        halves = x.chunk(2, 1)
        ctx.save_for_backward(*halves)
        return activate(*halves)

    backward = staticmethod(_both)


def activate_with_grad(gate: Tensor, up: Tensor) -> Tensor:
    """`activate`, recorded by autograd."""
    out: Tensor = Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def activate_packed_with_grad(x: Tensor) -> Tensor:
    """`activate` of the halves of x [T, 2 * width], recorded by autograd."""
    out: Tensor = PackedSwiglu.apply(x)  # type: ignore[no-untyped-call]
    return out
