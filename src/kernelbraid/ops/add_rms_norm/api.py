"""The public function of the residual add and RMS norm: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.add_rms_norm import registered
from kernelbraid.ops.add_rms_norm.spec import CONTRACT
from kernelbraid.ops.arguments import check_is_tensor, check_shape, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    bias: object = None,
    weight_offset: object = None,
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream, and normalize the rows of the sum.

    Differentiable once in x, residual and weight, under `torch.compile` and activation checkpointing too.

    Args:
        x: [..., width], float32 on the CPU, bfloat16 or float16 on a GPU; at most 131072 rows.
        residual: shape, dtype and device of x.
        weight: [width], dtype and device of x.
        eps: added to the mean square; above 0, at most 1.
        bias: must be None: the contract does not cover a bias.
        weight_offset: must be None: the contract does not cover weights that count from 1.

    Returns:
        (out, residual_out), both [..., width] in the dtype of x: residual_out is x + residual, rounded; out
        is the norm of that, whose product is rounded once, after the weight.

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `add_rms_norm` 1. A row's bits depend on its rows of x and residual alone, and out has the
        bits of `rms_norm(residual_out, weight, eps=eps)` as shipped; the gradient of weight adds tokens in
        the order of the rows of x.
    """
    if bias is not None or weight_offset is not None:
        refuse_features(CONTRACT, bias=bias, weight_offset=weight_offset)
    check_is_tensor("x", x)
    check_is_tensor("residual", residual)
    refuse_tangents("add_rms_norm", x=x, residual=residual, weight=weight)
    if x.dim() == residual.dim():
        check_shape("residual", residual, x.shape, "x")
    width = x.shape[-1] if x.dim() else 1
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    others = residual if x.dim() == 2 or residual.dim() != x.dim() else residual.reshape(-1, width)
    if is_traced(x):
        out, total = registered.add_rms_norm(rows, others, weight, eps)
    elif torch.is_grad_enabled() and (
        x.requires_grad or residual.requires_grad or getattr(weight, "requires_grad", False)
    ):
        out, total = registered.normalize_with_grad(rows, others, weight, eps)
    else:
        out, total = registered.normalize(rows, others, weight, eps)
    return (out, total) if x.dim() == 2 else (out.view(x.shape), total.view(x.shape))
