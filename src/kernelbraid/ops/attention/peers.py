"""torch's attention on the CPU, in the forms in which it is fastest: what a benchmark runs beside ours.

Every entry point reads q [T, Hq, D] packed and contiguous k and v [B, Hkv, longest, D], of which request b
holds the first seqlens_k[b] positions, and returns its output instead of storing it. Masks depend on lengths
alone and are made once, since a model's layers share them. `enable_gqa` was as fast as keys and values
expanded beforehand in prefill, and faster in decode.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Array = npt.NDArray[np.generic]


def torch_sdpa(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, seqlens_k: Array, softmax_scale: float
) -> list[Tensor]:
    """Whole sequences: one causal call for a batch of equal lengths, otherwise one for each request."""
    lengths = seqlens_k.tolist()
    queries, keys, values = (torch.from_numpy(array) for array in (q, k, v))
    if len(set(lengths)) == 1:
        batch = queries.view(len(lengths), lengths[0], *queries.shape[1:]).transpose(1, 2)
        return [
            scaled_dot_product_attention(
                batch, keys, values, is_causal=True, scale=softmax_scale, enable_gqa=True
            )
        ]
    return torch_loop(q, k, v, cu_seqlens_q, seqlens_k, softmax_scale)


def torch_loop(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, seqlens_k: Array, softmax_scale: float
) -> list[Tensor]:
    """One call for each request; [1, Hq, rows, D] each."""
    queries, keys, values = (torch.from_numpy(array) for array in (q, k, v))
    starts = cu_seqlens_q.tolist()
    outputs = []
    for b, length in enumerate(seqlens_k.tolist()):
        rows = starts[b + 1] - starts[b]
        outputs.append(
            scaled_dot_product_attention(
                queries[starts[b] : starts[b + 1]].transpose(0, 1)[None],
                keys[b : b + 1, :, :length],
                values[b : b + 1, :, :length],
                attn_mask=None if rows in (1, length) else _last_rows(rows, length),
                is_causal=rows == length > 1,
                scale=softmax_scale,
                enable_gqa=True,
            )
        )
    return outputs


def torch_padded(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, seqlens_k: Array, softmax_scale: float
) -> list[Tensor]:
    """Decode as one call for the batch, masked, a group's heads as rows: [B, Hkv, group, D]."""
    queries, keys, values = (torch.from_numpy(array) for array in (q, k, v))
    batch, kv_heads, longest, head_dim = keys.shape
    mask = _short_requests(tuple(seqlens_k.tolist()), longest)
    grouped = queries.view(batch, kv_heads, -1, head_dim)
    return [scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=softmax_scale)]


@lru_cache(maxsize=64)
def _last_rows(rows: int, length: int) -> Tensor:
    """Causal mask of the last rows of a request, aligned at the bottom right."""
    return torch.ones(rows, length, dtype=torch.bool).tril(length - rows)


@lru_cache(maxsize=64)
def _short_requests(lengths: tuple[int, ...], longest: int) -> Tensor:
    """0 at a request's positions and -inf beyond: a float mask was faster than a boolean one."""
    beyond = torch.arange(longest)[None, :] >= torch.tensor(lengths)[:, None]
    return torch.zeros(len(lengths), longest).masked_fill(beyond, -torch.inf)[:, None, None, :]
