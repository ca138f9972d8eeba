"""A whole decoder of unified operators: token ids in, log-probabilities out, in update and rollout alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from kernelbraid.models.config import ModelConfig
from kernelbraid.models.layer import (
    LayerWeights,
    Packed,
    Paged,
    RopeTables,
    attend_packed,
    attend_paged,
    layer,
    packed_positions,
    paged_positions,
)
from kernelbraid.ops.add_rms_norm.api import add_rms_norm
from kernelbraid.ops.embedding.api import embedding
from kernelbraid.ops.logprob.api import head_logits, logprob
from kernelbraid.ops.rope.tables import rope_tables


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Parameters of a decoder. `head` is the embedding itself where they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter once, by name."""
        yield "embedding", self.embedding
        for i, each in enumerate(self.layers):
            for name, tensor in each.tensors().items():
                yield f"layers.{i}.{name}", tensor
        yield "norm", self.norm
        if self.head is not self.embedding:
            yield "head", self.head


@dataclass(frozen=True, slots=True)
class Cache:
    """Paged keys and values of every layer, [pages, page_size, Hkv, D] each."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    @classmethod
    def empty(cls, config: ModelConfig, pages: int, page_size: int, like: Tensor) -> Self:
        """A cache of unwritten pages, in the dtype and on the device of another tensor."""
        shape = (pages, page_size, config.kv_heads, config.head_dim)

        def made() -> tuple[Tensor, ...]:
            return tuple(
                torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(config.layers)
            )

        return cls(made(), made())


@dataclass(frozen=True)
class Decoder:
    """A model: configuration, parameters, tables of the rotary embedding."""

    config: ModelConfig
    weights: ModelWeights
    positions: int
    """Positions that the tables cover."""
    tables: RopeTables = field(init=False)

    def __post_init__(self) -> None:
        scaling = self.config.rope_scaling
        cos, sin = rope_tables(self.config.head_dim, self.positions, self.config.rope_theta, scaling=scaling)
        device = self.weights.norm.device
        object.__setattr__(self, "tables", RopeTables(cos.to(device), sin.to(device)))

    def hidden(self, ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Last hidden states, normed, of packed sequences: [T, hidden]. Differentiable."""
        batch = Packed(packed_positions(cu_seqlens, len(ids)), cu_seqlens, max_seqlen)
        attends = [attend_packed(self.config, each, self.tables, batch) for each in self.weights.layers]
        return self._through(ids, attends)

    def rollout(self, ids: Tensor, cache: Cache, batch: Paged) -> Tensor:
        """Last hidden states, normed, of new tokens, whose keys and values go into the cache: [T, hidden]."""
        positions = paged_positions(batch, len(ids))
        attends = [
            attend_paged(self.config, each, self.tables, cache.k[i], cache.v[i], batch, positions)
            for i, each in enumerate(self.weights.layers)
        ]
        return self._through(ids, attends)

    def _through(self, ids: Tensor, attends: Sequence[object]) -> Tensor:
        x, residual = embedding(ids, self.weights.embedding), None
        for each, attend in zip(self.weights.layers, attends, strict=True):
            x, residual = layer(self.config, each, x, residual, attend)  # type: ignore[arg-type]
        assert residual is not None
        normed, _ = add_rms_norm(x, residual, self.weights.norm, eps=self.config.eps)
        return normed

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probability of one token id after each row, [T] float32. Differentiable."""
        found = logprob(hidden, self.weights.head, targets, temperature=temperature)
        assert isinstance(found, Tensor)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token id to sample from, [T, vocab] float32: those of `logprobs`."""
        return head_logits(hidden, self.weights.head)
