"""Checks of attention's arguments; each one raises ValueError that names the argument and its limit.

Shapes, dtypes, devices, strides and host-side bounds are checked on every device, without waiting for it.
Values of lengths and page tables are checked where they lie in the CPU's memory; `check_metadata` does the
same for those of a GPU.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernelbraid import ops
from kernelbraid.contract import Axis, Contract
from kernelbraid.ops.arguments import (
    INDEX_DTYPES,
    check_integer,
    check_is_tensor,
    check_shape,
    check_tensor,
    check_written,
)
from kernelbraid.ops.attention.spec import CONTRACT

Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Domain:
    """What the contract of one backend admits."""

    contract: Contract
    dtypes: tuple[torch.dtype, ...]
    query_heads: Axis
    kv_heads: Axis
    head_dim: Axis
    batch: Axis
    query_length: Axis
    key_length: Axis
    page_size: Axis


REACH = 1 << 31
TILE_ROWS = 256
"""GPU kernels compute places in 32 bits within a tile of rows, a page, and the heads of a row."""


@cache
def domain(backend: str) -> Domain:
    """Return the domain of a backend, `cpu` or `cuda`."""
    contract = ops.get("attention", backend).contract
    names = ("query_heads", "kv_heads", "head_dim", "batch", "query_length", "key_length", "page_size")
    dtypes = tuple(getattr(torch, name) for name in contract.dtypes)
    return Domain(contract, dtypes, *(contract.axis(name) for name in names))


# ---- What the public functions and the registered operators ask ----


LARGEST_SCALE = 1e30
"""Of the scores: beyond it the factor of the exponents would not be finite in float32."""


def refuse_grad(**tensors: Tensor | None) -> None:
    """Refuse inputs for which autograd expects a gradient that does not exist."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise ValueError(
                    f"{name} requires grad, and only attention over packed sequences has gradients: "
                    f"pass {name}.detach() or call under torch.no_grad()"
                )


