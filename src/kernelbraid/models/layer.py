"""A decoder layer of unified operators: one definition for rollout and update.

    a, r = add_rms_norm(x, r)        x = o(attention(rope(qk_norm(qkv(a)))))
    m, r = add_rms_norm(x, r)        x = down(swiglu(gate_up(m)))        or the experts that the router chose

The two differ in `attend` alone: the update attends packed sequences, rollout writes the new keys and values
into the paged cache and attends what is there. Everything else is the same call on other rows, whose bits do
not depend on their number or neighbours.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernelbraid.models.config import ModelConfig
from kernelbraid.models.operators import UNIFIED, Operators

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q [T, Hq, D], k and v [T, Hkv, D], neither normed nor rotated, to the output [T, Hq, D]."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Parameters of one layer; projections that read the same rows are one matrix.

    Dense layers have gate_up and down; sparse ones router, experts_gate_up and experts_down.
    """

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    router: Tensor | None = None
    experts_gate_up: Tensor | None = None
    experts_down: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The parameters that there are, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Cosines and sines of every position, [max_positions, head_dim / 2] float32."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """Whole sequences one after the other: a batch of the update."""

    positions: Tensor
    """[T] int32, of each token in its sequence."""
    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class Paged:
    """New tokens of requests whose keys and values are, or will be, in a paged cache."""

    page_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def to(self, device: torch.device | str) -> "Paged":
        """The same on a device."""
        table, offsets, lengths = (
            each.to(device) for each in (self.page_table, self.cu_seqlens_q, self.seqlens_k)
        )
        return Paged(table, offsets, lengths, self.max_seqlen_q, self.max_seqlen_k)


def attend_packed(
    config: ModelConfig,
    weights: LayerWeights,
    tables: RopeTables,
    batch: Packed,
    operators: Operators = UNIFIED,
) -> Attend:
    """What a layer of the update does between its projections."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = operators.qk_norm(q, k, weights.q_norm, weights.k_norm, config.eps)
        q, k = operators.rope(q, k, batch.positions, tables.cos, tables.sin)
        return operators.attention(q, k, v, batch.cu_seqlens, batch.max_seqlen)

    return attend


def attend_paged(
    config: ModelConfig,
    weights: LayerWeights,
    tables: RopeTables,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Paged,
    positions: Tensor,
    operators: Operators = UNIFIED,
) -> Attend:
    """What a layer of the rollout does between its projections: it also writes the cache."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = operators.qk_norm_rope_cache(
            *(q, k, v, positions, tables.cos, tables.sin, k_cache, v_cache),
            page_table=batch.page_table,
            cu_seqlens_q=batch.cu_seqlens_q,
            seqlens_k=batch.seqlens_k,
            q_weight=weights.q_norm,
            k_weight=weights.k_norm,
            eps=config.eps,
        )
        return operators.paged_attention(
            q,
            k_cache,
            v_cache,
            page_table=batch.page_table,
            cu_seqlens_q=batch.cu_seqlens_q,
            seqlens_k=batch.seqlens_k,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
        )

    return attend


def layer(
    config: ModelConfig,
    weights: LayerWeights,
    x: Tensor,
    residual: Tensor | None,
    attend: Attend,
    operators: Operators = UNIFIED,
) -> tuple[Tensor, Tensor]:
    """One decoder layer.

    Args:
        config: of the model.
        weights: of the layer.
        x: [T, hidden], what the layer before adds to the residual; the embeddings for the first one.
        residual: [T, hidden], None for the first layer.
        attend: the middle of the attention, for update or rollout.
        operators: what computes everything else.

    Returns:
        What this layer adds to the residual, and the residual, [T, hidden] each.

    Bits: those of its operators; each row depends on its own token and the keys that it sees.
    """
    if residual is None:
        normed, residual = operators.rms_norm(x, weights.input_norm, config.eps), x
    else:
        normed, residual = operators.add_rms_norm(x, residual, weights.input_norm, config.eps)
    qkv = operators.linear(normed, weights.qkv, weights.qkv_bias)
    q, k, v = _heads(config, qkv)
    x = operators.linear(attend(q, k, v).reshape(x.shape[0], -1), weights.o)
    normed, residual = operators.add_rms_norm(x, residual, weights.post_norm, config.eps)
    return feed_forward(config, weights, normed, operators), residual


def feed_forward(
    config: ModelConfig, weights: LayerWeights, x: Tensor, operators: Operators = UNIFIED
) -> Tensor:
    """The dense feed-forward, or that of the experts that the router chooses for each token."""
    if config.experts is None:
        assert weights.gate_up is not None and weights.down is not None
        return operators.linear(operators.swiglu(operators.linear(x, weights.gate_up)), weights.down)
    assert weights.router is not None
    assert weights.experts_gate_up is not None and weights.experts_down is not None
    scores, chosen = operators.moe_router(
        operators.linear(x, weights.router), config.experts.top_k, config.experts.renormalize
    )
    return operators.moe_experts(x, scores, chosen, weights.experts_gate_up, weights.experts_down)


def _heads(config: ModelConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one projection's rows."""
    counts = (config.query_heads, config.kv_heads, config.kv_heads)
    parts = torch.split(qkv, [count * config.head_dim for count in counts], dim=1)
    heads = [part.view(-1, count, config.head_dim) for part, count in zip(parts, counts, strict=True)]
    return heads[0], heads[1], heads[2]


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Position of each packed token in its sequence, [T] int32, without waiting for a device."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
    return index - cu_seqlens[sequence]


def paged_positions(batch: Paged, tokens: int) -> Tensor:
    """Position of each new token in its request, [T] int32, without waiting for a device."""
    index = torch.arange(tokens, device=batch.cu_seqlens_q.device, dtype=torch.int32)
    request = torch.searchsorted(batch.cu_seqlens_q, index, right=True) - 1
    return index - batch.cu_seqlens_q[request + 1] + batch.seqlens_k[request]
