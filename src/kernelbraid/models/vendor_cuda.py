"""The vendor arm on NVIDIA GPUs: the fastest kernels that are not unified, one call for a whole batch.

    linear      cuBLAS, chosen by shape                    experts   torch's grouped product, tokens sorted
    attention   FlashAttention-4 where installed, else cuDNN for sequences of one length, else torch's
                FlashAttention-2, packed; forward and backward
    prefill     FlashAttention-4 on pages, else pages gathered and torch's FlashAttention-2
    decode      FlashInfer on pages, planned once a step, else as prefill
    the rest    torch.compile: norms, rotary embedding, SwiGLU, log-probabilities of kept 16-bit logits

What a step's layers share (slots of the cache, rows of the rotary tables, FlashInfer's plan) is worked out
once. No call waits for the device, so a decode step fits in a CUDA graph. Bits depend on shapes.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernelbraid.models.vendor import Vendor

if TYPE_CHECKING:
    from kernelbraid.models.layer import Paged

F = TypeVar("F", bound=Callable[..., Any])
Compile = Callable[[Any], Any]

CHUNK_BYTES = 4 << 30
"""Of logits that are computed at a time, in the dtype of the model."""
KEPT_BYTES = 16 << 30
"""Of logits that a forward keeps for its backward; more are computed again."""
WORKSPACE_BYTES = 256 << 20
"""Of FlashInfer, shared by all its plans."""
TENSOR_CORES_FROM = 4
"""Query heads a key head from which FlashInfer decodes on tensor cores, as SGLang chooses for 16 bits."""


def _inductor(function: F) -> Any:
    """Compile for any number of rows: `_marked` makes the first axis dynamic, all others are constants."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def _marked(*tensors: Tensor) -> tuple[Tensor, ...]:
    for each in tensors:
        torch._dynamo.maybe_mark_dynamic(each, 0)
    return tensors


def installed(name: str) -> bool:
    """Whether a package of dotted name is there; nothing of it is run but its parents' `__init__`."""
    parts = name.split(".")
    return all(find_spec(".".join(parts[: i + 1])) is not None for i in range(len(parts)))


