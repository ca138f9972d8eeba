"""The rollout's fused step as a registered operator of torch: implementation and fake kernel, no gradients.

    kernelbraid::qk_norm_rope_cache    writes the caches, returns the queries

Outside of a trace the public function goes round the operator, whose boundary costs more than a small call:
the same functions run, the same bits come out.
"""

from functools import partial

import torch
from torch import Tensor

from kernelbraid.ops import dispatch
from kernelbraid.ops.arguments import check_number, check_shape, check_tensor, check_written
from kernelbraid.ops.attention.arguments import check_cache_write
from kernelbraid.ops.qk_norm.registered import LARGEST_EPS
from kernelbraid.ops.rope.registered import check_heads, check_tables

_call = partial(dispatch.call, "qk_norm_rope_cache")


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    """Check the arguments by the rules of the operators that are fused here."""
    check_heads(("q", "k"), q, k)
    check_tables(positions, cos, sin, q)
    check_tensor("v", v, (q.dtype,), 3, q.device)
    check_cache_write(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_written(name, cache, {"q": q})
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight must be given together, or neither of them")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_tensor(name, weight, (q.dtype,), 1, q.device)
            check_shape(name, weight, (q.shape[2],), "q")
    check_number("eps", eps, 0.0, LARGEST_EPS)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Write the caches and return the queries; see `api.qk_norm_rope_cache`."""
    tables, cache = (positions, cos, sin), (k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)
    check(q, k, v, *tables, *cache, q_weight, k_weight, eps)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel():
        operands = (q, k, v, q_weight, k_weight, *tables, *cache, eps, out)
        _call("qk_norm_rope_cache", q.device, *operands)
    return out


@torch.library.custom_op("kernelbraid::qk_norm_rope_cache", mutates_args=("k_cache", "v_cache"))
def qk_norm_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    tables, cache = (positions, cos, sin), (k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)
    return prepare(q, k, v, *tables, *cache, q_weight, k_weight, eps)


@qk_norm_rope_cache.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    # Where torch.compile (to 2.13) knows shapes as symbols, it writes at offset 0 instead of the view's own.
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.storage_offset() != 0:
            raise ValueError(
                f"{name} is a view with an offset, and torch.compile may write elsewhere: give each layer a "
                "tensor of its own, or call qk_norm_rope_cache outside of compiled code"
            )
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
