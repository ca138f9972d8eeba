"""The public function of a mixture's router: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.moe_router import registered
from kernelbraid.ops.moe_router.spec import CONTRACT, SCORINGS

__all__ = ["moe_router"]


def moe_router(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: object = None,
    groups: object = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's best experts and give them weights.

    Weights are differentiable once in logits, under `torch.compile` and activation checkpointing too.

    Args:
        logits: [..., E], float32 on the CPU, bfloat16 or float16 on a GPU; E up to 512, 131072 rows.
        top_k: experts of a token, 1 to 16, at most E.
        scoring: "softmax" over all experts, or "sigmoid" of each.
        renormalize: divide the weights of a token by their sum.
        bias: must be None: the contract does not cover a bias that chooses.
        groups: must be None: the contract does not cover choosing among groups.

    Returns:
        weights: [..., top_k] float32, in descending order; not rounded to the dtype of logits.
        experts: [..., top_k] int32, indices; of equal logits the lower index comes first, NaN comes last.

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `moe_router` 1. A row's bits depend on the row alone.
    """
    if bias is not None or groups is not None:
        refuse_features(CONTRACT, bias=bias, groups=groups)
    check_is_tensor("logits", logits)
    refuse_tangents("moe_router", logits=logits)
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")
    if not isinstance(renormalize, bool):
        raise ValueError(f"renormalize must be a bool, got {type(renormalize).__name__}")
    rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1] if logits.dim() else 1)
    arguments = (rows, top_k, scoring == "sigmoid", renormalize)
    if is_traced(logits):
        weights, experts = registered.moe_router(*arguments)
    elif torch.is_grad_enabled() and logits.requires_grad:
        weights, experts = registered.route_with_grad(*arguments)
    else:
        weights, experts = registered.route(*arguments)
    shape = (*logits.shape[:-1], top_k)
    return weights.view(shape), experts.view(shape)
