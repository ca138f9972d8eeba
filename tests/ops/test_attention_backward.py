"""The CPU's gradients: near float64, and bits that depend on a row's own sequence alone."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.controls.broken import GOOD, edited
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernelbraid.ops.attention import cpu
from kernelbraid.ops.attention.inputs import draw
from kernelbraid.ops.attention.reference import attention as exact_attention
from kernelbraid.ops.problem import INPUT_KINDS, ProblemShape

NAMES = ("dq", "dk", "dv")
LENGTHS = (300, 65, 0, 1, 129)
HEADS = (6, 2, 64)
CANONICAL_NAN = 0x7FC00000


def drawn(kind="normal", lengths=LENGTHS, heads=HEADS, seed=3):
    """One packed batch: q, k, v, dout, offsets and the scale."""
    axes = tuple(zip(("query_heads", "kv_heads", "head_dim"), heads, strict=True))
    problem = draw(ProblemShape(axes, lengths, lengths, kind), np.random.default_rng(seed))
    arrays = [np.concatenate([request[name] for request in problem.requests]) for name in "qkv"]
    dout = np.random.default_rng(seed + 1).standard_normal(arrays[0].shape, np.float32)
    offsets = np.cumsum((0, *lengths), dtype=np.int32)
    return (*arrays, dout), offsets, problem.scalars["softmax_scale"]


def gradients(arrays, offsets, scale, implementation=cpu, wanted=(True, True, True), longest=None):
    q, k, v, dout = arrays
    longest = int(np.diff(offsets).max()) if longest is None else longest
    out, lse = np.empty_like(q), np.empty((q.shape[1], q.shape[0]), np.float32)
    cpu.attention(q, k, v, offsets, longest, scale, out, lse)
    found = [np.full_like(x, np.nan) if want else None for x, want in zip((q, k, v), wanted, strict=True)]
    implementation.attention_backward(q, k, v, out, lse, dout, offsets, longest, scale, *found)
    return found


def unequal(one, other):
    return sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in zip(one, other, strict=True))


def alone(arrays, offsets, b):
    rows = slice(offsets[b], offsets[b + 1])
    return [array[rows].copy() for array in arrays], np.array([0, rows.stop - rows.start], np.int32)


def compiled(text, name):
    module = ModuleType(name)
    sys.modules[name] = module  # Numba looks it up
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def by_autograd(arrays, offsets, scale, dtype, function):
    pieces = []
    for start, stop in pairwise(offsets):
        if start < stop:
            *inputs, dout = (torch.from_numpy(array[start:stop]).to(dtype) for array in arrays)
            inputs = [tensor.requires_grad_() for tensor in inputs]
            found = torch.autograd.grad(function(*inputs, scale), inputs, dout)
            pieces.append([gradient.numpy() for gradient in found])
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


def float64(q, k, v, scale):
    return exact_attention(q, k, v, scale)[0]


def torch_math(q, k, v, scale):
    batch = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(
            *batch, is_causal=True, scale=scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def distance(found, exact):
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


KINDS_AND_HEADS = [
    (kind, heads)
    for kind in INPUT_KINDS
    for heads in ((9, 3, 64), (8, 2, 128), (2, 2, 64))
    if kind != "non_finite" and (kind != "captured" or heads == (9, 3, 64))
]


@pytest.mark.parametrize(("kind", "heads"), KINDS_AND_HEADS, ids=str)
def test_as_near_to_float64_as_torch(kind, heads):
    given = drawn(kind, (1, 130, 600), heads)
    exact = by_autograd(*given, torch.float64, float64)
    theirs = by_autograd(*given, torch.float32, torch_math)
    for name, ours, best, peer in zip(NAMES, gradients(*given), exact, theirs, strict=True):
        assert distance(ours, best) <= 2 * distance(peer, best), name


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_packed_equals_alone(kind):
    arrays, offsets, scale = drawn(kind, heads=(9, 3, 64))
    whole = gradients(arrays, offsets, scale)
    for b in range(len(LENGTHS)):
        rows = slice(offsets[b], offsets[b + 1])
        if LENGTHS[b]:
            own = gradients(*alone(arrays, offsets, b), scale)
            assert unequal(own, [gradient[rows] for gradient in whole]) == 0
    assert not any((gradient.view(np.uint32) == 0x80000000).any() for gradient in whole)


def test_neighbours_and_bounds_do_not_matter():
    arrays, offsets, scale = drawn()
    whole = gradients(arrays, offsets, scale)
    assert unequal(gradients(arrays, offsets, scale), whole) == 0
    assert unequal(gradients(arrays, offsets, scale, longest=131072), whole) == 0
    spoiled = [array.copy() for array in arrays]
    for array in spoiled:
        array[: offsets[1]] = np.nan
    others = gradients(spoiled, offsets, scale)
    assert unequal([x[offsets[1] :] for x in others], [x[offsets[1] :] for x in whole]) == 0
    assert all(np.isnan(x[: offsets[1]]).all() for x in others)


@pytest.mark.parametrize("span", [0, 64, 128, 256])
@pytest.mark.parametrize("threads", [1, 5])
def test_tasks_and_threads_do_not_matter(monkeypatch, span, threads):
    given = drawn()
    whole = gradients(*given)
    schedule = cpu.schedule
    monkeypatch.setattr(cpu, "schedule", lambda axes, knobs: {**schedule(axes, knobs), "span": span})
    monkeypatch.setattr(cpu, "thread_count", lambda tasks, multiplications: threads)
    assert unequal(gradients(*given), whole) == 0


def test_strides_do_not_matter():
    arrays, offsets, scale = drawn()
    whole = gradients(arrays, offsets, scale)
    q, k, v, dout = arrays
    wide = np.concatenate([k, q, v], axis=1)
    views = wide[:, 2:8], wide[:, :2], wide[:, 8:], dout.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    assert not any(view.flags.c_contiguous for view in views)
    room = [np.full((len(x), 2 * x.shape[1], x.shape[2]), 7, np.float32) for x in (q, k, v)]
    out, lse = np.empty_like(q), np.empty((len(q), q.shape[1]), np.float32).T
    cpu.attention(*views[:3], offsets, 300, scale, out, lse)
    written = [x[:, ::2] for x in room]
    cpu.attention_backward(*views[:3], out, lse, views[3], offsets, 300, scale, *written)
    assert unequal([x.copy() for x in written], whole) == 0
    assert all((x[:, 1::2] == 7).all() for x in room)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("lengths", [LENGTHS, (40,) * 20], ids=["few", "many"])
def test_gradients_left_out_change_nothing(wanted, lengths):
    given = drawn(lengths=lengths)
    whole = gradients(*given)
    some = gradients(*given, wanted=wanted)
    assert [x is not None for x in some] == [bool(want) for want in wanted]
    pairs = [(a, b) for a, b in zip(some, whole, strict=True) if a is not None]
    assert unequal(*zip(*pairs, strict=True)) == 0


def test_one_token_has_no_gradient_of_its_score():
    dq, dk, dv = gradients(*drawn(lengths=(1,) * 50))
    assert (dq.view(np.uint32) == 0).all() and (dk.view(np.uint32) == 0).all()
    assert dv.any()


def test_non_finite_numbers_reach_the_pairs_that_see_them():
    arrays, offsets, scale = drawn(lengths=(200,))
    k = arrays[1]
    clean = gradients(arrays, offsets, scale)
    k[150, 1, 3] = np.nan
    dq, dk, dv = gradients(arrays, offsets, scale)
    group = slice(3, 6)  # of KV head 1
    assert np.isnan(dq[150:, group]).all() and unequal([dq[:150]], [clean[0][:150]]) == 0
    assert unequal([dq[:, :3], dk[:, :1]], [clean[0][:, :3], clean[1][:, :1]]) == 0
    # Rows from 150 on see that key, and earlier keys get something from such rows.
    assert np.isnan(dk[:, 1]).all() and np.isnan(dv[:, 1]).all() and np.isfinite(dv[:, 0]).all()
    nans = np.concatenate([x[np.isnan(x)] for x in (dq, dk, dv)])
    assert (nans.view(np.uint32) == CANONICAL_NAN).all()


def test_threads_do_not_mix_up_calls():
    given = [drawn(seed=seed, lengths=(200, 40)) for seed in range(3)]
    expected = [gradients(*each) for each in given]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda i: gradients(*given[i % 3]), range(18)))
    assert all(unequal(found, expected[i % 3]) == 0 for i, found in enumerate(together))


def test_an_independent_implementation_agrees():
    given = drawn("heavy_tailed")
    assert unequal(gradients(*given, implementation=compiled(GOOD, "good")), gradients(*given)) == 0


SIZE = "    size, turn = GRADIENT_BLOCK, 0\n"


def test_blocks_that_follow_the_batch_are_caught():
    edits = ((SIZE, "    size, turn = (32 if max_seqlen > 100 else GRADIENT_BLOCK), 0\n"),)
    broken = compiled(edited(GOOD, edits), "following")
    arrays, offsets, scale = drawn(lengths=(300, 50))
    whole = gradients(arrays, offsets, scale, broken)
    assert unequal(gradients(arrays, offsets, scale, broken), whole) == 0
    rows = slice(offsets[1], offsets[2])
    own = gradients(*alone(arrays, offsets, 1), scale, broken)
    assert unequal(own, [gradient[rows] for gradient in whole]) > 0


def test_heads_in_the_order_of_arrival_are_caught():
    text = (
        edited(GOOD, ((SIZE, "    size, turn = GRADIENT_BLOCK, next(CALLS)\n"),))
        + "\nCALLS = itertools.count()\n"
    )
    broken = compiled(text, "turning")
    given = drawn()
    dq, dk, dv = gradients(*given, implementation=broken)
    again = gradients(*given, implementation=broken)
    assert unequal([dq], [again[0]]) == 0
    assert unequal([dk, dv], again[1:]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{"KEY_BLOCK": 256, "ROWS": 2}, {"KEY_BLOCK": 16, "TASKS": 64}], ids=str)
def test_knobs_of_the_forward_do_not_matter(tmp_path, knobs):
    path = tmp_path / "other.py"
    text = Path(cpu.__file__).read_text()
    for name, value in knobs.items():
        text = edited(text, ((f"\n{name} = {getattr(cpu, name)}\n", f"\n{name} = {value}\n"),))
    path.write_text(text)
    spec = spec_from_file_location(f"other_{knobs['KEY_BLOCK']}", path)
    other = module_from_spec(spec)
    sys.modules[spec.name] = other
    spec.loader.exec_module(other)
    given = drawn(heads=(8, 2, 128))
    assert unequal(gradients(*given, implementation=other), gradients(*given)) == 0
