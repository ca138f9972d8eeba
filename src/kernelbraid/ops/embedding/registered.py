"""Embedding as a registered operator of torch: implementation, fake kernels, autograd.

    kernelbraid::embedding             rows of weight [V, width] by ids [T], differentiable in weight
    kernelbraid::embedding_backward    its gradient [V, width]

Outside of a trace the public function goes round the operator, whose boundary costs more than a small call:
the same functions run, the same bits come out.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernelbraid.ops import dispatch
from kernelbraid.ops.arguments import (
    check_axis,
    check_shape,
    check_tensor,
    check_written,
    contract_of,
    dtypes_of,
)
from kernelbraid.ops.dispatch import count_write, is_traced, refuse_second, rows_contiguous

ID_DTYPES = (torch.int32, torch.int64)

_call = partial(dispatch.call, "embedding")


# ---- Calls with their checks ----


def check(ids: Tensor, weight: Tensor) -> None:
    """Check the arguments of the forward; on the CPU the values of ids too."""
    contract = contract_of("embedding", "weight", weight)
    check_tensor("weight", weight, dtypes_of(contract), 2, weight.device)
    check_tensor("ids", ids, ID_DTYPES, 1, weight.device)
    check_axis(contract, "width", "weight", weight.shape[1])
    check_axis(contract, "vocabulary", "weight", weight.shape[0])
    check_axis(contract, "tokens", "ids", ids.shape[0])
    if ids.is_cpu and len(ids):
        unsigned = np.uint32 if ids.dtype == torch.int32 else np.uint64
        if ids.numpy().view(unsigned).max() >= len(weight):  # a negative id is a large one
            wrong = ids[(ids < 0) | (ids >= len(weight))][0].item()
            raise ValueError(f"ids must lie between 0 and {len(weight) - 1}, as weight has rows, got {wrong}")


def check_accumulator(weight_grad: Tensor, weight: Tensor) -> None:
    """Check the tensor that gradients are added to."""
    check_tensor("weight_grad", weight_grad, (torch.float32,), 2, weight.device)
    check_shape("weight_grad", weight_grad, weight.shape, "weight")
    check_written("weight_grad", weight_grad, {"weight": weight})
    if weight_grad.requires_grad:
        raise ValueError("weight_grad is written in place: it must not require a gradient itself")


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """Copy rows; see `api.embedding`."""
    check(ids, weight)
    out = torch.empty(len(ids), weight.shape[1], dtype=weight.dtype, device=weight.device)
    if out.numel():
        _call("embedding", weight.device, ids, weight, out)
    return out


def differentiate(ids: Tensor, dout: Tensor, vocabulary: int) -> Tensor:
    """Return the gradient of `look_up` in weight, [V, width] in the dtype of dout."""
    contract = contract_of("embedding", "dout", dout)
    check_tensor("dout", dout, dtypes_of(contract), 2, dout.device)
    check_tensor("ids", ids, ID_DTYPES, 1, dout.device)
    check_shape("dout", dout, (len(ids), None), "ids")
    dweight = torch.empty(vocabulary, dout.shape[1], dtype=dout.dtype, device=dout.device)
    _call("embedding_backward", dout.device, ids, None, dout, dweight, 0)
    return dweight


def accumulate(ids: Tensor, dout: Tensor, weight_grad: Tensor) -> None:
    """Add the gradient of `look_up` in weight to weight_grad."""
    if dout.numel():
        _call("embedding_backward", dout.device, ids, None, dout, weight_grad, 1)
        count_write(weight_grad)


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::embedding", mutates_args=())
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return look_up(ids, weight)


@embedding.register_fake
def _(ids: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(ids.shape[0], weight.shape[1], dtype=weight.dtype, device=weight.device)


@torch.library.custom_op("kernelbraid::embedding_backward", mutates_args=())
def embedding_backward(ids: Tensor, dout: Tensor, vocabulary: int) -> Tensor:
    return differentiate(ids, dout, vocabulary)


@embedding_backward.register_fake
def _(ids: Tensor, dout: Tensor, vocabulary: int) -> Tensor:
    return torch.empty(vocabulary, dout.shape[1], dtype=dout.dtype, device=dout.device)


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, weight = inputs
    ctx.vocabulary = weight.shape[0]
    ctx.save_for_backward(ids)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.needs_input_grad[1]:
        return None, None
    (ids,) = ctx.saved_tensors
    recorded = is_traced(dout) or torch.is_grad_enabled()
    function = embedding_backward if recorded else differentiate
    return None, function(ids, rows_contiguous(dout), ctx.vocabulary)


embedding.register_autograd(_gradients, setup_context=_save)
embedding_backward.register_autograd(refuse_second("embedding"))


class Embedding(torch.autograd.Function):
    """The differentiable look-up of eager calls."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        out = look_up(ids, weight)
        _save(ctx, (ids, weight), out)
        return out

    backward = staticmethod(_gradients)


class AccumulatingEmbedding(torch.autograd.Function):
    """The look-up whose gradient is added to a tensor that is there already."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight_grad = weight_grad  # not saved: several backward passes write to it
        return look_up(ids, weight)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second("embedding")(ctx)
        if ctx.needs_input_grad[1]:
            accumulate(ids, rows_contiguous(dout), ctx.weight_grad)
        return None, None, None


def look_up_with_grad(ids: Tensor, weight: Tensor, weight_grad: Tensor | None) -> Tensor:
    """`look_up`, recorded by autograd."""
    if weight_grad is None:
        out: Tensor = Embedding.apply(ids, weight)  # type: ignore[no-untyped-call]
    else:
        out = AccumulatingEmbedding.apply(ids, weight, weight_grad)  # type: ignore[no-untyped-call]
    return out
