"""Verify and time gpu.py on a GPU: python check_gpu.py FOLDER [SECTION ...] [--probe FILE]; by default all sections.

Sections that only compare bits run side by side in processes of their own; timings run alone, afterwards. JSON goes to
FOLDER, a table to standard output. With --probe the decode times stand beside those of another split decode kernel.
"""

import argparse
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench, do_bench_cudagraph


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the JSON files go")
    parser.add_argument(
        "sections", nargs="*", help="such as bits:0, control, decode; without any, all of them"
    )
    parser.add_argument(
        "--probe", type=Path, help="a file whose Dc(q, k, v, length, ...) is timed beside decode"
    )
    parser.add_argument(
        "--beside-seconds", type=float, default=130, help="limit of the sections side by side"
    )
    parser.add_argument("--alone", action="store_true", help="run the one section named, in this process")
    parser.add_argument("--dry", action="store_true", help="call instead of timing, to compile")
    return parser.parse_args()


HERE = Path(__file__).resolve().parent
ARGUMENTS = arguments()
VARIANTS = tempfile.TemporaryDirectory()
DEVICE = "cuda"
START = time.time()
RESULT = {}


def load(edits=(), **constants):
    """gpu.py as a module, with constants or pieces of text replaced."""
    text = (HERE / "gpu.py").read_text()
    for name, value in constants.items():
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.M)
        assert count == 1, name
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    name = f"variant_{abs(hash(text)) % 10**12}"
    return module_of(name, text)


def module_of(name, text):
    path = Path(VARIANTS.name) / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def say(*words):
    print(f"[{time.time() - START:5.0f}s]", *words, flush=True)


def save(name):
    (ARGUMENTS.folder / f"{name}.json").write_text(json.dumps(RESULT, indent=1, default=str) + "\n")


def ints(t):
    return t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)


class Tally:
    def __init__(self):
        self.compared, self.unequal = 0, {}

    def same(self, name, a, b):
        d = int((ints(a) != ints(b)).sum())
        self.compared += a.numel()
        if d:
            self.unequal[name] = self.unequal.get(name, 0) + d
        return d


def draw(kind, *shape, dtype):
    x = torch.randn(*shape, device=DEVICE)
    if kind == "heavy":
        x = (x * torch.exp(torch.randn_like(x) * 2.5)).clamp(-3e4, 3e4)
    if kind == "cancel":
        x = x * torch.where(torch.rand_like(x) < 0.05, 100.0 if dtype == torch.float16 else 1e4, 1.0)
    if kind == "tiny":
        x = x * (1e-7 if dtype == torch.float16 else 1e-38)
    if kind == "zeros":
        x = x * (torch.rand_like(x) < 0.5).float() * torch.where(torch.rand_like(x) < 0.5, 1.0, -1.0)
    return x.to(dtype)


def offsets(lengths):
    return [0, *itertools.accumulate(lengths)]


