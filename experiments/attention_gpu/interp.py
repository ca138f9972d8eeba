"""Run gpu.py in Triton's interpreter, on a CPU, on small float16 shapes: python interp.py [long]; prints the differences.

The forward is compared with float64, paged decode and prefill with the packed forward, the gradients with float64.
The interpreter's sums have other orders than the GPU's: this finds wrong indices, not wrong bits. It needs NumPy
below 2.4.
"""

import math
import os
import sys
import time

os.environ["TRITON_INTERPRET"] = "1"

import gpu as G
import torch

G.architecture_of = lambda d: 80
G.EARLY_CHUNK, G.EARLY_KEYS, G.CHUNK, G.WALK_KEYS = 64, 128, 128, 64
torch.manual_seed(0)


def i32(x):
    return torch.tensor(x, dtype=torch.int32)


def ref(q, k, v, n, scale):
    r = len(q)
    g = q.shape[1] // k.shape[1]
    s = torch.einsum("thd,jhd->htj", q.double(), k.double().repeat_interleave(g, 1)) * scale
    m = torch.arange(n)[None] > (n - r + torch.arange(r))[:, None]
    s = s.masked_fill(m, -math.inf)
    return torch.einsum("htj,jhd->thd", s.softmax(-1), v.double().repeat_interleave(g, 1)), s.logsumexp(-1)


hq, hk, d = 3, 1, 64
lengths = [1, 0, 33, 150] if len(sys.argv) < 2 else [1, 0, 40, 280]
cu = [0]
for n in lengths:
    cu.append(cu[-1] + n)
T = cu[-1]
q, k, v, do = (torch.randn(T, h, d).half() for h in (hq, hk, hk, hq))
o = torch.full_like(q, float("nan"))
l = torch.full((hq, T), float("nan"))
sc = d**-0.5
t = time.time()
G.attention(q, k, v, i32(cu), max(lengths), sc, o, l)
print("fwd", time.time() - t)
for b, n in enumerate(lengths):
    if n:
        s = slice(cu[b], cu[b + 1])
        ro, rl = ref(q[s], k[s], v[s], n, sc)
        print(n, (o[s] - ro).abs().max().item(), (l[:, s] - rl).abs().max().item())
for page in (16, 64):
    cnt = [-(-n // page) for n in lengths]
    tot = sum(cnt) + 2
    perm = torch.randperm(tot)
    kc = torch.full((tot, page, hk, d), float("nan")).half()
    vc = kc.clone()
    tab = torch.randint(-(2**31), 2**31 - 1, (len(lengths), max(cnt) + 1)).int()
    u = 0
    for b, c in enumerate(cnt):
        tab[b, :c] = perm[u : u + c]
        u += c
    G.write_kv_cache(k, v, kc, vc, tab, i32(cu), i32(lengths))
    ids = [b for b, n in enumerate(lengths) if n]
    at = [cu[b] + lengths[b] - 1 for b in ids]
    for split in (264, 6, 0):
        G.PROGRAMS = split
        oo = torch.full((len(ids), hq, d), float("nan")).half()
        ll = torch.full((hq, len(ids)), float("nan"))
        G.paged_attention(
            q[at],
            kc,
            vc,
            tab[ids].contiguous(),
            i32(list(range(len(ids) + 1))),
            i32([lengths[b] for b in ids]),
            1,
            max(lengths),
            sc,
            oo,
            ll,
        )
        print(page, split, (oo - o[at]).abs().max().item(), (ll - l[:, at]).abs().max().item())
    o2 = torch.full_like(q, float("nan"))
    l2 = torch.full((hq, T), float("nan"))
    G.paged_attention(q, kc, vc, tab, i32(cu), i32(lengths), max(lengths), max(lengths), sc, o2, l2)
    print("prefill", (o2 - o).abs().max().item(), (l2 - l).abs().max().item())
G.PROGRAMS = 264
dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
t = time.time()
G.attention_backward(q, k, v, o, l, do, i32(cu), max(lengths), sc, dq, dk, dv)
print("bwd", time.time() - t)
for b, n in enumerate(lengths):
    if n:
        s = slice(cu[b], cu[b + 1])
        x = [y[s].double().requires_grad_() for y in (q, k, v)]
        ro, _ = ref(*x, n, sc)
        g = torch.autograd.grad(ro, x, do[s].double())
        print(n, [((a[s] - c).abs().max() / c.abs().max()).item() for a, c in zip((dq, dk, dv), g)])
