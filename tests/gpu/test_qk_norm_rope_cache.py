"""The rollout's fused step on a GPU: the bits of the operators that it fuses, and what the cache keeps."""

import pytest
import torch

from kernelbraid import qk_norm, qk_norm_rope_cache, rope, rope_tables, write_kv_cache

ROWS, SIZE = 4096, 16
NEW, HELD = (300, 0, 1, 40, 1), (300, 7, 900, 60, 1)
TOKENS = sum(NEW)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def inputs(heads, kv, d, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    q, k, v = (torch.randn(TOKENS, n, d, **options).to(dtype) for n in (heads, kv, kv))
    weights = [(torch.rand(d, **options) + 0.5).to(dtype) for _ in range(2)]
    positions = torch.randint(ROWS, (TOKENS,), dtype=torch.int32, **options)
    return q, k, v, (positions, *rope_tables(d, ROWS, 1e6, device="cuda")), weights


def where():
    """Pages in any order, with entries of none behind them."""
    columns = [-(-n // SIZE) for n in HELD]
    order = torch.randperm(sum(columns), generator=torch.Generator().manual_seed(1)).tolist()
    table = [[order.pop() if c < n else -5 for c in range(max(columns))] for n in columns]
    offsets = ints([sum(NEW[:b]) for b in range(len(NEW) + 1)])
    return {"page_table": ints(table), "cu_seqlens_q": offsets, "seqlens_k": ints(HELD)}


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(
        torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)) for a, b in pairs
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv", "d"), [(32, 8, 128), (9, 3, 64), (14, 2, 64), (5, 1, 128)])
def test_bits_are_those_of_the_three_operators(dtype, normed, heads, kv, d):
    q, k, v, about, weights = inputs(heads, kv, d, dtype)
    q[3, 0, 5], k[7, 0, 9], v[2, 0, 0] = torch.nan, torch.inf, torch.nan
    about[0][5], about[0][11] = -3, ROWS + 1  # outside the tables: NaN, in both ways
    places = where()
    pages = sum(-(-n // SIZE) for n in HELD) + 3
    drawn = torch.randint(1, 64, (2, pages, SIZE, kv, d), dtype=torch.int16, device="cuda")
    ours = [(each | 0x7FC0).view(dtype).clone() for each in drawn]
    theirs = [cache.clone() for cache in ours]
    named = dict(zip(("q_weight", "k_weight"), weights, strict=True)) if normed else {}
    found = qk_norm_rope_cache(q, k, v, *about, *ours, **places, **named)
    if normed:
        q, k = qk_norm(q, k, *weights)
    q, k = rope(q, k, *about)
    write_kv_cache(k, v, *theirs, **places)
    assert same([found, *ours], [q, *theirs])
    assert found[5].isnan().all() and found[11].isnan().all()


def test_a_page_outside_the_cache_is_not_written():
    q, k, v, about, _ = inputs(9, 3, 64, torch.bfloat16)
    places = where()
    places["page_table"] = torch.full_like(places["page_table"], 1 << 30)
    kept = [torch.ones(4, SIZE, 3, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    qk_norm_rope_cache(q, k, v, *about, *kept, **places)
    assert all(bool((cache == 1).all()) for cache in kept)
