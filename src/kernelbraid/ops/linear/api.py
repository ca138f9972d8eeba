"""The public function of the linear layer: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.linear import registered
from kernelbraid.ops.linear.spec import CONTRACT

__all__ = ["linear"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_grad: Tensor | None = None,
    weight_scale: object = None,
    activation: object = None,
) -> Tensor:
    """Multiply each row by the transpose of a weight and add a bias.

    Differentiable once in x, weight and bias, under `torch.compile` and activation checkpointing too.

    Args:
        x: [..., in_features], float32 on the CPU, bfloat16 or float16 on a GPU; at most 131072 rows.
        weight: [out_features, in_features], dtype and device of x; at most 262144 features of either kind.
        bias: [out_features], dtype and device of x, or None.
        weight_grad: float32 [out_features, in_features], or None. Where given, the eager backward adds the
            gradient of weight to it in float32, and weight gets none by autograd (nor do its hooks run). A
            recorded call needs a weight that requires a gradient.
        weight_scale: must be None: the contract does not cover quantised weights.
        activation: must be None: the contract does not cover a function of the result.

    Returns:
        [..., out_features] in the dtype of x. The sum is rounded once, after the bias.

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again; with `weight_grad`, a backward that is not eager.

    Bits: contract `linear` 1. A row's bits depend on the row, weight and bias alone; the gradients of weight
        and bias add tokens in the order of the rows of x. Gradients added to `weight_grad` over pieces of
        multiples of 64 rows have the bits of those of all rows at once.
    """
    if weight_scale is not None or activation is not None:
        refuse_features(CONTRACT, weight_scale=weight_scale, activation=activation)
    check_is_tensor("x", x)
    check_is_tensor("weight", weight)
    refuse_tangents("linear", x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1] if x.dim() else 1)
    traced = is_traced(x)
    recorded = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (x, weight, bias))
    if weight_grad is not None:
        if traced:
            raise ValueError(
                "weight_grad must be None under torch.compile, transforms and tensor subclasses: "
                "only an eager backward adds to it"
            )
        if torch.is_grad_enabled() and not weight.requires_grad:
            raise ValueError("weight_grad is given, and weight does not require a gradient to be added to it")
        registered.check(rows, weight, bias)
        registered.check_weight_grad(rows, weight, bias, weight_grad)
    if traced:
        out: Tensor = registered.linear(rows, weight, bias)
    elif recorded:
        out = registered.multiply_with_grad(rows, weight, bias, weight_grad)
    else:
        out = registered.multiply(rows, weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])