def score_factor(softmax_scale: float | None, q: Tensor) -> float:
    """Check the factor of the scores, or return its default."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(q.shape[2])
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float):
        raise ValueError(f"softmax_scale must be a number, got {softmax_scale!r}")
    if not 0 < softmax_scale <= LARGEST_SCALE:
        limits = f"above 0 and at most {LARGEST_SCALE:g}"
        raise ValueError(f"softmax_scale must be {limits}, got {softmax_scale!r}")
    return float(softmax_scale)


def check_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float | None
) -> float:
    """Check the arguments of packed attention and return the factor of the scores."""
    own, device = _domain("q", q)
    _check_rows("q", q, own.query_heads, own, device)
    _check_rows("k", k, own.kv_heads, own, device, q)
    _check_rows("v", v, own.kv_heads, own, device, q)
    check_shape("k", k, (q.shape[0], None, q.shape[2]), "q")
    check_shape("v", v, k.shape, "k")
    _check_group(q, k)
    batch = _check_offsets("cu_seqlens", cu_seqlens, own, device)
    limit = own.query_length.high
    if cu_seqlens.is_cpu:
        counts = _counts("cu_seqlens", _numbers(cu_seqlens), q.shape[0])
        _check_bound("max_seqlen", max_seqlen, _longest(counts), "a sequence", limit)
    else:
        _check_host_bound("max_seqlen", max_seqlen, q.shape[0], batch, limit)
    return score_factor(softmax_scale, q)


def check_gradient(q: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> None:
    """Check what the backward takes beside the arguments of packed attention."""
    own, device = _domain("q", q)
    for name, tensor in (("out", out), ("dout", dout)):
        _check_rows(name, tensor, own.query_heads, own, device, q)
        check_shape(name, tensor, q.shape, "q")
    _check_tensor("lse", lse, (torch.float32,), 2, device)
    check_shape("lse", lse, (q.shape[1], q.shape[0]), "q")


def check_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    out: Tensor | None,
) -> float:
    """Check the arguments of paged attention and return the factor of the scores."""
    own, device = _domain("q", q)
    _check_rows("q", q, own.query_heads, own, device)
    _check_caches(k_cache, v_cache, own, device, q)
    check_shape("k_cache", k_cache, (None, None, None, q.shape[2]), "q")
    _check_group(q, k_cache)
    batch = _check_offsets("cu_seqlens_q", cu_seqlens_q, own, device)
    _check_pages(page_table, seqlens_k, batch, device)
    limit_q, limit_k = own.query_length.high, own.key_length.high
    if cu_seqlens_q.is_cpu:
        new = _counts("cu_seqlens_q", _numbers(cu_seqlens_q), q.shape[0])
        _check_bound("max_seqlen_q", max_seqlen_q, _longest(new), "a request's new tokens", limit_q)
        lengths = _numbers(seqlens_k)
        _check_places(k_cache.shape[0], k_cache.shape[1], _numbers(page_table), lengths, new, limit_k)
        _check_bound("max_seqlen_k", max_seqlen_k, _longest(lengths), "a request", limit_k)
    else:
        _check_host_bound("max_seqlen_q", max_seqlen_q, q.shape[0], batch, limit_q)
        _check_host_bound("max_seqlen_k", max_seqlen_k, q.shape[0], batch, limit_k)
    if out is not None:
        _check_tensor("out", out, (q.dtype,), 3, device)
        check_shape("out", out, q.shape, "q")
        check_written("out", out, {"q": q, "k_cache": k_cache, "v_cache": v_cache})
    return score_factor(softmax_scale, q)


def check_cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
) -> None:
    """Check the arguments of a cache write."""
    own, device = _domain("k", k)
    _check_rows("k", k, own.kv_heads, own, device)
    _check_rows("v", v, own.kv_heads, own, device, k)
    check_shape("v", v, k.shape, "k")
    _check_caches(k_cache, v_cache, own, device, k)
    check_shape("k_cache", k_cache, (None, None, *k.shape[1:]), "k")
    batch = _check_offsets("cu_seqlens_q", cu_seqlens_q, own, device)
    _check_pages(page_table, seqlens_k, batch, device)
    if cu_seqlens_q.is_cpu:
        new = _counts("cu_seqlens_q", _numbers(cu_seqlens_q), k.shape[0])
        lengths, table, size = _numbers(seqlens_k), _numbers(page_table), k_cache.shape[1]
        _check_places(k_cache.shape[0], size, table, lengths, new, own.key_length.high)
        _check_slots(new, lengths, table, size)
    check_written("k_cache", k_cache, {"k": k, "v": v, "v_cache": v_cache})
    check_written("v_cache", v_cache, {"k": k, "v": v})


def check_metadata(
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    tokens: int,
    seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    pages: int | None = None,
    page_size: int | None = None,
    writes: bool = False,
) -> None:
    """Check the values of lengths and page tables, which calls on a GPU do not look at.

    Calls on the CPU make the same checks, with the same messages, by themselves. On a GPU they would have to
    wait for it. Kernels never read outside the cache, whatever a page table says; wrong values give wrong
    results, not an error.

    Args:
        cu_seqlens_q: [B + 1] int32, the offsets of `attention`, `paged_attention` or `write_kv_cache`. Like
            the other tensors best a copy on the host: one on a GPU is copied, which waits for the GPU.
        max_seqlen_q: most new tokens of a request, in the packed form the longest sequence.
        tokens: rows of q, or of k and v for a write.
        seqlens_k: [B] int32, for the paged form.
        max_seqlen_k: most keys of a request, None for a write.
        page_table: [B, max_pages] int32, for the paged form.
        pages: pages of the caches.
        page_size: tokens of a page.
        writes: whether the pages of the new tokens are written; then no two may share a place.

    Raises:
        ValueError: a value lies outside the contract; the message names the argument and the limit.

    Bits: none; checks alone.
    """
    own = domain("cpu")
    _check_tensor("cu_seqlens_q", cu_seqlens_q, INDEX_DTYPES, 1, None)
    _check_offsets("cu_seqlens_q", cu_seqlens_q, own, None)
    new = _counts("cu_seqlens_q", _numbers(cu_seqlens_q.cpu()), tokens)
    longest = _longest(new)
    _check_bound("max_seqlen_q", max_seqlen_q, longest, "a request's new tokens", own.query_length.high)
    if seqlens_k is None and page_table is None:
        return
    if seqlens_k is None or page_table is None or pages is None or page_size is None:
        raise ValueError("seqlens_k, page_table, pages and page_size must be given together")
    own.page_size.check(page_size)
    _check_pages(page_table, seqlens_k, new.size, None)
    lengths, table = _numbers(seqlens_k.cpu()), _numbers(page_table.cpu())
    _check_places(pages, page_size, table, lengths, new, own.key_length.high)
    if max_seqlen_k is not None:
        _check_bound("max_seqlen_k", max_seqlen_k, _longest(lengths), "a request", own.key_length.high)
    if writes:
        _check_slots(new, lengths, table, page_size)


# ---- Shapes, dtypes, devices and strides ----


def _domain(name: str, tensor: Tensor) -> tuple[Domain, torch.device]:
    """The domain and the device that a call's first tensor decides on."""
    check_is_tensor(name, tensor)
    if tensor.is_cpu:
        return domain("cpu"), tensor.device
    if tensor.is_cuda:
        return domain("cuda"), tensor.device
    device = tensor.device.type
    raise ValueError(f"{name} is on {device}, for which this version has no backend: move it to the CPU")