class VendorCuda(Vendor):
    """The fastest kernels installed; gradients by autograd and the libraries' backward kernels.

    What torch's own calls do best already, matrix products, embedding and routing, is `Vendor`'s.

    Args:
        flash_attention_4, flashinfer: use these packages; by default where they are installed.
        compile_: what compiles the elementwise parts; torch.compile by default.
    """

    waits = False

    def __init__(
        self,
        *,
        flash_attention_4: bool | None = None,
        flashinfer: bool | None = None,
        compile_: Compile = _inductor,
    ) -> None:
        self.flash4 = installed("flash_attn.cute") if flash_attention_4 is None else flash_attention_4
        self.flashinfer = installed("flashinfer") if flashinfer is None else flashinfer
        if self.flash4 or self.flashinfer:
            from kernelbraid.ops.attention import peers_gpu  # where libraries keep what they compile

            self._peers = peers_gpu
        packed = "FlashAttention-4" if self.flash4 else "cuDNN and FlashAttention-2"
        paged = "FlashAttention-4" if self.flash4 else "gathered pages"
        decode = "FlashInfer" if self.flashinfer else paged
        self.arithmetic = f"torch {torch.__version__}, {packed}, decode by {decode}"
        self._norm = compile_(_norm)
        self._add_norm = compile_(_add_norm)
        self._head_norm = compile_(_head_norm)
        self._turn = compile_(_turn)
        self._norm_turn = compile_(_norm_turn)
        self._swiglu = compile_(_swiglu)
        self._combine = compile_(_combine)
        self._scores = compile_(_scores)
        self._scores_entropy = compile_(_scores_entropy)
        self._dscores = compile_(_dscores)
        self._dscores_entropy = compile_(_dscores_entropy)
        self._rows: tuple[Tensor, Tensor, Tensor] | None = None
        self._slots: tuple[Tensor, Tensor] | None = None
        self._planned: tuple[Tensor, Any] | None = None
        self._wrappers: dict[tuple[int, ...], tuple[Tensor, Any]] = {}
        self._workspace: Tensor | None = None

    # ---- Rows ----

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _marked(x)
        found: Tensor = self._norm(x, weight, eps)
        return found

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        _marked(x, residual)
        found: tuple[Tensor, Tensor] = self._add_norm(x, residual, weight, eps)
        return found

    def swiglu(self, x: Tensor) -> Tensor:
        _marked(x)
        found: Tensor = self._swiglu(x)
        return found

    def moe_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        tokens, top_k = experts.shape
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        numbers = torch.arange(1, len(down) + 1, device=x.device, dtype=flat.dtype)
        ends = torch.searchsorted(flat[order], numbers).to(torch.int32)
        block = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), ends)
        found = torch._grouped_mm(self.swiglu(block), down.transpose(1, 2), ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        rows = found[back].view(tokens, top_k, -1)
        _marked(rows, weights)
        out: Tensor = self._combine(rows, weights)
        return out

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        _marked(q, k)
        found: tuple[Tensor, Tensor] = self._head_norm(q, k, q_weight, k_weight, eps)
        return found

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        c, s = self._table_rows(positions, cos, sin)
        _marked(q, k)
        found: tuple[Tensor, Tensor] = self._turn(q, k, c, s)
        return found

    def _table_rows(self, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tables, once for all layers of a step, which pass the same positions."""
        if self._rows is None or self._rows[0] is not positions:
            c, s = (table.index_select(0, positions) for table in (cos, sin))
            _marked(c, s)
            self._rows = positions, c, s
        return self._rows[1:]

    # ---- Whole sequences ----

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        if self.flash4:
            from flash_attn.cute import flash_attn_varlen_func

            sizes = self._peers.varlen_sizes(cu_seqlens, max_seqlen)
            found = flash_attn_varlen_func(q, k, v, causal=True, **sizes)
            out: Tensor = found[0] if isinstance(found, tuple) else found
            return out
        if len(q) == (len(cu_seqlens) - 1) * max_seqlen:
            return _uniform(q, k, v, max_seqlen)
        packed: Tensor = _Varlen.apply(q, k, v, cu_seqlens, max_seqlen)  # type: ignore[no-untyped-call]
        return packed

    # ---- The paged cache ----

    def plan(
        self, query_heads: int, k_cache: Tensor, batch: "Paged", host: "Paged", *, fixed: bool = False
    ) -> None:
        """Let FlashInfer plan a decode step, and remember the plan for the layers that follow."""
        self._planned = None
        if not self.flashinfer or batch.max_seqlen_q != 1:
            return
        wrapper = self._wrapper(query_heads, k_cache, batch, fixed)
        offsets, pages, last = ragged_pages(host.page_table, host.seqlens_k, k_cache.shape[1])
        kv_heads, depth = k_cache.shape[2:]
        wrapper.plan(
            *(offsets, pages, last, query_heads, kv_heads, depth, k_cache.shape[1]),
            q_data_type=k_cache.dtype,
            kv_data_type=k_cache.dtype,
        )
        self._planned = batch.page_table, wrapper

    def _wrapper(self, query_heads: int, k_cache: Tensor, batch: "Paged", fixed: bool) -> Any:
        """FlashInfer's decode: one for each set of fixed tensors, which a graph holds, one for others."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        table = batch.page_table
        key = (table.data_ptr(), *table.shape, query_heads) if fixed else (0, query_heads, k_cache.shape[2])
        if key not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=table.device)
            given: dict[str, Any] = {}
            if fixed:
                rows = table.shape[0]
                given = {
                    "use_cuda_graph": True,
                    "paged_kv_indptr_buffer": table.new_zeros(rows + 1),
                    "paged_kv_indices_buffer": table.new_zeros(table.numel()),
                    "paged_kv_last_page_len_buffer": table.new_zeros(rows),
                }
            cores = query_heads // k_cache.shape[2] >= TENSOR_CORES_FROM
            made = BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, kv_layout="NHD", use_tensor_cores=cores, **given
            )
            self._wrappers[key] = table, made
        return self._wrappers[key][1]

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
        c, s = self._table_rows(positions, cos, sin)
        _marked(q, k)
        if q_weight is not None and k_weight is not None:
            q, k = self._norm_turn(q, k, q_weight, k_weight, eps, c, s)
        else:
            q, k = self._turn(q, k, c, s)
        if self._slots is None or self._slots[0] is not positions:
            index = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
            request = torch.searchsorted(cu_seqlens_q, index, right=True) - 1
            size = k_cache.shape[1]
            page = page_table[request, (positions // size).long()].long()
            self._slots = positions, page * size + positions % size
        slots = self._slots[1]
        k_cache.flatten(0, 1).index_copy_(0, slots, k)
        v_cache.flatten(0, 1).index_copy_(0, slots, v)
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
        if max_seqlen_q == 1 and self.flashinfer:
            if self._planned is None or self._planned[0] is not page_table:
                raise RuntimeError("call Decoder.plan before each decode step: FlashInfer plans on the host")
            out: Tensor = self._planned[1].run(q, (k_cache, v_cache))
            return out
        if self.flash4:
            from flash_attn.cute import flash_attn_varlen_func

            found = flash_attn_varlen_func(
                *(q, k_cache, v_cache),
                cu_seqlens_q=cu_seqlens_q,
                seqused_k=seqlens_k,
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k,
                page_table=page_table,
                causal=True,
            )
            paged: Tensor = found[0] if isinstance(found, tuple) else found
            return paged
        k, v, offsets, longest = gathered(k_cache, v_cache, page_table, max_seqlen_k)
        return varlen(q, k, v, cu_seqlens_q, offsets, max_seqlen_q, longest, seqused_k=seqlens_k)[0]

    # ---- The vocabulary ----

    def logprob(
        self, x: Tensor, weight: Tensor, targets: Tensor, temperature: float, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        found, entropies = _Logprob.apply(  # type: ignore[no-untyped-call]
            x, weight, targets, 1 / temperature, entropy, self
        )
        return found, entropies if entropy else None

    def _scored(
        self, logits: Tensor, targets: Tensor, scale: float, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, log-sum-exps and entropies (or what is none) of some rows."""
        _marked(logits, targets)
        if entropy:
            found: tuple[Tensor, Tensor, Tensor] = self._scores_entropy(logits, targets, scale)
            return found
        logprobs, sums = self._scores(logits, targets, scale)
        return logprobs, sums, sums


# ---- Kernels of torch ----


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **more: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of torch's FlashAttention-2: packed, causal from the last key."""
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, True, False, scale=1 / math.sqrt(q.shape[-1]), **more
    )
    return found[0], found[1]


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, offsets: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by torch's FlashAttention-2."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    sizes = (offsets, offsets, longest, longest)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, sums, *sizes, 0.0, True, *state, scale=1 / math.sqrt(q.shape[-1])
    )
    return found


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        out, sums = varlen(q, k, v, offsets, offsets, longest, longest)
        ctx.save_for_backward(q, k, v, out, sums, offsets)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, sums, offsets = ctx.saved_tensors
        return *varlen_backward(dout, q, k, v, out, sums, offsets, ctx.longest), None, None


def _uniform(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Sequences of one length by cuDNN; torch raises where it cannot take them."""
    query, key, value = (x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)
    return out.transpose(1, 2).reshape(q.shape)


def gathered(
    k_cache: Tensor, v_cache: Tensor, page_table: Tensor, max_seqlen_k: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Keys and values of every request's pages, one request after the other, unused slots included.

    Args:
        k_cache, v_cache: [pages, page_size, Hkv, D].
        page_table: int32 [B, columns].
        max_seqlen_k: of the longest request.

    Returns:
        k and v [B * room, Hkv, D], int32 [B + 1] offsets, and room: `max_seqlen_k` in whole pages.
    """
    size = k_cache.shape[1]
    columns = min(page_table.shape[1], -(-max_seqlen_k // size))
    pages = page_table[:, :columns].reshape(-1)
    k, v = (cache.index_select(0, pages).flatten(0, 1) for cache in (k_cache, v_cache))
    room = columns * size
    offsets = torch.arange(len(page_table) + 1, dtype=torch.int32, device=pages.device) * room
    return k, v, offsets, room


def ragged_pages(table: Tensor, lengths: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """A page table as FlashInfer reads it, on the host.

    Args:
        table: int32 [B, columns] on the CPU.
        lengths: int32 [B] on the CPU, at least 1 each.
        page_size: tokens of a page.

    Returns:
        int32 offsets [B + 1] into the pages, the pages of all requests, and tokens in each one's last page.
    """
    counts = (lengths + page_size - 1) // page_size
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    offsets[1:] = counts.cumsum(0)
    held = torch.arange(table.shape[1], dtype=torch.int32) < counts[:, None]
    return offsets, table[held].to(torch.int32), (lengths - (counts - 1) * page_size).to(torch.int32)


# ---- What is compiled ----


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return functional.rms_norm(total, (x.shape[-1],), weight, eps), total


def _head_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sizes = (q.shape[-1],)
    return functional.rms_norm(q, sizes, q_weight, eps), functional.rms_norm(k, sizes, k_weight, eps)


def _turned(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    c, s = c[:, None], s[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


def _turn(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return _turned(q, c, s), _turned(k, c, s)


def _norm_turn(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, c: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    q, k = _head_norm(q, k, q_weight, k_weight, eps)
    return _turned(q, c, s), _turned(k, c, s)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def _combine(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows.float() * weights[..., None]).sum(1).to(rows.dtype)


def _scores(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    z = logits.float() * scale
    sums = torch.logsumexp(z, -1)
    found = z.gather(1, targets.clamp(min=0).long()[:, None])[:, 0] - sums
    return torch.where(targets < 0, 0.0, found), sums


def _scores_entropy(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    found, sums = _scores(logits, targets, scale)
    z = logits.float() * scale
    return found, sums, sums - ((z - sums[:, None]).exp() * z).sum(-1)


def _dscores(logits: Tensor, targets: Tensor, sums: Tensor, dout: Tensor, scale: float) -> Tensor:
    p = (logits.float() * scale - sums[:, None]).exp()
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    dout = torch.where(targets < 0, 0.0, dout) * scale
    return (dout[:, None] * (hit.float() - p)).to(logits.dtype)


def _dscores_entropy(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    dout: Tensor,
    entropies: Tensor,
    dentropies: Tensor,
    scale: float,
) -> Tensor:
    logs = logits.float() * scale - sums[:, None]
    p = logs.exp()
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    dout = torch.where(targets < 0, 0.0, dout)[:, None] * (hit.float() - p)
    return ((dout - dentropies[:, None] * p * (logs + entropies[:, None])) * scale).to(logits.dtype)


class _Logprob(torch.autograd.Function):
    """Log-probabilities by chunks of rows: 16-bit logits, kept for the backward where they fit."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: float, entropy: bool, by: VendorCuda
    ) -> tuple[Tensor, Tensor]:
        size = weight.shape[0] * weight.element_size()
        rows = max(1, CHUNK_BYTES // size)
        recorded = any(ctx.needs_input_grad[:2])
        keep = recorded and len(x) * size <= KEPT_BYTES
        kept: list[Tensor] = []
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for some, wanted in zip(torch.split(x, rows), torch.split(targets, rows), strict=True):
            logits = functional.linear(some, weight)
            found.append(by._scored(logits, wanted, scale, entropy))
            if keep:
                kept.append(logits)
        logprobs, sums, entropies = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True)
        )
        if recorded:
            ctx.save_for_backward(x, weight, targets, sums, entropies, *kept)
            ctx.rows, ctx.scale, ctx.entropy, ctx.by = rows, scale, entropy, by
        if not entropy:
            entropies = logprobs.new_empty(0)
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dentropies: Tensor | None) -> Any:
        x, weight, targets, sums, entropies, *kept = ctx.saved_tensors
        by: VendorCuda = ctx.by
        dx = torch.empty_like(x)
        dweight: Tensor | None = None
        for i, start in enumerate(range(0, len(x), ctx.rows)):
            part = slice(start, start + ctx.rows)
            logits = kept[i] if kept else functional.linear(x[part], weight)
            given = [logits, targets[part], sums[part], dout[part]]
            _marked(*given)
            if ctx.entropy:
                more = [entropies[part], dentropies[part]]  # type: ignore[index]
                _marked(*more)
                dlogits = by._dscores_entropy(*given, *more, ctx.scale)
            else:
                dlogits = by._dscores(*given, ctx.scale)
            dx[part] = dlogits @ weight
            added = dlogits.t() @ x[part]
            if len(x) <= ctx.rows:
                dweight = added
            else:
                dweight = added.float() if dweight is None else dweight.add_(added)
        if dweight is not None:
            dweight = dweight.to(weight.dtype)
        return dx, dweight, None, None, None, None
