"""Attention in float64, with gradients; and the vendor's, to measure our error by. Needs torch.

    O = softmax(scale Q K^T + causal mask) V,    LSE = log sum exp of the same scores

A straightforward evaluation, chunked over rows to bound its memory; it promises no order of summation.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from kernelbraid.ops.problem import Array, Problem, Rows

SCORE_ELEMENTS = 1 << 23
"""Scores held at a time."""


def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of one request's last rows over its keys, differentiable in q, k and v.

    Args:
        q: [rows, Hq, D], the queries of the last `rows` positions.
        k: [length, Hkv, D], keys of every position.
        v: [length, Hkv, D], values of every position.
        softmax_scale: factor of the scores.

    Returns:
        out [rows, Hq, D], log-sum-exp [rows, Hq], in the dtype of q. Rows that see a NaN or infinity are NaN.
    """
    length, rows = k.shape[0], q.shape[0]
    if not rows:
        return q, q[..., 0]
    k, v, spoiled = _without_non_finite(q, k, v)
    parts = []
    for first, stop in _row_chunks(rows, length, q.shape[1]):
        last = length - rows + stop
        visible = _visible(first, stop, rows, length)[:, :last]
        parts.append(
            _rows(torch.nan_to_num(q[first:stop], 0, 0, 0), k[:last], v[:last], softmax_scale, visible)
        )
    out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if spoiled is not None:
        bad_out, bad_lse = spoiled
        out = out.masked_fill(bad_out[..., None], math.nan)
        lse = lse.masked_fill(bad_lse, math.nan)
    return out, lse


def _row_chunks(rows: int, length: int, heads: int) -> Iterator[tuple[int, int]]:
    step = max(1, SCORE_ELEMENTS // (heads * length))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _visible(first: int, stop: int, rows: int, length: int) -> Tensor:
    """Boolean [stop - first, length]: which keys the rows see, aligned at the bottom right."""
    positions = torch.arange(length - rows + first, length - rows + stop)
    return torch.arange(length)[None, :] <= positions[:, None]


def _rows(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    rows, query_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = query_heads // kv_heads
    # [Hkv, group * rows, D]: a product for each KV head, so that no key is copied for each query head
    grouped = q.reshape(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (grouped @ k.permute(1, 2, 0) * scale).reshape(kv_heads, group, rows, -1)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1).flatten(1, 2)
    out = (weights @ v.permute(1, 0, 2)).reshape(kv_heads, group, rows, head_dim)
    return out.permute(2, 0, 1, 3).reshape(q.shape), lse.permute(2, 0, 1).reshape(rows, query_heads)


def _without_non_finite(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Replace NaN and infinities by zeros; return also which rows [rows, Hq] see one, for out and for lse."""
    tensors = (q, k, v)
    if all(bool(torch.isfinite(t).all()) for t in tensors):
        return k, v, None
    bad_q, bad_k, bad_v = ((~torch.isfinite(t)).any(-1) for t in tensors)
    group = q.shape[1] // k.shape[1]
    seen_k, seen_v = (
        bad.cumsum(0)[k.shape[0] - q.shape[0] :].repeat_interleave(group, 1) > 0 for bad in (bad_k, bad_v)
    )
    k, v = (torch.nan_to_num(t, 0, 0, 0) for t in (k, v))
    return k, v, (bad_q | seen_k | seen_v, bad_q | seen_k)


Function = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _per_request(problem: Problem, function: Function, dtype: torch.dtype) -> Rows:
    scale = problem.scalars["softmax_scale"]
    rows: Rows = {}
    for b, request in enumerate(problem.requests):
        q, k, v = (_tensor(request[name], dtype) for name in ("q", "k", "v"))
        with_gradient = "dout" in request
        for tensor in (q, k, v):
            tensor.requires_grad_(with_gradient)
        out, lse = function(q, k, v, scale)
        rows["out", b], rows["lse", b] = out.detach().numpy(), lse.detach().numpy()
        if with_gradient:
            gradients = _gradients(out, (q, k, v), _tensor(request["dout"], dtype))
            for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
                rows[name, b] = gradient.numpy()
    return rows


def _tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """A copy in float32 or float64: numpy's bfloat16 is unknown to torch."""
    return torch.from_numpy(np.array(array, np.float64 if dtype == torch.float64 else np.float32))


def _gradients(out: Tensor, inputs: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, ...]:
    if not len(dout):
        return tuple(torch.zeros_like(tensor) for tensor in inputs)
    return torch.autograd.grad(out, inputs, dout)


def reference(problem: Problem) -> Rows:
    """Return float64 rows: out [rows, Hq, D] and lse [rows, Hq]; dq, dk, dv of requests with dout."""
    return _per_request(problem, attention, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same rows from the vendor's kernel, in the problem's dtype.

    In float32 that is torch's scaled_dot_product_attention on the CPU, and logsumexp of float32 scores; in
    16 bits torch's FlashAttention-2 on the GPU, all requests packed.

    Raises:
        RuntimeError: the problem is in 16 bits and there is no GPU.
    """
    if problem.shape.dtype == "float32":
        return _per_request(problem, _vendor_rows, torch.float32)
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"the vendor's {problem.shape.dtype} attention needs a CUDA GPU, and there is none"
        )
    return _flash_attention(problem, getattr(torch, problem.shape.dtype))


def _flash_attention(problem: Problem, dtype: torch.dtype) -> Rows:
    shape, scale = problem.shape, problem.scalars["softmax_scale"]

    def packed(name: str) -> Tensor:
        return torch.cat([_tensor(r[name], torch.float32) for r in problem.requests]).to("cuda", dtype)

    starts = [np.cumsum((0, *counts), dtype=np.int32) for counts in (shape.rows, shape.lengths)]
    q, k, v = packed("q"), packed("k"), packed("v")
    offsets = [torch.from_numpy(each).cuda() for each in starts]
    longest = max(shape.rows), max(shape.lengths)
    out, lse, *random_state = torch.ops.aten._flash_attention_forward(
        q, k, v, *offsets, *longest, 0.0, True, False, scale=scale
    )[:4]
    found = {"out": (out, starts[0]), "lse": (lse.T, starts[0])}
    if all("dout" in request for request in problem.requests):
        gradients = torch.ops.aten._flash_attention_backward(
            packed("dout"), q, k, v, out, lse, *offsets, *longest, 0.0, True, *random_state, scale=scale
        )
        found |= {name: (g, starts[0]) for name, g in zip(("dq", "dk", "dv"), gradients, strict=True)}
    arrays = {name: (tensor.float().cpu().numpy(), at) for name, (tensor, at) in found.items()}
    return {
        (name, b): array[at[b] : at[b + 1]]
        for name, (array, at) in arrays.items()
        for b in range(len(shape.rows))
    }


def _vendor_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    length, rows = k.shape[0], q.shape[0]
    if not rows:
        return q, q[..., 0]
    keys, values = (t.transpose(0, 1)[None] for t in (k, v))
    parts = []
    for first, stop in _row_chunks(rows, length, q.shape[1]):
        last = length - rows + stop
        visible = _visible(first, stop, rows, length)[:, :last]
        out = torch.nn.functional.scaled_dot_product_attention(
            q[first:stop].transpose(0, 1)[None],
            keys[:, :, :last],
            values[:, :, :last],
            attn_mask=visible,
            scale=scale,
            enable_gqa=True,
        )
        _, lse = _rows(q[first:stop], k[:last], v[:last], scale, visible)
        parts.append((out[0].transpose(0, 1), lse))
    out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return out, lse