def i32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def to_pages(module, k, v, lengths, page, generator, rows=None):
    """Scatter packed keys and values into shuffled pages through write_kv_cache; unused slots are NaN, unused ids wild."""
    counts = [-(-n // page) for n in lengths]
    total = sum(counts) + 3
    order = torch.randperm(total, generator=generator).tolist()
    k_cache = torch.full((total, page, *k.shape[1:]), float("nan"), device=DEVICE, dtype=k.dtype)
    v_cache = k_cache.clone()
    table = torch.randint(-(2**31), 2**31 - 1, (len(lengths), max(counts) + 2), generator=generator).to(
        torch.int32
    )
    used = 0
    for b, count in enumerate(counts):
        table[b, :count] = torch.tensor(order[used : used + count], dtype=torch.int32)
        used += count
    table = table.to(DEVICE)
    module.write_kv_cache(k, v, k_cache, v_cache, table, i32(offsets(lengths)), i32(lengths))
    # values at masked keys of the last page must be finite: zero them as an allocator would
    return k_cache, v_cache, table


def fresh(q):
    return torch.full_like(q, float("nan"), memory_format=torch.contiguous_format), torch.full(
        (q.shape[1], q.shape[0]), float("nan"), device=DEVICE
    )


LENGTHS = [1, 63, 64, 65, 0, 255, 256, 257, 300, 511, 513, 1023, 1025, 1537, 2049]
CASES = [
    (torch.bfloat16, (32, 8, 128)), (torch.float16, (32, 8, 128)), (torch.bfloat16, (9, 3, 64)),
    (torch.float16, (14, 2, 64)), (torch.bfloat16, (5, 5, 128)), (torch.bfloat16, (40, 1, 128)),
]  # fmt: skip


def compare_forward(
    G, other, third, fourth, dtype, heads, kind, tally, lengths=LENGTHS, quick=False, batch=True
):
    """Compare module G's packed forward with every other way to compute the same rows; `other` has other schedules."""
    hq, hk, d = heads
    cu, total, longest = offsets(lengths), sum(lengths), max(lengths)
    q, k, v = (
        draw(kind if x < 2 or kind != "cancel" else "randn", total, (hq, hk, hk)[x], d, dtype=dtype)
        for x in range(3)
    )
    scale, generator = d**-0.5, torch.Generator().manual_seed(1)
    base, lse = fresh(q)
    G.attention(q, k, v, i32(cu), longest, scale, base, lse)
    rows = [b for b, n in enumerate(lengths) if n]

    def check(name, o, l, where=None):
        tally.same(name, o, base if where is None else base[where])
        if l is not None:
            tally.same(name + "_lse", l, lse if where is None else lse[:, where])

    o, l = fresh(q)
    G.attention(q, k, v, i32(cu), longest, scale, o, l)
    check("rerun", o, l)
    o, l = fresh(q)
    other.attention(q, k, v, i32(cu), longest + 700, scale, o, l)
    check("schedule", o, l)
    # slices of one tensor: other strides, no bulk copies where the base is odd
    wide = torch.full((total, hq + 2 * hk + 1, d + 4), float("nan"), device=DEVICE, dtype=dtype)
    wide[:, :hq, :d], wide[:, hq : hq + hk, :d], wide[:, hq + hk : -1, :d] = q, k, v
    o, l = fresh(q)
    G.attention(
        wide[:, :hq, :d], wide[:, hq : hq + hk, :d], wide[:, hq + hk : -1, :d], i32(cu), longest, scale, o, l
    )
    check("strides", o, l)
    o, l = fresh(q)
    for b in rows:
        s = slice(cu[b], cu[b + 1])
        oo, ll = fresh(q[s])
        G.attention(q[s], k[s], v[s], i32([0, lengths[b]]), lengths[b], scale, oo, ll)
        o[s], l[:, s] = oo, ll
    check("packing", o, l)
    for page in (16, 64, 7) if quick else (1, 7, 16, 64, 256):
        kc, vc, table = to_pages(G, k, v, lengths, page, generator)
        vc = torch.where(torch.isnan(vc), torch.zeros_like(vc), vc) if kind == "never" else vc
        o, l = fresh(q)
        (G if page != 7 else other).paged_attention(
            q, kc, vc, table, i32(cu), i32(lengths), longest, longest, scale, o, l
        )
        check(f"page{page}", o, l)
        for module, most in ((third, 700), (other, 12), (fourth, 40)) if page in (16, 7) else ():
            if most < 100 and (quick or page == 7):
                continue
            o, l = fresh(q)
            done, pieces = [0] * len(lengths), torch.Generator().manual_seed(page)
            for _ in range(1000):
                piece = [
                    min(n - s, int(torch.randint(1, most, (1,), generator=pieces)) + (most < 100) * 0)
                    for n, s in zip(lengths, done)
                ]
                if most < 100 and done[-1] == 0:  # short pieces from a long prefix on
                    piece = [n - n // 8 if n > 64 else n for n in lengths]
                if not any(piece):
                    break
                index = torch.cat(
                    [torch.arange(cu[b] + done[b], cu[b] + done[b] + piece[b]) for b in range(len(lengths))]
                ).to(DEVICE)
                done = [s + p for s, p in zip(done, piece)]
                oo, ll = fresh(q[index])
                module.paged_attention(
                    q[index].contiguous(),
                    kc,
                    vc,
                    table,
                    i32(offsets(piece)),
                    i32(done),
                    max(piece),
                    max(done),
                    scale,
                    oo,
                    ll,
                )
                o[index], l[:, index] = oo, ll
            check(f"chunked{page}_{most}", o, l)
        for back in (0, 1, 63, 64, 65, 500):
            ids = [b for b in rows if lengths[b] > back]
            at = torch.tensor([cu[b] + lengths[b] - 1 - back for b in ids], device=DEVICE)
            lens = i32([lengths[b] - back for b in ids])
            for name, module in (("split", third), ("walk", other), ("parts", fourth)):
                oo, ll = fresh(q[at])
                module.paged_attention(
                    q[at],
                    kc,
                    vc,
                    table[ids].contiguous(),
                    i32(range(len(ids) + 1)),
                    lens,
                    1,
                    int(lens.max()),
                    scale,
                    oo,
                    ll,
                )
                check(f"decode{page}_{name}", oo, ll, at)
        if page == 16 and batch:  # every row of the packed batch as a decode row: batch in the thousands
            for count in (33, 127, 500, 1024):
                at = torch.randperm(total, generator=generator)[:count].to(DEVICE)
                owner = torch.bucketize(at.cpu(), torch.tensor(cu[1:]), right=True).tolist()
                lens = i32([int(a) - cu[b] + 1 for a, b in zip(at.tolist(), owner)])
                oo, ll = fresh(q[at])
                G.paged_attention(
                    q[at],
                    kc,
                    vc,
                    table[owner].contiguous(),
                    i32(range(count + 1)),
                    lens,
                    1,
                    int(lens.max()),
                    scale,
                    oo,
                    ll,
                )
                check(f"batch{count}", oo, ll, at)
    o, _ = fresh(q)
    G.attention(q, k, v, i32(cu), longest, scale, o, None)
    check("no_lse", o, None)
    return int(torch.isnan(base).sum())


OTHER = dict(TILE=128, PACK_ROWS=16, PROGRAMS=0, STAGES=2, HEADS_TOGETHER_KEYS=1)


def section_bits(case):
    dtype, heads = CASES[case]
    G, other = load(), load(**OTHER)
    third, fourth = (load(PROGRAMS=n, WALK_PROGRAMS=100000, PACK_ROWS=32) for n in (100000, 300))
    for kind in ("randn", "heavy", "cancel", "tiny", "zeros"):
        torch.manual_seed(case)
        tally = Tally()
        nan = compare_forward(
            G, other, third, fourth, dtype, heads, kind, tally, quick=case > 1 or kind != "randn"
        )
        RESULT[f"{kind}"] = dict(
            dtype=str(dtype), heads=heads, nan=nan, compared=tally.compared, unequal=tally.unequal
        )
        say(
            "bits",
            str(dtype)[6:],
            heads,
            kind,
            "nan",
            nan,
            "compared",
            tally.compared,
            "unequal",
            tally.unequal,
        )
        save(f"bits{case}")


def section_long():
    """Contexts to 131072: rows of the packed forward against decode and a chunk."""
    G, tally = load(), Tally()
    for n in (8191, 8193, 40000, 131072):
        q, k, v = (draw("randn", n, h, 128, dtype=torch.bfloat16) for h in (4, 1, 1))
        base, lse = fresh(q)
        G.attention(q, k, v, i32([0, n]), n, 128**-0.5, base, lse)
        kc, vc, table = to_pages(G, k, v, [n], 16, torch.Generator().manual_seed(0))
        for first in (n - 1, n - 17, n - 500, n // 2):
            stop = min(n, first + (1 if first == n - 1 else 300))
            oo, ll = fresh(q[first:stop])
            G.paged_attention(
                q[first:stop],
                kc,
                vc,
                table,
                i32([0, stop - first]),
                i32([stop]),
                stop - first,
                stop,
                128**-0.5,
                oo,
                ll,
            )
            tally.same(f"long{n}", oo, base[first:stop])
            tally.same(f"long{n}_lse", ll, lse[:, first:stop])
    RESULT["long"] = dict(compared=tally.compared, unequal=tally.unequal)
    say("long", RESULT["long"])
    save("long")


FUSED = [("enable_fp_fusion=False", "enable_fp_fusion=True")]
MERGE = [
    (
        "A = tl.fma(acc, tl.broadcast_to(a1[None, :], A.shape), A * a0[None, :])",
        "A = acc * a1[None, :] + A * a0[None, :]",
    ),
    (
        "A = tl.fma(acc, tl.broadcast_to(a1[:, None], A.shape), A * a0[:, None])",
        "A = acc * a1[:, None] + A * a0[:, None]",
    ),
    ("tl.fma(l, a1, L * a0), A", "l * a1 + L * a0, A"),
]
SCALED = [
    ("s = tl.dot(b_k, b_q)\n", "s = tl.dot(b_k, b_q) * scale\n"),
    ("s = tl.dot(b_q, b_k.T)\n            if MASK:\n                s = tl.where(o_n[None, :] <= b_pos", "s = tl.dot(b_q, b_k.T) * scale\n            if MASK:\n                s = tl.where(o_n[None, :] <= b_pos"),
    ("tl.max(s, 0) * scale", "tl.max(s, 0)"), ("tl.max(s, 1) * scale", "tl.max(s, 1)"),
    ("x = tl.fma(s, tl.zeros((BN, BM), tl.float32) + scale, tl.broadcast_to(-ms[None, :], (BN, BM)))", "x = s - ms[None, :]"),
    ("x = tl.fma(s, tl.zeros((BM, BN), tl.float32) + scale, tl.broadcast_to(-ms[:, None], (BM, BN)))", "x = s - ms[:, None]"),
]  # fmt: skip


def section_control():
    """Negative controls: default fusion with formulas left to the compiler must break bits; the same formulas without it must not."""
    for name, edits in (("merge", MERGE), ("scaled", SCALED), ("both", MERGE + SCALED)):
        for fused in (True, False) if name == "both" else (True,):
            G, other = (load(edits + (FUSED if fused else []), **c) for c in ({}, OTHER))
            third = other
            for kind in ("randn", "cancel"):
                torch.manual_seed(0)
                tally = Tally()
                compare_forward(
                    G,
                    other,
                    third,
                    third,
                    torch.bfloat16,
                    (32, 8, 128),
                    kind,
                    tally,
                    lengths=[64, 300, 1025, 1537],
                    quick=True,
                    batch=False,
                )
                RESULT[f"{name} fused={fused} {kind}"] = dict(compared=tally.compared, unequal=tally.unequal)
                say(
                    "CONTROL",
                    name,
                    "fused",
                    fused,
                    kind,
                    "compared",
                    tally.compared,
                    "unequal",
                    tally.unequal,
                )
                save("control")


def gradients(G, q, k, v, do, lengths, scale, longest=None):
    cu, longest = i32(offsets(lengths)), longest or max(lengths)
    o, l = fresh(q)
    G.attention(q, k, v, cu, longest, scale, o, l)
    grads = [torch.full_like(x, float("nan"), memory_format=torch.contiguous_format) for x in (q, k, v)]
    G.attention_backward(q, k, v, o, l, do, cu, longest, scale, *grads)
    return grads


DQ_OTHER = [
    (
        'return {"dq": (128, 128, 8, 2), "dkv": (64 if depth == 64 else 32, 128, 8, 3)}',
        'return {"dq": (64, 64, 4, 2), "dkv": (32, 64, 4, 2)}',
    )
]


def section_gradient():
    G, other = load(), load(DQ_OTHER, HEADS_TOGETHER_KEYS=1)
    for dtype, heads in CASES[:5]:
        for kind in ("randn", "heavy", "cancel", "zeros"):
            torch.manual_seed(3)
            hq, hk, d = heads
            tally, lengths = Tally(), [1, 63, 64, 65, 0, 127, 129, 500, 1025]
            total, cu, scale = sum(lengths), offsets(lengths), d**-0.5
            q, k, v, do = (draw(kind, total, h, d, dtype=dtype) for h in (hq, hk, hk, hq))
            base = gradients(G, q, k, v, do, lengths, scale)
            for name, found in (
                ("rerun", gradients(G, q, k, v, do, lengths, scale)),
                ("longest", gradients(G, q, k, v, do, lengths, scale, 3000)),
                ("tiles", gradients(other, q, k, v, do, lengths, scale)),
            ):
                for a, b, x in zip(found, base, ("dq", "dk", "dv")):
                    tally.same(f"{name}_{x}", a, b)
            for b, n in enumerate(lengths):
                if n:
                    s = slice(cu[b], cu[b + 1])
                    for a, bb, x in zip(
                        gradients(G, q[s], k[s], v[s], do[s], [n], scale), base, ("dq", "dk", "dv")
                    ):
                        tally.same(f"packing_{x}", a, bb[s])
            wide = torch.full((total, hq + hk, d + 8), float("nan"), device=DEVICE, dtype=dtype)
            wide[:, :hq, :d], wide[:, hq:, :d] = do, k
            for a, bb, x in zip(
                gradients(G, q, wide[:, hq:, :d], v, wide[:, :hq, :d], lengths, scale),
                base,
                ("dq", "dk", "dv"),
            ):
                tally.same(f"strides_{x}", a, bb)
            nan = [int(torch.isnan(x).sum()) for x in base]
            RESULT[f"{dtype} {heads} {kind}"] = dict(nan=nan, compared=tally.compared, unequal=tally.unequal)
            say(
                "gradient",
                str(dtype)[6:],
                heads,
                kind,
                "nan",
                nan,
                "compared",
                tally.compared,
                "unequal",
                tally.unequal,
            )
    save("gradient")


def distance(a, b):
    return float((a.double() - b).norm() / b.norm())


def section_accuracy():
    G = load()
    for dtype, (hq, hk, d), n in (
        (torch.bfloat16, (32, 8, 128), 1024), (torch.float16, (8, 2, 128), 1024), (torch.bfloat16, (9, 3, 64), 2048), (torch.bfloat16, (4, 1, 128), 8192),
    ):  # fmt: skip
        for kind in ("randn", "sharp"):
            torch.manual_seed(5)
            q, k, v, do = (draw("randn", n, h, d, dtype=dtype) for h in (hq, hk, hk, hq))
            q = q * 4 if kind == "sharp" else q
            wide = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v)]
            grad = do.transpose(0, 1)[None]

            def peer(tensors, backend, out_grad):
                with sdpa_kernel(backend):
                    o = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
                return o.detach(), torch.autograd.grad(o, tensors, out_grad)

            exact = [x.detach().double().requires_grad_() for x in wide]
            s = (exact[0] @ exact[1].repeat_interleave(hq // hk, 1).mT) * d**-0.5
            s = s.masked_fill(torch.ones(n, n, device=DEVICE, dtype=torch.bool).triu(1), -math.inf)
            l64 = s.logsumexp(-1).detach()[0]
            o64 = s.softmax(-1) @ exact[2].repeat_interleave(hq // hk, 1)
            g64 = torch.autograd.grad(o64, exact, grad.double())
            del s
            o, l = fresh(q)
            G.attention(q, k, v, i32([0, n]), n, d**-0.5, o, l)
            mine = gradients(G, q, k, v, do, [n], d**-0.5)
            row = {
                "o": distance(o.transpose(0, 1), o64[0].detach()),
                "lse_max": float((l.double() - l64).abs().max()),
            }
            row |= {x: distance(a.transpose(0, 1), b[0]) for x, a, b in zip(("dq", "dk", "dv"), mine, g64)}
            for name, backend in (
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("flash", SDPBackend.FLASH_ATTENTION),
            ):
                try:
                    po, pg = peer(wide, backend, grad)
                    row |= {f"o_{name}": distance(po[0], o64[0].detach())} | {
                        f"{x}_{name}": distance(a[0], b[0]) for x, a, b in zip(("dq", "dk", "dv"), pg, g64)
                    }
                except Exception as error:
                    row[name] = str(error)[:80]
            RESULT[f"{dtype} {hq, hk, d} {n} {kind}"] = row
            say(
                "accuracy",
                str(dtype)[6:],
                (hq, hk, d),
                n,
                kind,
                {a: float(f"{b:.3g}") if isinstance(b, float) else b for a, b in row.items()},
            )
    save("accuracy")


def clock(call, graph=True):
    if ARGUMENTS.dry:
        call()
        torch.cuda.synchronize()
        return 1.0
    if graph:
        return do_bench_cudagraph(call, rep=25, return_mode="median")
    return do_bench(call, warmup=10, rep=50, return_mode="median")


def guarded(call, graph=True):
    try:
        return clock(call, graph)
    except Exception as error:
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error)[:90]}"


def probe():
    """The functions of the file given with --probe, without what it runs from its first seed on; or None."""
    if ARGUMENTS.probe is None:
        return None
    return module_of("probe", ARGUMENTS.probe.read_text().split("torch.manual_seed(")[0])


H, HK, D = 32, 8, 128


def decode_call(G, batch, length, page, tables=None):
    q = torch.randn(batch, H, D, device=DEVICE).bfloat16()
    count = -(-length // page)
    kc = torch.randn(batch * count + 1, page, HK, D, device=DEVICE).bfloat16()
    vc = torch.randn_like(kc)
    table = torch.randperm(batch * count, device=DEVICE).to(torch.int32).view(batch, count)
    cu, lens, o = i32(range(batch + 1)), i32([length] * batch), torch.empty_like(q)
    return lambda: G.paged_attention(q, kc, vc, table, cu, lens, 1, length, D**-0.5, o, None)


def section_decode(variants=None):
    peer = probe()
    modules = {name: load(**constants) for name, constants in (variants or {"": {}}).items()}
    for batch, length in itertools.product((1, 4, 8, 16), (128, 1024, 4096, 8192)):
        row = {}
        if peer:
            q = torch.randn(batch, H, D, device=DEVICE).bfloat16()
            k = torch.randn(batch, HK, length, D, device=DEVICE).bfloat16()
            v = torch.randn_like(k)
            calls = (lambda c=c: peer.Dc(q, k, v, length, 16, 64, c, 4, 3, True, True) for c in (512, 1024))
            row["probe"] = min(clock(call) for call in calls)
        for name, module in modules.items():
            for page in (16, 64):
                row[f"p{page}{name}"] = guarded(decode_call(module, batch, length, page))
        times = {n: t for n, t in row.items() if isinstance(t, float)}
        microseconds = {n: row[n] if n not in times else round(times[n] * 1e3, 2) for n in row}
        ratio = {n: round(t / row["probe"], 3) for n, t in times.items() if peer and n != "probe"}
        RESULT[f"decode {batch}x{length}"] = row | ({"ratio": ratio} if peer else {})
        say("decode", batch, length, microseconds, ratio)
    save("decode")


def section_decode_large(variants=None):
    modules = {name: load(**constants) for name, constants in (variants or {"": {}}).items()}
    for batch, length in (
        (32, 2048),
        (64, 2048),
        (128, 2048),
        (256, 1024),
        (512, 512),
        (1, 32768),
        (1, 131072),
        (8, 32768),
    ):
        moved = batch * length * HK * D * 4
        row = {
            n + f"p{p}": guarded(decode_call(m, batch, length, p)) for n, m in modules.items() for p in (16,)
        }
        RESULT[f"large {batch}x{length}"] = row
        say(
            "large",
            batch,
            length,
            {
                n: (round(t * 1e3, 1), f"{moved / t / 1e9:.2f} TB/s") if isinstance(t, float) else t
                for n, t in row.items()
            },
        )
    save("decode_large")


def section_prefill(variants=None, lengths=(1024, 4096, 16384), peers=True, pages=(0, 16, 64)):
    modules = {
        name: load(edits, **constants) for name, (edits, constants) in (variants or {"": ((), {})}).items()
    }
    for n in lengths:
        q, k, v = (torch.randn(n, h, D, device=DEVICE).bfloat16() for h in (H, HK, HK))
        o, l, cu, lens = torch.empty_like(q), torch.empty(H, n, device=DEVICE), i32([0, n]), i32([n])
        flops, row = 4 * H * n * n * D / 2, {}
        for name, module in modules.items():
            for page in pages:
                if page:
                    kc, vc, table = to_pages(module, k, v, [n], page, torch.Generator().manual_seed(0))
                    row[f"page{page}{name}"] = guarded(
                        lambda: module.paged_attention(q, kc, vc, table, cu, lens, n, n, D**-0.5, o, l)
                    )
                else:
                    row[f"packed{name}"] = guarded(lambda: module.attention(q, k, v, cu, n, D**-0.5, o, l))
        if peers:
            b = [x.transpose(0, 1)[None] for x in (q, k, v)]
            for name, backend in (
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("flash2", SDPBackend.FLASH_ATTENTION),
            ):
                with sdpa_kernel(backend):
                    row[name] = guarded(
                        lambda: F.scaled_dot_product_attention(*b, is_causal=True, enable_gqa=True)
                    )
        RESULT[f"prefill {n}"] = row
        say(
            "prefill",
            n,
            {x: (round(t, 4), round(flops / t / 1e9)) if isinstance(t, float) else t for x, t in row.items()},
        )
    save("prefill")


def section_packed():
    """Ragged packed sequences, forward and backward."""
    G = load()
    for lengths in (
        [4096] * 4,
        [512 + 173 * i % 1500 for i in range(16)],
        [200 + 977 * i % 3000 for i in range(32)],
    ):
        total, cu, longest = sum(lengths), i32(offsets(lengths)), max(lengths)
        q, k, v, do = (torch.randn(total, h, D, device=DEVICE).bfloat16() for h in (H, HK, HK, H))
        o, l = torch.empty_like(q), torch.empty(H, total, device=DEVICE)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        flops = sum(2 * H * D * n * n for n in lengths)
        forward = guarded(lambda: G.attention(q, k, v, cu, longest, D**-0.5, o, l))
        back = guarded(lambda: G.attention_backward(q, k, v, o, l, do, cu, longest, D**-0.5, *grads))
        row = dict(forward=forward, backward=back)
        row["flash2"] = guarded(
            lambda: torch.ops.aten._flash_attention_forward(
                q, k, v, cu, cu, longest, longest, 0.0, True, False
            )[0]
        )
        RESULT[f"packed {len(lengths)} {total}"] = row
        say(
            "packed",
            len(lengths),
            total,
            {
                x: (round(t, 4), round(flops * (2.5 if x == "backward" else 1) / t / 1e9))
                if isinstance(t, float)
                else t
                for x, t in row.items()
            },
        )
    save("packed")


def section_backward(variants=None, lengths=(1024, 4096, 8192, 16384), peers=True):
    modules = {name: load(edits) for name, edits in (variants or {"": ()}).items()}
    for n in lengths:
        q, k, v, do = (torch.randn(n, h, D, device=DEVICE).bfloat16() for h in (H, HK, HK, H))
        o, l, cu = torch.empty_like(q), torch.empty(H, n, device=DEVICE), i32([0, n])
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        flops, row = 10 * H * n * n * D / 2, {}
        for name, module in modules.items():
            module.attention(q, k, v, cu, n, D**-0.5, o, l)
            row[f"all{name}"] = guarded(
                lambda: module.attention_backward(q, k, v, o, l, do, cu, n, D**-0.5, dq, dk, dv)
            )
            row[f"dq{name}"] = guarded(
                lambda: module.attention_backward(q, k, v, o, l, do, cu, n, D**-0.5, dq, None, None)
            )
        if peers:
            b = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v)]
            g = do.transpose(0, 1)[None]
            for name, backend in (
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("flash2", SDPBackend.FLASH_ATTENTION),
            ):
                try:
                    with sdpa_kernel(backend):
                        out = F.scaled_dot_product_attention(*b, is_causal=True, enable_gqa=True)
                        row[name] = guarded(
                            lambda: torch.autograd.grad(out, b, g, retain_graph=True), graph=False
                        )
                except Exception as error:
                    row[name] = str(error)[:80]
        RESULT[f"backward {n}"] = row
        say(
            "backward",
            n,
            {  # dQ alone is three of the five products
                x: (round(t, 3), round(flops * (0.6 if x.startswith("dq") else 1) / t / 1e9))
                if isinstance(t, float)
                else t
                for x, t in row.items()
            },
        )
    save("backward")


def one(section):
    name, *numbers = section.split(":")
    globals()[f"section_{name}"](*[int(n) for n in numbers])


BESIDE = [f"bits:{i}" for i in range(len(CASES))] + ["long", "control", "gradient", "accuracy"]
ALONE = ["decode", "prefill", "backward", "packed", "decode_large"]


def start(section, folder, dry):
    """A process that runs one section, and the file of its output."""
    log = Path(folder) / f"{section.replace(':', '')}.log"
    command = [sys.executable, __file__, str(ARGUMENTS.folder), section, "--alone"]
    command += ["--dry"] if dry else []
    command += ["--probe", str(ARGUMENTS.probe)] if ARGUMENTS.probe else []
    with log.open("w") as output:
        return log, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def main():
    ARGUMENTS.folder.mkdir(parents=True, exist_ok=True)
    asked = ARGUMENTS.sections or BESIDE + ALONE
    if ARGUMENTS.alone:
        return one(asked[0])
    alone = [s for s in asked if s in ALONE]
    beside = [s for s in asked if s not in ALONE]
    with tempfile.TemporaryDirectory() as folder:
        # timings run once here too, to compile
        jobs = [(section, *start(section, folder, section in alone)) for section in beside + alone]
        limit = time.time() + ARGUMENTS.beside_seconds
        for section, log, job in jobs:
            try:
                code = job.wait(max(1, limit - time.time()))
            except subprocess.TimeoutExpired:
                job.kill()
                code = "stopped at the time limit"
            if section in beside or code:
                print(f"--- {section}: {code}\n" + log.read_text()[-2500:], flush=True)
    say("side by side done")
    for section in alone:
        try:
            one(section)
        except Exception:
            traceback.print_exc()
        RESULT.clear()


if __name__ == "__main__":
    main()
