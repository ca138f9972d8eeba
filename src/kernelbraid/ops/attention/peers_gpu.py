"""What a benchmark runs beside ours on a GPU: torch's cuDNN and FlashAttention-2, and others where installed.

Whole sequences are packed, q [T, Hq, D], k and v [T, Hkv, D]; peers of uniform sequences see [B, S, H, D].
Decode reads q [B, Hq, D] and contiguous k and v [B, Hkv, longest, D], of which request b holds the first
seqlens_k[b] positions: without the pages that ours goes through. Every entry point returns its output
instead of storing it, and a graph can capture it once it has been called.
"""

import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SPLIT_KEYS = (512, 1024)
"""Keys of a program of the split decode: short for contexts up to 4096 keys."""
KEY_TILE = 64
ROWS = 16
LOG2E = 1.4426950408889634


def _settle() -> None:
    """Libraries that compile their kernels at the first call keep them beside Triton's.

    Otherwise every process would compile them again: what it writes elsewhere goes with it. They look for
    ninja on the path, where pip puts it, and for CUDA's compiler where its packages do.
    """
    kept = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")).parent / "libraries"
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(kept))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(kept / "flash_attention_4"))
    places = [str(Path(sys.executable).parent)]
    compilers = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
    if compilers:
        os.environ.setdefault("CUDA_HOME", str(compilers[-1].parents[1]))
        places.append(str(compilers[-1].parent))
    os.environ["PATH"] = os.pathsep.join([*places, os.environ.get("PATH", os.defpath)])


_settle()


def _batched(x: Tensor, length: int) -> Tensor:
    """Packed sequences of one length as [B, H, S, D]."""
    return x.view(-1, length, *x.shape[1:]).transpose(1, 2)


# ---- Whole sequences.


def torch_cudnn(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float
) -> Tensor:
    """torch's cuDNN backend; sequences of one length."""
    q, k, v = (_batched(x, max_seqlen) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=True)


def torch_flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float
) -> Tensor:
    """torch's FlashAttention-2, packed."""
    sizes = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    found = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, True, False, scale=softmax_scale)
    return found[0]  # type: ignore[no-any-return]


def flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float
) -> Any:
    """FlashAttention-4 in CuTe DSL; packed, or in batches where all sequences have one length."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if len(q) == (len(cu_seqlens) - 1) * max_seqlen:
        batched = (x.view(-1, max_seqlen, *x.shape[1:]) for x in (q, k, v))
        return flash_attn_func(*batched, softmax_scale=softmax_scale, causal=True)
    return flash_attn_varlen_func(
        *(q, k, v), softmax_scale=softmax_scale, causal=True, **varlen_sizes(cu_seqlens, max_seqlen)
    )


def flash_attention_4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float,
) -> Any:  # fmt: skip
    """Gradients by FlashAttention-4's deterministic mode; the function under its public ones, whose graphs
    would hold the forward too."""
    from flash_attn.cute.interface import _flash_attn_bwd

    tensors, sizes = [q, k, v, out, dout], {}
    if len(q) == (len(cu_seqlens) - 1) * max_seqlen:
        tensors = [x.view(-1, max_seqlen, *x.shape[1:]) for x in tensors]
        lse = lse.view(lse.shape[0], -1, max_seqlen).transpose(0, 1).contiguous()
    else:
        sizes = varlen_sizes(cu_seqlens, max_seqlen)
    return _flash_attn_bwd(
        *tensors, lse, softmax_scale=softmax_scale, causal=True, deterministic=True, **sizes
    )


def varlen_sizes(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """Packed sequences as FlashAttention-4 is told of them; queries and keys have the same."""
    lengths = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, **lengths}


def torch_cudnn_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float,
) -> Any:  # fmt: skip
    """Gradients by torch's cuDNN backend; sequences of one length."""
    dout, q, k, v, out = (_batched(x, max_seqlen) for x in (dout, q, k, v, out))
    log_sums = lse.view(lse.shape[0], -1, max_seqlen).transpose(0, 1).unsqueeze(-1).contiguous()
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(dout, q, k, v, out, log_sums, zero, zero, None, None, None, max_seqlen, max_seqlen, 0.0, True),
        scale=softmax_scale,
    )


def torch_flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float,
) -> Any:  # fmt: skip
    """Gradients by torch's FlashAttention-2, packed."""
    sizes = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros((), device=q.device)
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *sizes, 0.0, True, *state, scale=softmax_scale
    )


# ---- Decode.


