"""The public function of embedding: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.embedding import registered
from kernelbraid.ops.embedding.spec import CONTRACT

__all__ = ["embedding"]


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    weight_grad: Tensor | None = None,
    padding_idx: object = None,
    max_norm: object = None,
    scale: object = None,
) -> Tensor:
    """Copy the rows of a table that ids name.

    Differentiable once in weight, under `torch.compile` and activation checkpointing too.

    Args:
        ids: [...], int32 or int64, on the device of weight; at most 131072. On a GPU their values are not
            read by the host: a row whose id lies outside of the table is NaN.
        weight: [V, width], float32 on the CPU, bfloat16 or float16 on a GPU; at most 1048576 rows.
        weight_grad: [V, width], float32: the backward pass adds to it, and weight gets no gradient from this
            call. Pieces of a batch, whatever their sizes, then give the bits of the whole batch. Not under
            `torch.compile`.
        padding_idx: must be None: the contract does not cover a row without a gradient.
        max_norm: must be None: the contract does not cover rows that are renormalised.
        scale: must be None: the contract does not cover scaled rows.

    Returns:
        [..., width] in the dtype of weight, with every bit of its rows.

    Raises:
        ValueError: an argument lies outside the contract, on the CPU also an id outside of the table; the
            message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `embedding` 1. A row's bits are those of the table; the gradient of weight adds tokens in
        the order of ids, in float32.
    """
    if padding_idx is not None or max_norm is not None or scale is not None:
        refuse_features(CONTRACT, padding_idx=padding_idx, max_norm=max_norm, scale=scale)
    check_is_tensor("ids", ids)
    check_is_tensor("weight", weight)
    refuse_tangents("embedding", weight=weight)
    flat = ids.reshape(-1).contiguous()
    traced = is_traced(weight) or is_traced(ids)
    if weight_grad is not None:
        if traced:
            raise ValueError(
                "weight_grad is for eager calls: pass None under torch.compile and dispatch modes"
            )
        registered.check_accumulator(weight_grad, weight)
    if traced:
        out: Tensor = registered.embedding(flat, weight)
    elif torch.is_grad_enabled() and weight.requires_grad:
        out = registered.look_up_with_grad(flat, weight, weight_grad)
    else:
        out = registered.look_up(flat, weight)
    return out.view(*ids.shape, out.shape[-1])
