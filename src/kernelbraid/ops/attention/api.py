"""The public functions of unified attention: checks, tensors wrapped without a copy, then one call."""

import math
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernelbraid.contract import Axis
from kernelbraid.ops import installed
from kernelbraid.ops.attention.spec import CONTRACT

Numbers = npt.NDArray[Any]
Integers = npt.NDArray[np.int32]

QUERY_HEADS, KV_HEADS, HEAD_DIM, BATCH, QUERY_LENGTH, KEY_LENGTH, PAGE_SIZE = (
    CONTRACT.axis(name)
    for name in (
        "query_heads",
        "kv_heads",
        "head_dim",
        "batch",
        "query_length",
        "key_length",
        "page_size",
    )
)
SUPPORTED_DTYPES = tuple(getattr(torch, name) for name in CONTRACT.dtypes)


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

    Args:
        q: [T, Hq, D] float32; last dimension contiguous, other strides free.
        k: [T, Hkv, D] float32; query head h reads KV head h // (Hq // Hkv).
        v: [T, Hkv, D] float32.
        cu_seqlens: [B + 1] int32, from 0 to T: sequence b holds rows cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen: at least the longest sequence, in tokens; at most 131072.
        softmax_scale: factor of the scores, by default 1 / sqrt(D).
        return_lse: also return the log-sum-exp of the scores.
        window: must be None: the contract does not cover sliding windows.
        soft_cap: must be None: the contract does not cover capped scores.
        sinks: must be None: the contract does not cover attention sinks.

    Returns:
        out [T, Hq, D] float32, with `return_lse` also lse [Hq, T] float32 (natural logarithm).

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the installed implementation changed since it was promoted.

    Bits: contract `attention` 1. A row's bits are those that `paged_attention` gives for the same keys.
    """
    _refuse(window=window, soft_cap=soft_cap, sinks=sinks)
    queries = _rows("q", q, QUERY_HEADS)
    keys, values = _rows("k", k, KV_HEADS), _rows("v", v, KV_HEADS)
    _check_shape("k", keys, (queries.shape[0], None, queries.shape[2]), "q")
    _check_shape("v", values, keys.shape, "k")
    _check_group(queries, keys)
    lengths, cu = _token_counts("cu_seqlens", cu_seqlens, queries.shape[0])
    _check_bound("max_seqlen", max_seqlen, lengths, "a sequence", QUERY_LENGTH.high)
    scale = _scale(softmax_scale, queries)
    out, lse = torch.empty(q.shape, dtype=q.dtype), _empty_lse(q, return_lse)
    if queries.size:
        _implementation().attention(
            queries, keys, values, cu, max_seqlen, scale, out.numpy(), None if lse is None else lse.numpy()
        )
    return out if lse is None else (out, lse)


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
    (`write_kv_cache`). Entries of the page table beyond a request's pages may hold anything.

    Args:
        q: [T, Hq, D] float32, the requests' new tokens one after the other; last dimension contiguous.
        k_cache: [pages, page_size, Hkv, D] float32, page_size 1 to 256; last dimension contiguous.
        v_cache: same shape as k_cache.
        page_table: [B, max_pages] int32: the pages of a request in the order of its positions.
        cu_seqlens_q: [B + 1] int32, from 0 to T: request b's rows of q.
        seqlens_k: [B] int32: keys of each request, new tokens included.
        max_seqlen_q: at least the most new tokens of a request.
        max_seqlen_k: at least the most keys of a request; at most 131072.
        softmax_scale: factor of the scores, by default 1 / sqrt(D).
        return_lse: also return the log-sum-exp of the scores.
        out: [T, Hq, D] float32 to write into; must not overlap itself or an input.
        window: must be None: the contract does not cover sliding windows.
        soft_cap: must be None: the contract does not cover capped scores.
        sinks: must be None: the contract does not cover attention sinks.

    Returns:
        out [T, Hq, D] float32, with `return_lse` also lse [Hq, T] float32 (natural logarithm).

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the installed implementation changed since it was promoted.

    Bits: contract `attention` 1. A row's bits depend on its query and on its request's keys and values alone.
    """
    _refuse(window=window, soft_cap=soft_cap, sinks=sinks)
    queries = _rows("q", q, QUERY_HEADS)
    keys, values = _caches(k_cache, v_cache)
    _check_shape("k_cache", keys, (None, None, None, queries.shape[2]), "q")
    _check_group(queries, keys)
    new, cu = _token_counts("cu_seqlens_q", cu_seqlens_q, queries.shape[0])
    _check_bound("max_seqlen_q", max_seqlen_q, new, "a request's new tokens", QUERY_LENGTH.high)
    lengths, table = _pages(keys, page_table, seqlens_k, new)
    _check_bound("max_seqlen_k", max_seqlen_k, lengths, "a request", KEY_LENGTH.high)
    scale = _scale(softmax_scale, queries)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
        results = out.numpy()
    else:
        results = _array("out", out, (q.dtype,), 3)
        _check_shape("out", results, queries.shape, "q")
        _check_written("out", results, {"q": queries, "k_cache": keys, "v_cache": values})
        _count_write(out)
    lse = _empty_lse(q, return_lse)
    if queries.size:
        _implementation().paged_attention(
            queries,
            keys,
            values,
            table,
            cu,
            lengths,
            max_seqlen_q,
            max_seqlen_k,
            scale,
            results,
            None if lse is None else lse.numpy(),
        )
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

    Args:
        k: [T, Hkv, D] float32, the requests' new tokens one after the other; last dimension contiguous.
        v: [T, Hkv, D] float32.
        k_cache: [pages, page_size, Hkv, D] float32, written in place; last dimension contiguous.
        v_cache: same shape as k_cache, written in place.
        page_table: [B, max_pages] int32: the pages of a request in the order of its positions.
        cu_seqlens_q: [B + 1] int32, from 0 to T: request b's rows of k and v.
        seqlens_k: [B] int32: keys of each request, new tokens included.

    Raises:
        ValueError: an argument lies outside the contract, or two new tokens have the same place in the cache.

    Bits: copies, every bit kept.
    """
    keys, values = _rows("k", k, KV_HEADS), _rows("v", v, KV_HEADS)
    _check_shape("v", values, keys.shape, "k")
    key_cache, value_cache = _caches(k_cache, v_cache)
    _check_shape("k_cache", key_cache, (None, None, *keys.shape[1:]), "k")
    new, cu = _token_counts("cu_seqlens_q", cu_seqlens_q, keys.shape[0])
    lengths, table = _pages(key_cache, page_table, seqlens_k, new)
    _check_slots(new, lengths, table, key_cache.shape[1])
    _check_written("k_cache", key_cache, {"k": keys, "v": values, "v_cache": value_cache})
    _check_written("v_cache", value_cache, {"k": keys, "v": values})
    if keys.size:
        _implementation().write_kv_cache(keys, values, key_cache, value_cache, table, cu, lengths)
        _count_write(k_cache, v_cache)


# ---- The implementation ----

_loading = Lock()


def _implementation() -> Any:
    with _loading:
        return _cpu_implementation()


@cache
def _cpu_implementation() -> ModuleType:
    """The winner installed for this CPU model, otherwise the shipped one; found once a process."""
    found = installed.read("attention", "cpu", installed.cpu_model())
    if found is None:
        from kernelbraid.ops.attention import cpu

        return cpu
    if found.contract != CONTRACT.hash:
        raise RuntimeError(
            f"the installed attention {found.source.short} was promoted under another contract; "
            "run `kernelbraid demote attention` and search again"
        )
    return installed.load(found, "attention")


def _empty_lse(q: Tensor, wanted: bool) -> Tensor | None:
    return torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32) if wanted else None


def _count_write(*tensors: Tensor) -> None:
    """Tell autograd that these are written, so that a graph that saved one of them notices."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


