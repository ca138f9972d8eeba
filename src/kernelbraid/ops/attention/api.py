"""The public functions of unified attention: checks are in arguments.py, autograd is in registered.py."""

from typing import Literal, overload

import torch
from torch import Tensor

from kernelbraid.ops.arguments import refuse_features, refuse_tangents
from kernelbraid.ops.attention import arguments, registered
from kernelbraid.ops.attention.arguments import check_metadata
from kernelbraid.ops.attention.spec import CONTRACT
from kernelbraid.ops.dispatch import count_write, is_traced

__all__ = ["attention", "check_metadata", "paged_attention", "write_kv_cache"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
    window: None = None,
    soft_cap: None = None,
    sinks: None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
    window: None = None,
    soft_cap: None = None,
    sinks: None = None,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    window: object = None,
    soft_cap: object = None,
    sinks: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal grouped-query attention over whole sequences packed one after the other: the policy update.

    Differentiable once in q, k and v, under `torch.compile` and activation checkpointing too. On a GPU
    lengths are not looked at, which would mean to wait for it: see `check_metadata`.

    Args:
        q: [T, Hq, D], float32 on the CPU, bfloat16 or float16 on a GPU; last dimension contiguous, other
            strides free.
        k: [T, Hkv, D], dtype and device of q; query head h reads KV head h // (Hq // Hkv).
        v: [T, Hkv, D], dtype and device of q.
        cu_seqlens: [B + 1] int32, from 0 to T: sequence b holds rows cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen: at least the longest sequence, in tokens; at most 131072.
        softmax_scale: factor of the scores, by default 1 / sqrt(D); above 0.
        return_lse: also return the log-sum-exp of the scores, which is not differentiable.
        window: must be None: the contract does not cover sliding windows.
        soft_cap: must be None: the contract does not cover capped scores.
        sinks: must be None: the contract does not cover attention sinks.

    Returns:
        out [T, Hq, D] in the dtype of q, with `return_lse` also lse [Hq, T] float32 (natural logarithm).

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `attention` 1. A row's bits are those that `paged_attention` gives for the same keys; a
        gradient's depend on its own sequence alone.
    """
    if window is not None or soft_cap is not None or sinks is not None:
        refuse_features(CONTRACT, window=window, soft_cap=soft_cap, sinks=sinks)
    refuse_tangents("attention", q=q, k=k, v=v)
    if is_traced(q):
        out, lse = registered.attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale)
        return (out, lse) if return_lse else out
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v)):
        out, lse = registered.attend_with_grad(q, k, v, cu_seqlens, max_seqlen, softmax_scale)
        return (out, lse) if return_lse else out
    out, lse = registered.attend(q, k, v, cu_seqlens, max_seqlen, softmax_scale, return_lse)
    return out if lse is None else (out, lse)


@overload
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
    out: Tensor | None = None,
    window: None = None,
    soft_cap: None = None,
    sinks: None = None,
) -> Tensor: ...


@overload
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
    out: Tensor | None = None,
    window: None = None,
    soft_cap: None = None,
    sinks: None = None,
) -> tuple[Tensor, Tensor]: ...


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    window: object = None,
    soft_cap: object = None,
    sinks: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal grouped-query attention of new tokens over pages: prefill, chunks and decode, mixed in one call.

    The new tokens are the request's last positions, and their keys and values are already in the cache
    (`write_kv_cache`). Entries of the page table beyond a request's pages may hold anything. No gradients.
    On a GPU lengths and page tables are not looked at, which would mean to wait for it: see `check_metadata`.

    Args:
        q: [T, Hq, D], float32 on the CPU, bfloat16 or float16 on a GPU, the requests' new tokens one after
            the other; last dimension contiguous.
        k_cache: [pages, page_size, Hkv, D], dtype and device of q, page_size 1 to 256; last dimension
            contiguous.
        v_cache: same shape as k_cache.
        page_table: [B, max_pages] int32: the pages of a request in the order of its positions.
        cu_seqlens_q: [B + 1] int32, from 0 to T: request b's rows of q.
        seqlens_k: [B] int32: keys of each request, new tokens included.
        max_seqlen_q: at least the most new tokens of a request.
        max_seqlen_k: at least the most keys of a request; at most 131072.
        softmax_scale: factor of the scores, by default 1 / sqrt(D); above 0.
        return_lse: also return the log-sum-exp of the scores.
        out: [T, Hq, D] in the dtype of q, to write into; must not overlap itself or an input.
        window: must be None: the contract does not cover sliding windows.
        soft_cap: must be None: the contract does not cover capped scores.
        sinks: must be None: the contract does not cover attention sinks.

    Returns:
        out [T, Hq, D] in the dtype of q, with `return_lse` also lse [Hq, T] float32 (natural logarithm).

    Raises:
        ValueError: an argument lies outside the contract or requires grad; the message names it.
        RuntimeError: the GPU is older than sm_80, or the installed implementation changed since it was
            promoted.

    Bits: contract `attention` 1. A row's bits depend on its query and on its request's keys and values alone.
    """
    if window is not None or soft_cap is not None or sinks is not None:
        refuse_features(CONTRACT, window=window, soft_cap=soft_cap, sinks=sinks)
    refuse_tangents("attention", q=q, k_cache=k_cache, v_cache=v_cache)
    arguments.refuse_grad(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    inputs = (q, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)
    if is_traced(q):
        lse = registered.empty_lse(q) if return_lse else None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        registered.paged_attention(*inputs, softmax_scale, out, lse)
    else:
        out, lse = registered.attend_pages(*inputs, softmax_scale, out, return_lse)
    return out if lse is None else (out, lse)


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
) -> None:
    """Write the keys and values of each request's new tokens into its pages, at its last positions.

    On a GPU lengths and page tables are not looked at, which would mean to wait for it: see `check_metadata`.

    Args:
        k: [T, Hkv, D], float32 on the CPU, bfloat16 or float16 on a GPU, the requests' new tokens one after
            the other; last dimension contiguous.
        v: [T, Hkv, D], dtype and device of k.
        k_cache: [pages, page_size, Hkv, D], dtype and device of k, written in place; last dimension
            contiguous.
        v_cache: same shape as k_cache, written in place; under torch.compile both must be tensors of their
            own, not views with an offset, which is refused there.
        page_table: [B, max_pages] int32: the pages of a request in the order of its positions.
        cu_seqlens_q: [B + 1] int32, from 0 to T: request b's rows of k and v.
        seqlens_k: [B] int32: keys of each request, new tokens included.

    Raises:
        ValueError: an argument lies outside the contract or requires grad, or two new tokens have the same
            place in the cache.
        RuntimeError: as `paged_attention`.

    Bits: copies, every bit kept.
    """
    arguments.refuse_grad(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    inputs = (k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)
    if is_traced(k):
        registered.write_kv_cache(*inputs)
    else:
        registered.write(*inputs)
        count_write(k_cache, v_cache)
