"""Print what a small call of the public functions costs on the CPU beyond the kernel's own entry point.

    python scripts/call_overhead.py [cpu|cuda]

One request, 9 query heads, 3 KV heads, head_dim 64: 16 packed tokens, and one token decoded over 32 keys.
Each figure is the least mean of several batches of calls, in microseconds; the entry points get ready arrays
or tensors. On a GPU calls are queued and not waited for: the figures are the host's time alone.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from kernelbraid import attention, paged_attention, write_kv_cache
from kernelbraid.ops import dispatch

QUERY_HEADS, KV_HEADS, HEAD_DIM, TOKENS, KEYS, PAGE = 9, 3, 64, 16, 32, 16
BATCHES, CALLS = 30, 200


def microseconds(call: Callable[[], object], finish: Callable[[], object]) -> float:
    call()
    means = []
    for _ in range(BATCHES):
        finish()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter() - start) / CALLS)
    finish()
    return 1e6 * min(means)


def main(device: torch.device) -> None:
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    kernel = dispatch.implementation("attention", device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def integers(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def ready(*tensors: torch.Tensor) -> list[Any]:
        return list(tensors) if on_gpu else [x.numpy() for x in tensors]

    q, k, v = normal(TOKENS, QUERY_HEADS, HEAD_DIM), *normal(2, TOKENS, KV_HEADS, HEAD_DIM)
    with_grad = [x.clone().requires_grad_() for x in (q, k, v)]
    offsets, scale = integers([0, TOKENS]), HEAD_DIM**-0.5
    lse = torch.empty(QUERY_HEADS, TOKENS, device=device)
    out, dout = torch.empty_like(q), normal(*q.shape)
    packed = {"cu_seqlens": offsets, "max_seqlen": TOKENS}
    attended = attention(*with_grad, **packed)

    caches = normal(2, 4, PAGE, KV_HEADS, HEAD_DIM)
    where = {
        "page_table": integers([[2, 1]]),
        "cu_seqlens_q": integers([0, 1]),
        "seqlens_k": integers([KEYS]),
    }
    inputs, results, gradients = (
        ready(q, k, v, offsets),
        ready(out, lse),
        ready(*map(torch.empty_like, (q, k, v))),
    )
    pages, token = ready(*caches, *where.values()), ready(q[:1], out[:1], k[:1], v[:1])
    attended_before = ready(q, k, v, out, lse, dout, offsets)
    rows: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "attention": (
            lambda: kernel.attention(*inputs, TOKENS, scale, results[0], None),
            lambda: attention(q, k, v, **packed),
        ),
        "attention, recorded by autograd": (
            lambda: kernel.attention(*inputs, TOKENS, scale, *results),
            lambda: attention(*with_grad, **packed),
        ),
        "its gradients": (
            lambda: kernel.attention_backward(*attended_before, TOKENS, scale, *gradients),
            lambda: torch.autograd.grad(attended, with_grad, dout, retain_graph=True),
        ),
        "paged_attention": (
            lambda: kernel.paged_attention(token[0], *pages, 1, KEYS, scale, token[1], None),
            lambda: paged_attention(q[:1], *caches, **where, max_seqlen_q=1, max_seqlen_k=KEYS),
        ),
        "write_kv_cache": (
            lambda: kernel.write_kv_cache(*token[2:], *pages),
            lambda: write_kv_cache(k[:1], v[:1], *caches, **where),
        ),
    }
    kernel.attention(*inputs, TOKENS, scale, *results)  # the sums that gradients need
    finish = torch.cuda.synchronize if on_gpu else int
    print(f"{device}\n{'':34}{'entry point':>12}{'public':>10}{'overhead':>10}   us")
    for name, (raw, public) in rows.items():
        own, whole = microseconds(raw, finish), microseconds(public, finish)
        print(f"{name:34}{own:12.1f}{whole:10.1f}{whole - own:10.1f}")


if __name__ == "__main__":
    main(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
