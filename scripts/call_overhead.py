"""Print what a small call of the public functions costs on the CPU beyond the kernel's own entry point.

One request, 9 query heads, 3 KV heads, head_dim 64: 16 packed tokens, and one token decoded over 32 keys.
Each figure is the least mean of several batches of calls, in microseconds; the entry points get ready arrays.
"""

import time
from collections.abc import Callable

import torch

from kernelbraid import attention, paged_attention, write_kv_cache
from kernelbraid.ops.attention import registered

QUERY_HEADS, KV_HEADS, HEAD_DIM, TOKENS, KEYS, PAGE = 9, 3, 64, 16, 32, 16
BATCHES, CALLS = 30, 200


def microseconds(call: Callable[[], object]) -> float:
    call()
    means = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter() - start) / CALLS)
    return 1e6 * min(means)


def main() -> None:
    torch.manual_seed(0)
    kernel = registered.implementation(torch.device("cpu"))
    q = torch.randn(TOKENS, QUERY_HEADS, HEAD_DIM)
    k, v = torch.randn(2, TOKENS, KV_HEADS, HEAD_DIM)
    with_grad = [x.clone().requires_grad_() for x in (q, k, v)]
    offsets, scale = torch.tensor([0, TOKENS], dtype=torch.int32), HEAD_DIM**-0.5
    out, lse, dout = torch.empty_like(q), torch.empty(QUERY_HEADS, TOKENS), torch.randn_like(q)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    packed = {"cu_seqlens": offsets, "max_seqlen": TOKENS}
    arrays = [x.numpy() for x in (q, k, v)]
    backward = [x.numpy() for x in (q, k, v, out, lse, dout, offsets)]
    written = [x.numpy() for x in gradients]
    attended = attention(*with_grad, **packed)

    caches = torch.randn(2, 4, PAGE, KV_HEADS, HEAD_DIM)
    where = {
        "page_table": torch.tensor([[2, 1]], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "seqlens_k": torch.tensor([KEYS], dtype=torch.int32),
    }
    pages = [x.numpy() for x in (*caches, *where.values())]
    token = [x.numpy() for x in (k[:1], v[:1])]
    rows: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "attention": (
            lambda: kernel.attention(*arrays, offsets.numpy(), TOKENS, scale, out.numpy(), None),
            lambda: attention(q, k, v, **packed),
        ),
        "attention, recorded by autograd": (
            lambda: kernel.attention(*arrays, offsets.numpy(), TOKENS, scale, out.numpy(), lse.numpy()),
            lambda: attention(*with_grad, **packed),
        ),
        "its gradients": (
            lambda: kernel.attention_backward(*backward, TOKENS, scale, *written),
            lambda: torch.autograd.grad(attended, with_grad, dout, retain_graph=True),
        ),
        "paged_attention": (
            lambda: kernel.paged_attention(q[:1].numpy(), *pages, 1, KEYS, scale, out[:1].numpy(), None),
            lambda: paged_attention(q[:1], *caches, **where, max_seqlen_q=1, max_seqlen_k=KEYS),
        ),
        "write_kv_cache": (
            lambda: kernel.write_kv_cache(*token, *pages),
            lambda: write_kv_cache(k[:1], v[:1], *caches, **where),
        ),
    }
    kernel.attention(*arrays, offsets.numpy(), TOKENS, scale, out.numpy(), lse.numpy())
    print(f"{'':34}{'entry point':>12}{'public':>10}{'overhead':>10}   us")
    for name, (raw, public) in rows.items():
        own, whole = microseconds(raw), microseconds(public)
        print(f"{name:34}{own:12.1f}{whole:10.1f}{whole - own:10.1f}")


if __name__ == "__main__":
    main()
