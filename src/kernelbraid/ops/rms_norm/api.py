"""The public function of RMS norm: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.rms_norm import registered
from kernelbraid.ops.rms_norm.spec import CONTRACT

__all__ = ["rms_norm"]


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, bias: object = None, weight_offset: object = None
) -> Tensor:
    """Divide each row by the root of its mean square + eps and multiply it by a weight.

    Differentiable once in x and weight, under `torch.compile` and activation checkpointing too.

    Args:
        x: [..., width], float32 on the CPU, bfloat16 or float16 on a GPU; at most 131072 rows.
        weight: [width], dtype and device of x.
        eps: added to the mean square; above 0, at most 1.
        bias: must be None: the contract does not cover a bias.
        weight_offset: must be None: the contract does not cover weights that count from 1.

    Returns:
        [..., width] in the dtype of x. The product is rounded once, after the weight.

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `rms_norm` 1. A row's bits depend on the row alone; the gradient of weight adds tokens in
        the order of the rows of x.
    """
    if bias is not None or weight_offset is not None:
        refuse_features(CONTRACT, bias=bias, weight_offset=weight_offset)
    check_is_tensor("x", x)
    refuse_tangents("rms_norm", x=x, weight=weight)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1] if x.dim() else 1)
    if is_traced(x):
        out: Tensor = registered.rms_norm(rows, weight, eps)
    elif torch.is_grad_enabled() and (x.requires_grad or getattr(weight, "requires_grad", False)):
        out = registered.normalize_with_grad(rows, weight, eps)
    else:
        out = registered.normalize(rows, weight, eps)
    return out.view(x.shape)
