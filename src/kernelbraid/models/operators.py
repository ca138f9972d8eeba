"""The operators that a decoder calls: unified ones, or others in their places.

A decoder asks one object for all of its mathematics, so that an experiment may exchange it as a whole: the
update's adds gradients in place (`accumulating`), and `vendor` holds what torch ships.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from kernelbraid.ops.add_rms_norm.api import add_rms_norm
from kernelbraid.ops.attention.api import attention, paged_attention
from kernelbraid.ops.embedding.api import embedding
from kernelbraid.ops.linear.api import linear
from kernelbraid.ops.logprob.api import head_logits, logprob
from kernelbraid.ops.moe_experts.api import moe_experts
from kernelbraid.ops.moe_router.api import moe_router
from kernelbraid.ops.qk_norm.api import qk_norm
from kernelbraid.ops.qk_norm_rope_cache.api import qk_norm_rope_cache
from kernelbraid.ops.rms_norm.api import rms_norm
from kernelbraid.ops.rope.api import rope
from kernelbraid.ops.swiglu.api import swiglu

if TYPE_CHECKING:
    from kernelbraid.models.layer import Paged


class Operators:
    """Unified operators, each as its public function documents it; subclasses exchange some or all.

    Bits: those of the contracts.
    """

    arithmetic: str = "unified"
    """Names the bits: what computes others names itself, so that bits ids of decoders differ."""
    waits: bool = False
    """Whether calls read device tensors on the host, so that no CUDA graph can hold them."""

    def plan(
        self, query_heads: int, k_cache: Tensor, batch: "Paged", host: "Paged", *, fixed: bool = False
    ) -> None:
        """Prepare a step on the paged cache, once for all layers and outside of any CUDA graph.

        Unified operators need nothing of that.

        Args:
            query_heads: of the model.
            k_cache: keys of any layer.
            batch: what the layers will be given.
            host: its tensors on the CPU, which may be read.
            fixed: whether the tensors of `batch` stay where they are, so that a graph may hold them.
        """

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return embedding(ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps=eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps=eps)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    def swiglu(self, x: Tensor) -> Tensor:
        return swiglu(x)

    def moe_router(self, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        return moe_router(logits, top_k=top_k, renormalize=renormalize)

    def moe_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        return moe_experts(x, weights, experts, gate_up, down)

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return qk_norm(q, k, q_weight, k_weight, eps=eps)

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return rope(q, k, positions, cos, sin)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        return attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)

    def qk_norm_rope_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> Tensor:
        return qk_norm_rope_cache(
            *(q, k, v, positions, cos, sin, k_cache, v_cache),
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
        )

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> Tensor:
        return paged_attention(
            *(q, k_cache, v_cache),
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    def logprob(
        self, x: Tensor, weight: Tensor, targets: Tensor, temperature: float, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of targets, and where asked for the entropies."""
        found = logprob(x, weight, targets, temperature=temperature, return_entropy=entropy)
        if isinstance(found, Tensor):
            return found, None
        return found[0], found[1]

    def head_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return head_logits(x, weight)


UNIFIED = Operators()
