"""Runs programs on an implementation in this process, and a float64 attention in numpy to run them on."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from kernelbraid.ops.numbers import poison
from kernelbraid.ops.problem import Array, Program, RowSpan, View


def execute(program: Program, implementation: Any, seed: int = 7) -> dict[str, Array]:
    """Run every call on fresh buffers, outputs poisoned, and return all buffers."""
    rng = np.random.default_rng(seed)
    buffers: dict[str, Array] = {name: array.copy() for name, array in program.inputs.items()}
    for array in buffers.values():
        array.flags.writeable = False
    buffers.update({name: array.copy() for name, array in program.state.items()})
    buffers.update({name: poison(rng, *each) for name, each in program.outputs.items()})
    for call in program.calls:
        arguments = {
            name: buffers[value.buffer][value.start : value.stop] if isinstance(value, View) else value
            for name, value in call.arguments.items()
        }
        getattr(implementation, call.entry_point)(**arguments)
    return buffers


def rows_of(program: Program, buffers: Mapping[str, Array]) -> dict[tuple[str, int], list[Array]]:
    """(quantity, request) -> its pieces, in the order of their rows."""
    pieces: dict[tuple[str, int], list[tuple[RowSpan, Array]]] = {}
    for span in program.spans:
        block = np.moveaxis(buffers[span.buffer], span.axis, 0)[span.start : span.stop]
        pieces.setdefault((span.quantity, span.request), []).append((span, block))
    return {
        key: [block for _, block in sorted(found, key=lambda item: item[0].first_row)]
        for key, found in pieces.items()
    }


class Plain:
    """Attention as the formula says, in float64; every key that a row sees must be finite."""

    @staticmethod
    def attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, out, lse):
        for start, stop in pairwise(cu_seqlens):
            assert 0 <= stop - start <= max_seqlen
            part = slice(start, stop)
            Plain._rows(q[part], k[part], v[part], softmax_scale, out[part], lse[:, part])

    @staticmethod
    def attention_backward(q, k, v, out, lse, dout, cu_seqlens, max_seqlen, softmax_scale, dq, dk, dv):
        for start, stop in pairwise(cu_seqlens):
            assert 0 <= stop - start <= max_seqlen
            part = slice(start, stop)
            group = q.shape[1] // k.shape[1]
            o, do, queries = (a[part].astype(np.float64) for a in (out, dout, q))
            keys, values = (np.repeat(a[part].astype(np.float64), group, axis=1) for a in (k, v))
            weights = np.exp(np.einsum("ihd,jhd->hij", queries, keys) * softmax_scale - lse[:, part, None])
            weights *= np.tri(stop - start)
            delta = np.einsum("ihd,ihd->hi", o, do)[..., None]
            scores = weights * (np.einsum("ihd,jhd->hij", do, values) - delta) * softmax_scale
            dq[part] = np.einsum("hij,jhd->ihd", scores, keys)
            for gradient, each in (
                (dk, np.einsum("hij,ihd->jhd", scores, queries)),
                (dv, np.einsum("hij,ihd->jhd", weights, do)),
            ):
                gradient[part] = each.reshape(stop - start, k.shape[1], group, k.shape[2]).sum(axis=2)

    @staticmethod
    def paged_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        cu_seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        out,
        lse,
    ):
        for b, length in enumerate(seqlens_k):
            part = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
            assert part.stop - part.start <= max_seqlen_q and length <= max_seqlen_k
            used = page_table[b, : -(-length // k_cache.shape[1])]
            k, v = (cache[used].reshape(-1, *cache.shape[2:])[:length] for cache in (k_cache, v_cache))
            lse_part = None if lse is None else lse[:, part]
            Plain._rows(q[part], k, v, softmax_scale, out[part], lse_part)

    @staticmethod
    def write_kv_cache(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k):
        size = k_cache.shape[1]
        for b, length in enumerate(seqlens_k):
            new = cu_seqlens_q[b + 1] - cu_seqlens_q[b]
            for t, position in enumerate(range(length - new, length), start=cu_seqlens_q[b]):
                slot = page_table[b, position // size], position % size
                k_cache[slot], v_cache[slot] = k[t], v[t]

    @staticmethod
    def _rows(q, k, v, scale, out, lse):
        group = q.shape[1] // k.shape[1]
        for t in range(len(q)):
            seen = len(k) - len(q) + t + 1
            keys, values = (np.repeat(a[:seen], group, axis=1).astype(np.float64) for a in (k, v))
            assert np.isfinite(keys).all() and np.isfinite(values).all()
            scores = np.einsum("hd,nhd->hn", q[t].astype(np.float64), keys) * scale
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=1)
            out[t] = np.einsum("hn,nhd->hd", weights, values) / total[:, None]
            if lse is not None:
                lse[:, t] = top[:, 0] + np.log(total)
