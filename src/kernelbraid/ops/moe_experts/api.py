"""The public function of a mixture's experts: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.moe_experts import registered
from kernelbraid.ops.moe_experts.spec import CONTRACT

__all__ = ["moe_experts"]


def moe_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    bias: object = None,
    activation: object = None,
) -> Tensor:
    """Add, for each token, the gated MLPs of its chosen experts, each times its weight.

    Differentiable once in x, weights, gate_up and down, under `torch.compile` and activation checkpointing
    too. A slot whose expert is none of 0 .. E - 1 adds nothing: a rank may hold a part of the experts.

    Args:
        x: [..., H], float32 on the CPU, bfloat16 or float16 on a GPU; at most 131072 rows.
        weights: [..., k] float32, of every slot; at most 16 slots.
        experts: [..., k] int32, as `moe_router` gives them.
        gate_up: [E, 2 I, H], dtype of x: for each expert the rows of gate, then those of up; at most 512.
        down: [E, H, I], dtype of x.
        bias: must be None: the contract does not cover a bias.
        activation: must be None: the contract covers swiglu alone.

    Returns:
        [..., H] in the dtype of x. On a GPU the activation is rounded to it once; products with `down`,
        weights and the sum over slots stay in float32, and the sum is rounded once.

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `moe_experts` 1. A row's bits depend on the row, its weights and its experts alone,
        whatever others chose; gradients of gate_up and down add an expert's tokens in the order of x's rows.
    """
    if bias is not None or activation is not None:
        refuse_features(CONTRACT, bias=bias, activation=activation)
    for name, tensor in (("x", x), ("weights", weights), ("experts", experts)):
        check_is_tensor(name, tensor)
    refuse_tangents("moe_experts", x=x, weights=weights, gate_up=gate_up, down=down)
    rows, *slots = (
        tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        for tensor in (x, weights, experts)
    )
    arguments = (rows, *slots, gate_up, down)
    recorded = (x, weights, gate_up, down)
    if is_traced(x):
        out: Tensor = registered.moe_experts(*arguments)
    elif torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in recorded):
        out = registered.compute_with_grad(*arguments)
    else:
        out = registered.compute(*arguments)
    return out.view(x.shape)
