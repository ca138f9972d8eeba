"""A whole decoder of unified operators: token ids in, log-probabilities out, in update and rollout alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernelbraid.models.config import ModelConfig
from kernelbraid.models.layer import (
    Attend,
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
from kernelbraid.models.operators import UNIFIED, Operators
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
    operators: Operators = UNIFIED
    checkpoint: bool = False
    """Keep nothing of a layer but its inputs, and compute it again in the backward pass."""
    tables: RopeTables = field(init=False)

    def __post_init__(self) -> None:
        scaling = self.config.rope_scaling
        cos, sin = rope_tables(self.config.head_dim, self.positions, self.config.rope_theta, scaling=scaling)
        device = self.weights.norm.device
        object.__setattr__(self, "tables", RopeTables(cos.to(device), sin.to(device)))

    def hidden(self, ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Last hidden states, normed, of packed sequences: [T, hidden]. Differentiable."""
        batch = Packed(packed_positions(cu_seqlens, len(ids)), cu_seqlens, max_seqlen)
        attends = [
            attend_packed(self.config, each, self.tables, batch, self.operators)
            for each in self.weights.layers
        ]
        return self._through(ids, attends)

    def rollout(self, ids: Tensor, cache: Cache, batch: Paged) -> Tensor:
        """Last hidden states, normed, of new tokens, whose keys and values go into the cache: [T, hidden]."""
        positions = paged_positions(batch, len(ids))
        attends = [
            attend_paged(
                *(self.config, each, self.tables, cache.k[i], cache.v[i], batch, positions), self.operators
            )
            for i, each in enumerate(self.weights.layers)
        ]
        return self._through(ids, attends)

    def plan(self, cache: Cache, batch: Paged, host: Paged, *, fixed: bool = False) -> None:
        """Let operators prepare the next `rollout`, also where a CUDA graph of it is replayed.

        Args:
            cache: that it reads.
            batch: that it gets.
            host: the same tensors on the CPU.
            fixed: whether those of `batch` stay where they are.
        """
        self.operators.plan(self.config.query_heads, cache.k[0], batch, host, fixed=fixed)

    def _through(self, ids: Tensor, attends: Sequence[Attend]) -> Tensor:
        ops = self.operators
        x, residual = ops.embedding(ids, self.weights.embedding), None
        for each, attend in zip(self.weights.layers, attends, strict=True):
            x, residual = self._layer(each, x, residual, attend)
        assert residual is not None
        normed, _ = ops.add_rms_norm(x, residual, self.weights.norm, self.config.eps)
        return normed

    def _layer(
        self, weights: LayerWeights, x: Tensor, residual: Tensor | None, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        def run(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            return layer(self.config, weights, x, residual, attend, self.operators)

        if not self.checkpoint or not torch.is_grad_enabled():
            return run(x, residual)
        found: tuple[Tensor, Tensor] = checkpoint(
            run, x, residual, use_reentrant=False, preserve_rng_state=False
        )
        return found

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probability of one token id after each row, [T] float32. Differentiable."""
        return self.operators.logprob(hidden, self.weights.head, targets, temperature)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token id to sample from, [T, vocab] float32: those of `logprobs`."""
        return self.operators.head_logits(hidden, self.weights.head)