# ---- Checks; each one raises ValueError that names the argument ----


def _refuse(**features: object) -> None:
    for exclusion in CONTRACT.exclusions:
        if features.get(exclusion.feature) is not None:
            raise ValueError(
                f"{exclusion.feature} is not part of contract {CONTRACT.name}: {exclusion.reason}; pass None"
            )


def _array(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], dimensions: int) -> Numbers:
    """Check a tensor and return its memory as an array, not a copy."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu:
        device = tensor.device.type
        raise ValueError(f"{name} is on {device}, for which this version has no backend: move it to the CPU")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}")
    if tensor.dtype not in dtypes:
        raise ValueError(_wrong_dtype(name, tensor.dtype, dtypes))
    if tensor.dim() != dimensions:
        raise ValueError(f"{name} must have {dimensions} dimensions, got shape {tuple(tensor.shape)}")
    if tensor.is_neg():
        raise ValueError(f"{name} is a lazily negated view: call .resolve_neg()")
    if tensor.requires_grad:
        if torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad and there is no backward yet: pass {name}.detach()")
        tensor = tensor.detach()
    stride = tensor.stride(-1)
    if stride != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}'s last dimension must have stride 1, not {stride}: call .contiguous()")
    array: Numbers = tensor.numpy()
    return array


def _wrong_dtype(name: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str:
    wanted = " or ".join(str(d) for d in dtypes)
    text = f"{name} must be {wanted}, got {dtype}"
    if "float8" in str(dtype):
        reason = next(e.reason for e in CONTRACT.exclusions if e.feature == "fp8_cache")
        text += f": contract {CONTRACT.name} excludes fp8_cache, {reason}"
    return text


def _rows(name: str, tensor: Tensor, heads: Axis) -> Numbers:
    array = _array(name, tensor, SUPPORTED_DTYPES, 3)
    _check_heads(name, array, heads)
    return array


def _caches(k_cache: Tensor, v_cache: Tensor) -> tuple[Numbers, Numbers]:
    keys = _array("k_cache", k_cache, SUPPORTED_DTYPES, 4)
    values = _array("v_cache", v_cache, SUPPORTED_DTYPES, 4)
    _check_heads("k_cache", keys, KV_HEADS)
    PAGE_SIZE.check(keys.shape[1])
    _check_shape("v_cache", values, keys.shape, "k_cache")
    return keys, values


def _check_heads(name: str, array: Numbers, heads: Axis) -> None:
    try:
        heads.check(array.shape[-2])
        HEAD_DIM.check(array.shape[-1])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_shape(name: str, array: Numbers, wanted: tuple[int | None, ...], source: str) -> None:
    """Compare a shape with another argument's; None stands for any size."""
    for size, given in zip(wanted, array.shape, strict=True):
        if size != given and size is not None:
            shown = ", ".join("any" if size is None else str(size) for size in wanted)
            raise ValueError(f"{name} must have shape [{shown}] to fit {source}, got {list(array.shape)}")


