"""The public function of the rollout's fused step; its checks are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import count_write, is_traced
from kernelbraid.ops.qk_norm_rope_cache import registered
from kernelbraid.ops.qk_norm_rope_cache.spec import CONTRACT

__all__ = ["qk_norm_rope_cache"]


def qk_norm_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    bias: object = None,
    weight_offset: object = None,
    layer_norm: object = None,
    interleaved: object = None,
    rotary_dim: object = None,
    sections: object = None,
) -> Tensor:
    """Normalize and turn the heads of new tokens, and write their keys and values into the paged cache.

    What stands between projection and attention in rollout, in one pass; no gradients. `paged_attention`
    reads the cache with the same page table and lengths. On a GPU positions, lengths and page tables are not
    looked at, which would mean to wait for it: see `check_metadata`.

    Args:
        q: [T, Hq, D], float32 on the CPU, bfloat16 or float16 on a GPU, the requests' new tokens one after
            the other; D 64 or 128; last dimension contiguous, so that it may be a part of a joint projection.
        k: [T, Hkv, D], dtype and device of q.
        v: [T, Hkv, D], dtype and device of q.
        positions: [T] int32, rows of the tables: which angles, not where in the cache.
        cos: [positions, D / 2] float32 on the device of q, as `rope_tables` gives it.
        sin: the same of the sine.
        k_cache: [pages, page_size, Hkv, D], dtype and device of q, written in place; last dimension
            contiguous.
        v_cache: same shape as k_cache, written in place; under torch.compile both must be tensors of their
            own, not views with an offset, which is refused there.
        page_table: [B, max_pages] int32: the pages of a request in the order of its positions.
        cu_seqlens_q: [B + 1] int32, from 0 to T: request b's rows of q, k and v.
        seqlens_k: [B] int32: keys of each request, new tokens included.
        q_weight: [D], dtype and device of q: the weight of q's norm (Qwen 3). None: no norm (Llama, Qwen 2).
        k_weight: the weight of k's norm; given where q_weight is.
        eps: added to the mean square; above 0, at most 1.
        bias: must be None, as weight_offset, layer_norm, interleaved, rotary_dim and sections: see `qk_norm`
            and `rope`.

    Returns:
        The queries, [T, Hq, D] in the dtype of q, contiguous.

    Raises:
        ValueError: an argument lies outside the contract or requires grad, or two new tokens have the same
            place in the cache; the message names it.
        RuntimeError: the GPU is older than sm_80, or the installed implementation changed since it was
            promoted.

    Bits: contract `qk_norm_rope_cache` 1. Those of `qk_norm`, then `rope`, then `write_kv_cache`, as shipped.
    """
    features = {
        **{"bias": bias, "weight_offset": weight_offset, "layer_norm": layer_norm},
        **{"interleaved": interleaved, "rotary_dim": rotary_dim, "sections": sections},
    }
    if any(value is not None for value in features.values()):
        refuse_features(CONTRACT, **features)
    tensors = {"q": q, "k": k, "v": v, "positions": positions, "cos": cos, "sin": sin}
    for name, tensor in tensors.items():
        check_is_tensor(name, tensor)
    tensors |= {"k_cache": k_cache, "v_cache": v_cache}
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    given = tensors | {name: weight for name, weight in weights.items() if weight is not None}
    refuse_tangents("qk_norm_rope_cache", **given)
    if torch.is_grad_enabled():
        for name, tensor in given.items():
            if getattr(tensor, "requires_grad", False):
                raise ValueError(
                    f"{name} requires grad, and qk_norm_rope_cache has no gradients: use qk_norm and rope, "
                    f"pass {name}.detach(), or call under torch.no_grad()"
                )
    inputs = (q, k, v, positions, cos, sin, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)
    if is_traced(q):
        traced: Tensor = registered.qk_norm_rope_cache(*inputs, q_weight, k_weight, eps)
        return traced
    out = registered.prepare(*inputs, q_weight, k_weight, eps)
    count_write(k_cache, v_cache)
    return out