def check_reach(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuse tensors whose heads, or rows of a tile, lie further apart than a GPU kernel addresses."""
    if strides[-3] * TILE_ROWS >= REACH or strides[-2] * shape[-2] >= REACH:
        raise ValueError(
            f"{name}'s strides {strides} are too large: {TILE_ROWS} rows, and all heads, must lie within "
            f"{REACH} elements; call .contiguous()"
        )


def _check_tensor(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], dimensions: int, device: torch.device | None
) -> None:
    if isinstance(tensor, Tensor) and "float8" in str(tensor.dtype):
        wanted = " or ".join(str(d) for d in dtypes)
        reason = next(e.reason for e in CONTRACT.exclusions if e.feature == "fp8_cache")
        raise ValueError(
            f"{name} must be {wanted}, got {tensor.dtype}: contract {CONTRACT.name} excludes fp8_cache, "
            f"{reason}"
        )
    check_tensor(name, tensor, dtypes, dimensions, device)
    if tensor.is_cuda and dimensions >= 3:
        check_reach(name, tensor.shape, tensor.stride())


def _check_rows(
    name: str, tensor: Tensor, heads: Axis, own: Domain, device: torch.device, like: Tensor | None = None
) -> None:
    """Check rows [T, heads, D], of the dtype of another argument if one is given."""
    _check_tensor(name, tensor, own.dtypes if like is None else (like.dtype,), 3, device)
    _check_heads(name, tensor, heads, own.head_dim)


def _check_caches(k_cache: Tensor, v_cache: Tensor, own: Domain, device: torch.device, like: Tensor) -> None:
    _check_tensor("k_cache", k_cache, (like.dtype,), 4, device)
    _check_tensor("v_cache", v_cache, (like.dtype,), 4, device)
    _check_heads("k_cache", k_cache, own.kv_heads, own.head_dim)
    own.page_size.check(k_cache.shape[1])
    check_shape("v_cache", v_cache, k_cache.shape, "k_cache")


def _check_heads(name: str, tensor: Tensor, heads: Axis, head_dim: Axis) -> None:
    try:
        heads.check(tensor.shape[-2])
        head_dim.check(tensor.shape[-1])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_group(q: Tensor, keys: Tensor) -> None:
    query_heads, kv_heads = q.shape[1], keys.shape[-2]
    if query_heads % kv_heads:
        raise ValueError(f"q's {query_heads} heads must be a multiple of the {kv_heads} KV heads")


def _check_offsets(name: str, offsets: Tensor, own: Domain, device: torch.device | None) -> int:
    """Check cumulative lengths but for their values; return the number of requests."""
    _check_tensor(name, offsets, INDEX_DTYPES, 1, device)
    batch = offsets.shape[0] - 1
    if batch < 0:
        raise ValueError(f"{name} must have one entry more than there are requests, got none")
    own.batch.check(batch)
    return batch


def _check_pages(page_table: Tensor, seqlens_k: Tensor, batch: int, device: torch.device | None) -> None:
    _check_tensor("seqlens_k", seqlens_k, INDEX_DTYPES, 1, device)
    _check_tensor("page_table", page_table, INDEX_DTYPES, 2, device)
    if not seqlens_k.shape[0] == page_table.shape[0] == batch:
        raise ValueError(
            f"cu_seqlens_q says {batch} requests, seqlens_k {seqlens_k.shape[0]}, "
            f"page_table {page_table.shape[0]}"
        )


def _check_host_bound(name: str, bound: int, rows: int, batch: int, limit: int) -> None:
    """Check a bound by what the host knows: `batch` requests share `rows` rows."""
    check_integer(name, bound)
    least = -(-rows // max(batch, 1))
    if not least <= bound <= limit:
        raise ValueError(
            f"{name} must be between {least}, the mean of {rows} rows over {batch} requests, and {limit}, "
            f"got {bound}"
        )


# ---- Values, in the CPU's memory ----


def _numbers(tensor: Tensor) -> Integers:
    numbers: Integers = tensor.numpy()
    return numbers


def _longest(lengths: Integers) -> int:
    return int(lengths.max()) if lengths.size else 0


def _counts(name: str, cu: Integers, total: int) -> Integers:
    """Check cumulative lengths and return the lengths."""
    lengths = cu[1:] - cu[:-1]
    if cu[0] != 0 or cu[-1] != total or (lengths.size and lengths.min() < 0):
        raise ValueError(f"{name} must rise from 0 to the {total} packed rows, got {_shown(cu)}")
    return lengths


def _check_bound(name: str, bound: int, longest: int, what: str, limit: int) -> None:
    check_integer(name, bound)
    if not longest <= bound <= limit:
        raise ValueError(f"{name} must be between {longest}, the longest of {what}, and {limit}, got {bound}")


def _check_places(
    pages: int, size: int, table: Integers, lengths: Integers, new: Integers, limit: int
) -> None:
    """Check the lengths, and the page numbers in use."""
    if not new.size:
        return
    room = min(table.shape[1] * size, limit)
    longest = int(lengths.max())
    if longest > room or (lengths < new).any():
        raise ValueError(
            f"seqlens_k must lie between a request's new tokens and {room}, what {table.shape[1]} pages of "
            f"{size} hold (at most {limit}), got {_shown(lengths)} with new tokens {_shown(new)}"
        )
    columns = -(-longest // size)
    # As unsigned numbers, negative pages are too large as well.
    outside = table[:, :columns].view(np.uint32) >= pages
    if outside.any():
        outside &= np.arange(columns) < -(-lengths[:, None] // size)
        for b, column in np.argwhere(outside):
            raise ValueError(
                f"page_table[{b}, {column}] is in use and must lie between 0 and {pages - 1}, "
                f"got {table[b, column]}"
            )


def _check_slots(new: Integers, lengths: Integers, table: Integers, size: int) -> None:
    """Refuse two new tokens with the same place in the cache, looking at the runs of slots they take."""
    first = (lengths - new) // size
    counts = (lengths + (size - 1)) // size - first
    counts[new == 0] = 0
    if counts.sum() < 2:
        return
    request = np.repeat(np.arange(new.size), counts)
    column = np.arange(request.size) + (first - np.cumsum(counts) + counts)[request]
    origin = column * size
    page = table[request, column].astype(np.int64)
    start = page * size + np.maximum((lengths - new)[request] - origin, 0)
    stop = page * size + np.minimum(lengths[request] - origin, size)
    order = np.argsort(start)
    clash = stop[order[:-1]] > start[order[1:]]
    if clash.any():
        at = int(np.argmax(clash))
        one, other = (int(request[order[at + i]]) for i in (0, 1))
        raise ValueError(
            f"page_table gives new tokens of requests {one} and {other} the same place in page "
            f"{page[order[at]]}: pages that are written must not be shared"
        )


def _shown(values: Integers) -> str:
    """A few of the values, for messages."""
    head = ", ".join(str(value) for value in values[:8])
    return f"[{head}{', ...' if values.size > 8 else ''}]"