def torch_cudnn_decode(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
) -> Tensor:  # fmt: skip
    """torch's cuDNN backend; contexts of one length."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q[:, :, None], k, v, scale=softmax_scale, enable_gqa=True)


def torch_flash_decode(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
) -> Tensor:  # fmt: skip
    """torch's FlashAttention-2; contexts of one length."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q[:, :, None], k, v, scale=softmax_scale, enable_gqa=True)


def flashinfer_decode(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
) -> Any:  # fmt: skip
    """FlashInfer's batch decode, a request's whole context being its one page; contexts of one length."""
    return _flashinfer(q.shape, k.shape, q.dtype, softmax_scale).run(q, (k, v))


@lru_cache(maxsize=64)
def _flashinfer(
    queries: tuple[int, ...], keys: tuple[int, ...], dtype: torch.dtype, softmax_scale: float
) -> Any:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    batch, kv_heads, length, depth = keys
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout="HND")
    pages = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    sizes = (queries[1], kv_heads, depth, length)
    wrapper.plan(pages, pages[:-1], last, *sizes, q_data_type=dtype, sm_scale=softmax_scale)
    return wrapper


def split_decode(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
) -> Tensor:  # fmt: skip
    """A plain split decode in Triton: what ours would cost without pages and without its domain."""
    (batch, query_heads, depth), kv_heads = q.shape, k.shape[1]
    group, span = query_heads // kv_heads, SPLIT_KEYS[max_seqlen_k > 4096]
    parts = triton.cdiv(max_seqlen_k, span)
    out = torch.empty_like(q)
    partials = torch.empty(batch * query_heads * parts * (depth + 2), dtype=torch.float32, device=q.device)
    split_kernel[(batch * kv_heads, parts)](
        *(q, k, v, seqlens_k, partials, softmax_scale * LOG2E, q.stride(0), k.stride(0), k.stride(1)),
        *(kv_heads, group, depth, max(ROWS, triton.next_power_of_2(group)), KEY_TILE, span),
        num_warps=4,
        num_stages=3,
    )
    join_kernel[(batch * query_heads,)](
        out, seqlens_k, partials, parts, query_heads, group, depth, span, num_warps=1
    )
    return out


@triton.jit
def split_kernel(
    Q, K, V, LENGTHS, P, scale, sq_b, sk_b, sk_h,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Output, maximum and sum of one group of query heads over SPAN keys: P [B, Hkv, parts, G, D + 2]."""
    b = tl.program_id(0) // HK
    g = tl.program_id(0) % HK
    first = tl.program_id(1) * SPAN
    n = tl.load(LENGTHS + b)
    if first >= n:
        return
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, D)
    p_q = Q + b.to(tl.int64) * sq_b + (g * G + o_m) * D
    b_q = tl.load(p_q[None, :] + o_d[:, None], mask=(o_m < G)[None, :], other=0.0)
    p_k = K + b.to(tl.int64) * sk_b + g.to(tl.int64) * sk_h
    p_v = V + b.to(tl.int64) * sk_b + g.to(tl.int64) * sk_h
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((D, BM), tl.float32)
    for pos in range(first, tl.minimum(first + SPAN, n), BN):
        o_n = pos + tl.arange(0, BN)
        m_n = (o_n < n)[:, None]
        b_k = tl.load(p_k + o_n[:, None] * D + o_d[None, :], mask=m_n, other=0.0)
        s = tl.where(m_n, tl.dot(b_k, b_q) * scale, float("-inf"))
        new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - new[None, :])
        a = tl.exp2(m - new)
        b_v = tl.load(p_v + o_n[:, None] * D + o_d[None, :], mask=m_n, other=0.0)
        acc = tl.dot(b_v.T, p.to(b_q.dtype), acc * a[None, :])
        total = total * a + tl.sum(p, 0)
        m = new
    p_p = P + ((tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * G + o_m) * (D + 2)
    tl.store(p_p[None, :] + o_d[:, None], acc, mask=(o_m < G)[None, :])
    tl.store(p_p + D, m, mask=o_m < G)
    tl.store(p_p + D + 1, total, mask=o_m < G)


@triton.jit
def join_kernel(
    O, LENGTHS, P, parts, HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Merge the parts of one query head."""
    row = tl.program_id(0)
    n = tl.load(LENGTHS + row // HQ)
    o_d = tl.arange(0, D)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for part in range(0, (n + SPAN - 1) // SPAN):
        p_p = P + ((row // G * parts + part) * G + row % G) * (D + 2)
        other = tl.load(p_p + D)
        new = tl.maximum(m, other)
        a, b = tl.exp2(m - new), tl.exp2(other - new)
        acc = acc * a + tl.load(p_p + o_d) * b
        total = total * a + tl.load(p_p + D + 1) * b
        m = new
    tl.store(O + row * D + o_d, (acc / total).to(O.dtype.element_ty))
