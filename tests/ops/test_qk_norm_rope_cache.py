"""The public fused step: the bits of the three operators, what the cache keeps, registration, refusals."""

import pytest
import torch
from tests.ops.public import same

from kernelbraid import paged_attention, qk_norm, qk_norm_rope_cache, rope, rope_tables, write_kv_cache
from kernelbraid.ops.qk_norm_rope_cache import reference, registered

HEADS, KV, D, SIZE, ROWS = 6, 2, 64, 16, 400
NEW, HELD = (5, 0, 1, 40), (25, 7, 300, 40)
TOKENS, PAGES = sum(NEW), 40


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def inputs(seed=0, heads=HEADS, kv=KV, d=D):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(TOKENS, n, d, generator=generator) for n in (heads, kv, kv))
    weights = [torch.rand(d, generator=generator) + 0.5 for _ in range(2)]
    positions = torch.randint(ROWS, (TOKENS,), generator=generator, dtype=torch.int32)
    return q, k, v, (positions, *rope_tables(d, ROWS, 1e6)), weights


def where(size=SIZE):
    """Pages in any order, with entries of none behind them."""
    columns = [-(-n // size) for n in HELD]
    order = torch.randperm(sum(columns), generator=torch.Generator().manual_seed(1)).tolist()
    table = [[order.pop() if c < n else -5 for c in range(max(columns))] for n in columns]
    offsets = ints([sum(NEW[:b]) for b in range(len(NEW) + 1)])
    return {"page_table": ints(table), "cu_seqlens_q": offsets, "seqlens_k": ints(HELD)}


def caches(pages=PAGES, size=SIZE, kv=KV, d=D):
    """Two caches full of NaNs with payloads."""
    drawn = torch.randint(1, 1 << 22, (2, pages, size, kv, d), dtype=torch.int32)
    return [cache.clone() for cache in (drawn | 0x7FC00000).view(torch.float32)]


def one_by_one(q, k, v, about, weights, kept, places):
    """The three operators one after the other."""
    if weights:
        q, k = qk_norm(q, k, *weights, eps=1e-5)
    q, k = rope(q, k, *about)
    write_kv_cache(k, v, *kept, **places)
    return q


def fused(q, k, v, about, weights, kept, places):
    named = dict(zip(("q_weight", "k_weight"), weights, strict=False))
    return qk_norm_rope_cache(q, k, v, *about, *kept, **places, **named, eps=1e-5)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv", "d", "size"), [(6, 2, 64, 16), (4, 4, 128, 1), (9, 3, 64, 256)])
def test_bits_are_those_of_the_three_operators(normed, heads, kv, d, size):
    q, k, v, about, weights = inputs(0, heads, kv, d)
    q[3, 0, 5], k[7, 1, 9], v[2, 0, 0] = torch.nan, torch.inf, torch.nan
    q[9] *= 0
    places = where(size)
    ours = caches(sum(-(-n // size) for n in HELD) + 3, size, kv, d)
    theirs = [cache.clone() for cache in ours]
    weights = weights if normed else ()
    found = fused(q, k, v, about, weights, ours, places)
    wanted = one_by_one(q, k, v, about, weights, theirs, places)
    # The caches are compared whole: slots of no new token keep what they hold.
    assert same([found, *ours], [wanted, *theirs])


def test_values_are_the_formulas():
    q, k, v, about, weights = inputs()
    kept, places = caches(), where()
    found = fused(q, k, v, about, weights, kept, places)
    best = reference.heads(
        *(t.double() for t in (q, weights[0])), about[0], *(t.double() for t in about[1:]), 1e-5
    )
    assert (found - best).norm() < 2e-7 * best.norm()


def test_attention_reads_what_was_written():
    q, k, v, about, weights = inputs()
    places = where()
    results = []
    for step in (fused, one_by_one):
        kept = [torch.zeros(PAGES, SIZE, KV, D) for _ in range(2)]
        queries = step(q, k, v, about, weights, kept, places)
        results.append(paged_attention(queries, *kept, **places, max_seqlen_q=40, max_seqlen_k=300))
    assert same(results[:1], results[1:])


def test_parts_of_a_joint_projection():
    q, k, v, about, weights = inputs()
    joint = torch.cat((q, k, v), 1).flatten(1).view(TOKENS, HEADS + 2 * KV, D)
    parts = joint.split((HEADS, KV, KV), 1)
    assert not parts[0].is_contiguous()
    ours, theirs = caches(), caches()
    theirs = [cache.copy_(other) for cache, other in zip(theirs, ours, strict=True)]
    found = fused(*parts, about, weights, ours, where())
    assert same([found, *ours], [fused(q, k, v, about, weights, theirs, where()), *theirs])
    assert found.is_contiguous()


def test_no_tokens():
    q, k, v, about, weights = inputs()
    places = {"page_table": ints([[0]]), "cu_seqlens_q": ints([0, 0]), "seqlens_k": ints([3])}
    kept = caches()
    before = [cache.clone() for cache in kept]
    found = fused(q[:0], k[:0], v[:0], (about[0][:0], *about[1:]), weights, kept, places)
    assert found.shape == (0, HEADS, D) and same(kept, before)


def test_registration_and_compilation():
    q, k, v, about, weights = inputs()
    places = where()
    # opcheck compares what was written, and a NaN is no number's equal.
    kept = [torch.zeros(PAGES, SIZE, KV, D) for _ in range(2)]
    arguments = (q, k, v, *about, *kept, *places.values(), *weights, 1e-5)
    torch.library.opcheck(registered.qk_norm_rope_cache, arguments)
    eager = fused(q, k, v, about, weights, kept, places)
    again = [torch.zeros(PAGES, SIZE, KV, D) for _ in range(2)]
    torch.compiler.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    assert same([eager, *kept], [compiled(q, k, v, about, weights, again, places), *again])


Q, K, V, ABOUT, WEIGHTS = inputs()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q.double()}, "q must be torch.float32"),
        ({"k": K.half()}, "k must be torch.float32"),
        ({"k": K[:5]}, r"k must have shape \[46, any, 64\] to fit q"),
        ({"v": V[..., :32]}, r"v must have shape \[46, 2, 64\] to fit k|head_dim must be one of"),
        ({"v": V[:, :1]}, r"v must have shape \[46, 2, 64\] to fit k"),
        ({"positions": ABOUT[0] + ROWS}, "must lie between 0 and 399, the last row of cos and sin"),
        ({"q_weight": None}, "q_weight and k_weight must be given together"),
        ({"k_weight": WEIGHTS[1][:5]}, r"k_weight must have shape \[64\] to fit q"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"page_table": ints([[-5] * 30] * 4)}, r"page_table\[0, 0\] is in use and must lie between"),
        ({"page_table": ints([[0] * 30] * 4)}, "the same place in page 0"),
        ({"cu_seqlens_q": ints([0, 1, 2, 3, 4])}, "cu_seqlens_q must rise from 0 to the 46 packed rows"),
        ({"k_cache": Q}, "k_cache must have 4 dimensions"),
        ({"v_cache": torch.zeros(PAGES, SIZE, KV, D).to(torch.float8_e4m3fn)}, "excludes fp8_cache"),
        ({"q": Q.clone().requires_grad_()}, "q requires grad, and qk_norm_rope_cache has no gradients"),
        ({"k_weight": WEIGHTS[1].clone().requires_grad_()}, "k_weight requires grad"),
        ({"layer_norm": True}, "layer_norm is not part of contract qk_norm_rope_cache/1"),
        ({"interleaved": True}, "interleaved is not part of contract qk_norm_rope_cache/1"),
        ({"sin": None}, "sin must be a torch tensor"),
    ],
)
def test_refusals(changes, message):
    kept = dict(zip(("k_cache", "v_cache"), caches(), strict=True))
    arguments = {"q": Q, "k": K, "v": V, **dict(zip(("positions", "cos", "sin"), ABOUT, strict=True)), **kept}
    arguments |= {**where(), "q_weight": WEIGHTS[0], "k_weight": WEIGHTS[1], **changes}
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_cache(**arguments)


def test_grad_is_not_refused_where_none_is_recorded():
    with torch.no_grad():
        found = fused(Q.clone().requires_grad_(), K, V, ABOUT, WEIGHTS, caches(), where())
    assert not found.requires_grad
    assert same([found], [fused(Q, K, V, ABOUT, WEIGHTS, caches(), where())])


def test_autograd_notices_the_write():
    kept = [torch.zeros(PAGES, SIZE, KV, D) for _ in range(2)]
    before = kept[0]._version
    fused(Q, K, V, ABOUT, WEIGHTS, kept, where())
    assert kept[0]._version > before
