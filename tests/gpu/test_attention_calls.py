"""The public functions on a GPU: the same bits in every form, gradients, registration, refusals."""

from itertools import pairwise

import pytest
import torch

from kernelbraid import attention, check_metadata, paged_attention, write_kv_cache
from kernelbraid.ops.attention import registered
from kernelbraid.ops.attention.reference import attention as exact_attention

HEADS, KV, D, SIZE = 8, 2, 128, 16
LENGTHS = (300, 0, 70, 1, 129)
TOTAL = sum(LENGTHS)
DTYPES = (torch.bfloat16, torch.float16)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def offsets(lengths=LENGTHS):
    return ints([sum(lengths[:b]) for b in range(len(lengths) + 1)])


def inputs(dtype=torch.bfloat16, requires_grad=False, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = [
        torch.randn(TOTAL, h, D, generator=generator, device="cuda").to(dtype) for h in (HEADS, KV, KV, HEADS)
    ]
    return [x.requires_grad_(requires_grad) for x in drawn[:3]], drawn[3]


def bounds():
    return {"cu_seqlens": offsets(), "max_seqlen": max(LENGTHS)}


def where():
    """Pages of all sequences in any order, every token new."""
    columns = [-(-n // SIZE) for n in LENGTHS]
    order = torch.randperm(sum(columns), generator=torch.Generator().manual_seed(1)).tolist()
    table = [[order.pop() if c < n else -5 for c in range(max(columns))] for n in columns]
    return {"page_table": ints(table), "cu_seqlens_q": offsets(), "seqlens_k": ints(LENGTHS)}


def cached(k, v, about):
    caches = torch.full((2, 40, SIZE, KV, D), float("nan"), dtype=k.dtype, device="cuda")
    write_kv_cache(k, v, *caches, **about)
    return caches


LIMITS = {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS)}


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged_rows_equal_packed_rows(dtype):
    (q, k, v), _ = inputs(dtype)
    out, lse = attention(q, k, v, **bounds(), return_lse=True)
    about = where()
    caches = cached(k, v, about)
    assert same(paged_attention(q, *caches, **about, **LIMITS, return_lse=True), (out, lse))
    last = [sum(LENGTHS[: b + 1]) - 1 for b, n in enumerate(LENGTHS) if n]
    alone = {"page_table": about["page_table"][[0, 2, 3, 4]], "seqlens_k": ints([n for n in LENGTHS if n])}
    token = paged_attention(
        q[last], *caches, **alone, cu_seqlens_q=ints(range(5)), max_seqlen_q=1, max_seqlen_k=300
    )
    assert same([token], [out[last]])
    assert out.dtype == dtype and lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype):
    tensors, dout = inputs(dtype, requires_grad=True)
    out = attention(*tensors, **bounds())
    found = torch.autograd.grad(out, tensors, dout)
    starts = offsets().tolist()
    for start, stop in pairwise(starts):
        if start == stop:
            continue
        rows = slice(start, stop)
        alone = [x.detach()[rows].clone().requires_grad_() for x in tensors]
        own = attention(*alone, cu_seqlens=ints([0, stop - start]), max_seqlen=stop - start)
        assert same(torch.autograd.grad(own, alone, dout[rows]), [g[rows] for g in found])
        exact = [x.detach()[rows].double().cpu().requires_grad_() for x in tensors]
        wanted = torch.autograd.grad(exact_attention(*exact, D**-0.5)[0], exact, dout[rows].double().cpu())
        for ours, best in zip(found, wanted, strict=True):
            if stop - start > 1 or ours is found[2]:
                assert (ours[rows].cpu() - best).norm() < 1e-2 * best.norm()


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
def test_any_inputs_may_require_gradients(wanted):
    tensors, dout = inputs(requires_grad=True)
    whole = torch.autograd.grad(attention(*tensors, **bounds()), tensors, dout)
    some = [x.detach().requires_grad_(bool(want)) for x, want in zip(tensors, wanted, strict=True)]
    attention(*some, **bounds()).backward(dout)
    pairs = [(x.grad, g) for x, g in zip(some, whole, strict=True) if x.grad is not None]
    assert len(pairs) == 1 and same(*zip(*pairs, strict=True))


def test_compiled_calls_have_the_same_bits():
    tensors, dout = inputs(requires_grad=True)
    about = bounds()
    compiled = torch.compile(lambda *x: attention(*x, **about), fullgraph=True, backend="aot_eager")
    out, expected = compiled(*tensors), attention(*tensors, **about)
    assert same([out], [expected])
    assert same(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, tensors, dout))


