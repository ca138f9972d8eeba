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

from kernelbraid.ops import installed
from kernelbraid.ops.attention.spec import CONTRACT

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
    _check_rows("q", q, QUERY_HEADS)
    _check_rows("k", k, KV_HEADS)
    _check_rows("v", v, KV_HEADS)
    _check_shape("k", k, (q.shape[0], None, q.shape[2]), "q")
    _check_shape("v", v, tuple(k.shape), "k")
    _check_group(q, k)
    lengths, cu = _token_counts("cu_seqlens", cu_seqlens, q.shape[0])
    _check_bound("max_seqlen", max_seqlen, lengths, "a sequence", QUERY_LENGTH.high)
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
    if q.shape[0]:
        _implementation().attention(
            _array(q), _array(k), _array(v), cu, max_seqlen, _scale(softmax_scale, q), *_results(out, lse)
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
    _check_rows("q", q, QUERY_HEADS)
    _check_caches(k_cache, v_cache)
    _check_shape("k_cache", k_cache, (None, None, None, q.shape[2]), "q")
    _check_group(q, k_cache)
    new, cu = _token_counts("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    _check_bound("max_seqlen_q", max_seqlen_q, new, "a request's new tokens", QUERY_LENGTH.high)
    lengths, table = _check_pages(k_cache, page_table, seqlens_k, new)
    _check_bound("max_seqlen_k", max_seqlen_k, lengths, "a request", KEY_LENGTH.high)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    else:
        _check_out(out, q, k_cache, v_cache)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
    if q.shape[0]:
        _implementation().paged_attention(
            _array(q),
            _array(k_cache),
            _array(v_cache),
            table,
            cu,
            lengths,
            max_seqlen_q,
            max_seqlen_k,
            _scale(softmax_scale, q),
            *_results(out, lse),
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
    _check_rows("k", k, KV_HEADS)
    _check_rows("v", v, KV_HEADS)
    _check_shape("v", v, tuple(k.shape), "k")
    _check_caches(k_cache, v_cache)
    _check_shape("k_cache", k_cache, (None, None, *k.shape[1:]), "k")
    new, cu = _token_counts("cu_seqlens_q", cu_seqlens_q, k.shape[0])
    lengths, table = _check_pages(k_cache, page_table, seqlens_k, new)
    _check_slots(new, lengths, table, k_cache.shape[1])
    inputs = {"k": k, "v": v}
    _check_written("k_cache", k_cache, {**inputs, "v_cache": v_cache})
    _check_written("v_cache", v_cache, inputs)
    if k.shape[0]:
        caches = _array(k_cache), _array(v_cache)
        _implementation().write_kv_cache(_array(k), _array(v), *caches, table, cu, lengths)
        _changed(k_cache, v_cache)


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


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor's memory as an array, not a copy."""
    array: npt.NDArray[Any] = tensor.detach().numpy()
    return array


def _results(out: Tensor, lse: Tensor | None) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    _changed(out)
    return _array(out), None if lse is None else _array(lse)


def _changed(*tensors: Tensor) -> None:
    """Tell autograd that these are about to be written, so that a graph that saved them notices."""
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


def _check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], dimensions: int) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    device = tensor.device.type
    if device != "cpu":
        raise ValueError(f"{name} is on {device}, for which this version has no backend: move it to the CPU")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}")
    if tensor.dtype not in dtypes:
        raise ValueError(_wrong_dtype(name, tensor.dtype, dtypes))
    if tensor.dim() != dimensions:
        raise ValueError(f"{name} must have {dimensions} dimensions, got shape {tuple(tensor.shape)}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}'s last dimension must have stride 1, not {tensor.stride(-1)}: call .contiguous()"
        )
    if tensor.is_neg():
        raise ValueError(f"{name} is a lazily negated view: call .resolve_neg()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad and attention has no backward yet: pass {name}.detach()")


