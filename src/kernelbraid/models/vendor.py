"""The same decoder on what torch ships: the arm that unified operators are compared with.

On a GPU `vendor` gives the fastest kernels there are (`vendor_cuda`); the ones here are for CPUs:
scaled-dot-product attention, the vendor's matrix products and torch's own norms, each chosen by shape as
torch chooses them. Rollout and update then run different kernels on rows of other numbers, and their bits
differ: log-probabilities recorded with it must be recomputed. Layouts and roundings between operators are
those of the unified decoder, so that nothing but the kernels differs.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kernelbraid.models.operators import Operators


class Vendor(Operators):
    """Torch's operators; gradients by autograd."""

    arithmetic = f"torch {torch.__version__}"
    waits = True

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return functional.embedding(ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias)

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    def moe_router(self, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights, chosen = torch.softmax(logits.float(), -1).topk(top_k, -1)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen.int()

    def moe_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for i in range(gate_up.shape[0]):
            token, slot = torch.nonzero(experts == i, as_tuple=True)
            inner = self.swiglu(functional.linear(x[token], gate_up[i]))
            found = functional.linear(inner, down[i]).float() * weights[token, slot, None]
            out = out.index_add(0, token, found)
        return out.to(x.dtype)

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]

        def turned(x: Tensor) -> Tensor:
            a, b = x.float().chunk(2, -1)
            return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)

        return turned(q), turned(k)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        pieces = [
            _attend(q[a:b], k[a:b], v[a:b], causal=True) for a, b in pairwise(cu_seqlens.tolist()) if a < b
        ]
        return torch.cat(pieces) if pieces else torch.empty_like(q)

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
        if q_weight is not None and k_weight is not None:
            q, k = self.qk_norm(q, k, q_weight, k_weight, eps)
        q, k = self.rope(q, k, positions, cos, sin)
        index = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
        request = torch.searchsorted(cu_seqlens_q, index, right=True) - 1
        place = (index - cu_seqlens_q[request + 1] + seqlens_k[request]).long()
        size = k_cache.shape[1]
        page = page_table[request, place // size].long()
        k_cache[page, place % size] = k
        v_cache[page, place % size] = v
        return q

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
        size, out = k_cache.shape[1], torch.empty_like(q)
        for b, ((start, end), held) in enumerate(
            zip(pairwise(cu_seqlens_q.tolist()), seqlens_k.tolist(), strict=True)
        ):
            if start == end:
                continue
            pages = page_table[b, : -(-held // size)].long()
            keys, values = (cache[pages].flatten(0, 1)[:held] for cache in (k_cache, v_cache))
            out[start:end] = _attend(q[start:end], keys, values, causal=end - start > 1)
        return out

    def logprob(
        self, x: Tensor, weight: Tensor, targets: Tensor, temperature: float, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        scores = torch.log_softmax(functional.linear(x, weight).float() * (1 / temperature), -1)
        found = scores.gather(1, targets.clamp(min=0).long()[:, None])[:, 0]
        kept = torch.where(targets < 0, 0.0, found)
        return kept, -(scores.exp() * scores).sum(-1) if entropy else None

    def head_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight).float()


def vendor(device: torch.device | str) -> Operators:
    """The vendor arm of a device: torch's operators on a CPU, `VendorCuda` on a GPU."""
    if torch.device(device).type == "cpu":
        return Vendor()
    from kernelbraid.models.vendor_cuda import VendorCuda

    return VendorCuda()


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """One sequence's new rows [T, Hq, D] over its keys [K, Hkv, D], bottom-right aligned."""
    rows, keys = q.shape[0], k.shape[0]
    mask = None
    if causal and rows != keys:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    found = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return found[0].transpose(0, 1)