def _check_group(queries: Numbers, keys: Numbers) -> None:
    query_heads, kv_heads = queries.shape[1], keys.shape[-2]
    if query_heads % kv_heads:
        raise ValueError(f"q's {query_heads} heads must be a multiple of the {kv_heads} KV heads")


def _token_counts(name: str, offsets: Tensor, total: int) -> tuple[Integers, Integers]:
    """Check cumulative lengths and return lengths and the array itself."""
    cu: Integers = _array(name, offsets, (torch.int32,), 1)
    if not cu.size:
        raise ValueError(f"{name} must have one entry more than there are requests, got none")
    BATCH.check(cu.size - 1)
    lengths = cu[1:] - cu[:-1]
    if cu[0] != 0 or cu[-1] != total or (lengths.size and lengths.min() < 0):
        raise ValueError(f"{name} must rise from 0 to the {total} packed rows, got {_shown(cu)}")
    return lengths, cu


def _check_bound(name: str, bound: int, lengths: Integers, what: str, limit: int) -> None:
    if isinstance(bound, bool) or not isinstance(bound, int):
        raise ValueError(f"{name} must be an int, got {type(bound).__name__}")
    longest = int(lengths.max()) if lengths.size else 0
    if not longest <= bound <= limit:
        raise ValueError(f"{name} must be between {longest}, the longest of {what}, and {limit}, got {bound}")


def _pages(cache: Numbers, page_table: Tensor, seqlens_k: Tensor, new: Integers) -> tuple[Integers, Integers]:
    """Check lengths and the page numbers in use; return both arrays."""
    pages, size = cache.shape[:2]
    lengths: Integers = _array("seqlens_k", seqlens_k, (torch.int32,), 1)
    table: Integers = _array("page_table", page_table, (torch.int32,), 2)
    if not lengths.size == table.shape[0] == new.size:
        raise ValueError(
            f"cu_seqlens_q says {new.size} requests, seqlens_k {lengths.size}, page_table {table.shape[0]}"
        )
    if not new.size:
        return lengths, table
    room = min(table.shape[1] * size, KEY_LENGTH.high)
    longest = int(lengths.max())
    if longest > room or (lengths < new).any():
        raise ValueError(
            f"seqlens_k must lie between a request's new tokens and {room}, what {table.shape[1]} pages of "
            f"{size} hold (at most {KEY_LENGTH.high}), got {_shown(lengths)} with new tokens {_shown(new)}"
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
    return lengths, table


def _check_slots(new: Integers, lengths: Integers, table: Integers, size: int) -> None:
    """Refuse two new tokens with the same place in the cache, looking at the runs of slots they take."""
    first = (lengths - new) // size
    counts = (lengths + (size - 1)) // size - first
    counts[new == 0] = 0
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


def _check_written(name: str, array: Numbers, others: dict[str, Numbers]) -> None:
    """Refuse an array whose elements share memory with each other or with an input's."""
    extent = array.itemsize
    for stride, size in sorted(zip(array.strides, array.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise ValueError(f"{name}'s elements overlap in memory: pass a tensor of its own")
            extent += stride * (size - 1)
    for other_name, other in others.items():
        if np.shares_memory(array, other):
            raise ValueError(f"{name} must not share memory with {other_name}")


def _scale(softmax_scale: float | None, queries: Numbers) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(queries.shape[2])
    if not isinstance(softmax_scale, (int, float)) or not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale must be a finite number, got {softmax_scale!r}")
    return float(softmax_scale)


def _shown(values: Integers) -> str:
    """A few of the values, for messages."""
    head = ", ".join(str(value) for value in values[:8])
    return f"[{head}{', ...' if values.size > 8 else ''}]"