def test_registration():
    tensors, dout = inputs(requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (*tensors, offsets(), 300, None)
    torch.library.opcheck(torch.ops.kernelbraid.attention.default, arguments, test_utils=checks)
    plain = [x.detach() for x in tensors]
    out, lse = registered.attend(*plain, offsets(), 300, None, True)
    arguments = (*plain, out, lse, dout, offsets(), 300, None, [True, False, True])
    torch.library.opcheck(torch.ops.kernelbraid.attention_backward.default, arguments, test_utils=checks)


def test_nothing_waits_for_the_gpu():
    def step():
        out = attention(*tensors, **packed)
        out.backward(dout)
        write_kv_cache(k, v, *caches, **about)
        with torch.no_grad():
            paged_attention(q, *caches, **about, **LIMITS)

    tensors, dout = inputs(requires_grad=True)
    q, k, v = (x.detach() for x in tensors)
    packed, about = bounds(), where()
    caches = cached(k, v, about)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graphs_replay_with_other_lengths():
    (q, k, v), _ = inputs()
    about, lengths = where(), [n if n < 300 else 200 for n in LENGTHS]
    caches = cached(k, v, about)
    rows, decode = q[:5].contiguous(), {**about, "cu_seqlens_q": ints(range(6))}
    decode["seqlens_k"] = ints([max(1, n) for n in LENGTHS])
    decode["page_table"] = about["page_table"].clamp(min=0)
    call = {"max_seqlen_q": 1, "max_seqlen_k": 512, "out": torch.empty_like(rows)}
    paged_attention(rows, *caches, **decode, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(rows, *caches, **decode, **call)
    decode["seqlens_k"].copy_(ints([max(1, n) for n in lengths]))
    graph.replay()
    expected = paged_attention(rows, *caches, **decode, max_seqlen_q=1, max_seqlen_k=512)
    assert same([call["out"]], [expected])


REFUSED = {
    "float32": (
        lambda x: {"q": x["q"].float()},
        r"q must be torch.bfloat16 or torch.float16, got torch.float32",
    ),
    "two dtypes": (lambda x: {"k": x["k"].half()}, r"k must be torch.bfloat16, got torch.float16"),
    "values": (lambda x: {"v": x["v"].half()}, r"v must be torch.bfloat16, got torch.float16"),
    "two devices": (lambda x: {"k": x["k"].cpu()}, r"k is on cpu, others on cuda:0"),
    "offsets on the host": (lambda x: {"cu_seqlens": x["cu_seqlens"].cpu()}, r"cu_seqlens is on cpu"),
    "scale": (lambda x: {"softmax_scale": -0.1}, r"softmax_scale must be above 0 and at most"),
    "no scale": (lambda x: {"softmax_scale": 0.0}, r"softmax_scale must be above 0 and at most"),
    "bound": (lambda x: {"max_seqlen": 99}, r"max_seqlen must be between 100, the mean of 500 rows over 5"),
    "head_dim": (lambda x: {"q": x["q"][..., :96]}, r"head_dim must be one of \(64, 128\), got 96"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    (q, k, v), _ = inputs()
    given = {"q": q, "k": k, "v": v, **bounds()}
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attention(**{**given, **changes(given)})


def test_metadata_is_checked_on_the_host():
    about = {"tokens": TOTAL, "pages": 40, "page_size": SIZE, "max_seqlen_q": 300, "max_seqlen_k": 300}
    check_metadata(**where(), **about)
    with pytest.raises(ValueError, match=r"page_table\[\d, \d+\] is in use and must lie between 0 and 9"):
        check_metadata(**where(), **{**about, "pages": 10})
