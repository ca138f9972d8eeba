"""The public function of QK norm: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.qk_norm import registered
from kernelbraid.ops.qk_norm.spec import CONTRACT

__all__ = ["qk_norm"]


def qk_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    eps: float = 1e-6,
    bias: object = None,
    weight_offset: object = None,
    layer_norm: object = None,
) -> tuple[Tensor, Tensor]:
    """Divide every head of q and k by the root of its mean square + eps and multiply it by a weight.

    Differentiable once in q, k and both weights, under `torch.compile` and activation checkpointing too.

    Args:
        q: [T, Hq, D], float32 on the CPU, bfloat16 or float16 on a GPU; T at most 131072, D at most 256; last
            dimension contiguous, so that it may be a part of a joint projection.
        k: [T, Hkv, D], dtype and device of q.
        q_weight: [D], dtype and device of q.
        k_weight: [D], dtype and device of q.
        eps: added to the mean square; above 0, at most 1.
        bias: must be None: the contract does not cover a bias.
        weight_offset: must be None: the contract does not cover weights that count from 1.
        layer_norm: must be None: the contract does not cover norms over all heads, or with a mean.

    Returns:
        (q_out, k_out), of the shapes of q and k and their dtype, contiguous. The product is rounded once,
        after the weight.

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `qk_norm` 1. A head's bits depend on that head alone and are those of `rms_norm` on it, as
        shipped; the gradients of weights add heads in the order of tokens.
    """
    if bias is not None or weight_offset is not None or layer_norm is not None:
        refuse_features(CONTRACT, bias=bias, weight_offset=weight_offset, layer_norm=layer_norm)
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight}
    for name, tensor in tensors.items():
        check_is_tensor(name, tensor)
    refuse_tangents("qk_norm", **tensors)
    if is_traced(q):
        found: tuple[Tensor, Tensor] = registered.qk_norm(q, k, q_weight, k_weight, eps)
        return found
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
        return registered.normalize_with_grad(q, k, q_weight, k_weight, eps)
    return registered.normalize(q, k, q_weight, k_weight, eps)