def _wrong_dtype(name: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str:
    wanted = " or ".join(str(d) for d in dtypes)
    text = f"{name} must be {wanted}, got {dtype}"
    if "float8" in str(dtype):
        reason = next(e.reason for e in CONTRACT.exclusions if e.feature == "fp8_cache")
        text += f": contract {CONTRACT.name} excludes fp8_cache, {reason}"
    return text


def _check_rows(name: str, tensor: Tensor, heads: Any) -> None:
    _check_tensor(name, tensor, SUPPORTED_DTYPES, 3)
    _check_heads(name, tensor, heads)


def _check_heads(name: str, tensor: Tensor, heads: Any) -> None:
    for axis, value in ((heads, tensor.shape[-2]), (HEAD_DIM, tensor.shape[-1])):
        try:
            axis.check(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _check_shape(name: str, tensor: Tensor, wanted: tuple[int | None, ...], source: str) -> None:
    """Compare a shape with another argument's; None stands for any size."""
    if any(w is not None and w != given for w, given in zip(wanted, tensor.shape, strict=True)):
        shown = ", ".join("any" if w is None else str(w) for w in wanted)
        raise ValueError(f"{name} must have shape [{shown}] to fit {source}, got {list(tensor.shape)}")


def _check_group(q: Tensor, keys: Tensor) -> None:
    query_heads, kv_heads = q.shape[1], keys.shape[-2]
    if query_heads % kv_heads:
        raise ValueError(f"q's {query_heads} heads must be a multiple of the {kv_heads} KV heads")


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    for name, cache_ in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_tensor(name, cache_, SUPPORTED_DTYPES, 4)
    _check_heads("k_cache", k_cache, KV_HEADS)
    PAGE_SIZE.check(k_cache.shape[1])
    _check_shape("v_cache", v_cache, tuple(k_cache.shape), "k_cache")


def _integers(name: str, tensor: Tensor, dimensions: int) -> Integers:
    _check_tensor(name, tensor, (torch.int32,), dimensions)
    return _array(tensor)


def _token_counts(name: str, offsets: Tensor, total: int) -> tuple[Integers, Integers]:
    """Check cumulative lengths and return lengths and the array itself."""
    cu = _integers(name, offsets, 1)
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


def _check_pages(
    k_cache: Tensor, page_table: Tensor, seqlens_k: Tensor, new: Integers
) -> tuple[Integers, Integers]:
    """Check lengths and the page numbers in use; return both arrays."""
    pages, size = k_cache.shape[:2]
    lengths = _integers("seqlens_k", seqlens_k, 1)
    table = _integers("page_table", page_table, 2)
    batch = new.size
    if lengths.size != batch or table.shape[0] != batch:
        raise ValueError(
            f"cu_seqlens_q says {batch} requests, seqlens_k has {lengths.size}, page_table {table.shape[0]}"
        )
    if not batch:
        return lengths, table
    room = min(table.shape[1] * size, KEY_LENGTH.high)
    if (lengths < new).any() or lengths.max() > room:
        raise ValueError(
            f"seqlens_k must lie between a request's new tokens and {room}, what {table.shape[1]} pages of "
            f"{size} hold (at most {KEY_LENGTH.high}), got {_shown(lengths)} with new tokens {_shown(new)}"
        )
    used = -(-lengths // size)
    columns = int(used.max())
    inside = table[:, :columns].view(np.uint32) < pages
    if not inside.all():
        wrong = ~inside & (np.arange(columns) < used[:, None])
        if wrong.any():
            b, column = (int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"page_table[{b}, {column}] is in use and must lie between 0 and {pages - 1}, "
                f"got {table[b, column]}"
            )
    return lengths, table


def _check_slots(new: Integers, lengths: Integers, table: Integers, size: int) -> None:
    """Refuse two new tokens with the same place in the cache."""
    first = (lengths - new) // size
    counts = np.where(new > 0, (lengths - 1) // size - first + 1, 0)
    request = np.repeat(np.arange(new.size), counts)
    if request.size < 2:
        return
    column = np.arange(request.size) + (first - np.cumsum(counts) + counts)[request]
    page = table[request, column].astype(np.int64) * size
    start = page + np.maximum((lengths - new)[request] - column * size, 0)
    stop = page + np.minimum(lengths[request] - column * size, size)
    order = np.argsort(start)
    clash = np.flatnonzero(stop[order][:-1] > start[order][1:])
    if clash.size:
        one, other = (int(request[order[clash[0] + i]]) for i in (0, 1))
        raise ValueError(
            f"page_table gives new tokens of requests {one} and {other} the same place in page "
            f"{int(page[order[clash[0]]]) // size}: pages that are written must not be shared"
        )


def _check_out(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    _check_tensor("out", out, (q.dtype,), 3)
    _check_shape("out", out, tuple(q.shape), "q")
    _check_written("out", out, {"q": q, "k_cache": k_cache, "v_cache": v_cache})


def _check_written(name: str, tensor: Tensor, others: dict[str, Tensor]) -> None:
    """Refuse a tensor whose elements share memory with each other or with an input's."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise ValueError(
                    f"{name}'s elements overlap in memory (strides {tensor.stride()}): use a copy"
                )
            extent = stride * size
    mine = _array(tensor)
    for other_name, other in others.items():
        if np.shares_memory(mine, _array(other)):
            raise ValueError(f"{name} must not share memory with {other_name}")


def _scale(softmax_scale: float | None, q: Tensor) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(q.shape[2])
    if not isinstance(softmax_scale, (int, float)) or not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale must be a finite number, got {softmax_scale!r}")
    return float(softmax_scale)


def _shown(values: Integers) -> str:
    """A few of the values, for messages."""
    head = ", ".join(str(value) for value in values[:8])
    return f"[{head}{', ...' if values.size > 8 else ''}]"
