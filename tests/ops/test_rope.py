"""The public rotary embedding: tables, values, gradients, registration, refusals."""

import math

import numpy as np
import pytest
import torch
from tests.ops.public import check_differentiable, gradients, same

from kernelbraid import Llama3Scaling, rope, rope_tables
from kernelbraid.ops.rope import cpu, reference, registered
from kernelbraid.ops.rope.tables import scaling_of

TOKENS, HEADS, KV, D, ROWS = 37, 4, 2, 24, 500


def inputs(tokens=TOKENS, heads=HEADS, kv=KV, d=D, rows=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, n, d, generator=generator) for n in (heads, kv))
    positions = torch.randint(rows, (tokens,), generator=generator, dtype=torch.int32)
    return q, k, positions, *rope_tables(d, rows, 10000.0)


def together(q, k, positions, cos, sin):
    """Both results as one tensor; tables get no gradient."""
    return torch.cat(rope(q, k, positions, cos.detach(), sin.detach()), 1)


def exact(q, k, positions, cos, sin):
    return torch.cat(reference.rope(q, k, positions, cos, sin), 1)


def test_values_are_the_formulas():
    q, k, positions, cos, sin = inputs()
    best = exact(q.double(), k.double(), positions, cos.double(), sin.double())
    assert (together(q, k, positions, cos, sin) - best).norm() < 1e-7 * best.norm()


def test_gradients_are_the_formulas():
    q, k, *about = inputs()
    tables = [t.double() for t in about[1:]]
    ours = gradients(lambda q, k: together(q, k, *about), (q, k))
    best = gradients(lambda q, k: exact(q, k, about[0], *tables), (q.double(), k.double()))
    for one, other in zip(ours, best, strict=True):
        assert (one - other).norm() < 1e-7 * other.norm()


def test_the_reference_passes_gradcheck():
    q, k, positions, *tables = inputs(3, 2, 1, 6)
    tables = [t.double() for t in tables]
    leaves = tuple(t.double().requires_grad_() for t in (q, k))
    assert torch.autograd.gradcheck(lambda q, k: exact(q, k, positions, *tables), leaves)


def test_bits_are_those_of_the_written_out_steps():
    q, _, positions, cos, sin = inputs()
    turned, _ = rope(q, q, positions, cos, sin)
    rows = positions.long()
    a, b = (x.numpy() for x in q.chunk(2, -1))
    c, s = (table[rows][:, None].numpy() for table in (cos, sin))
    # A product of float32 is exact in float64; so is this sum, but for cases that float32 does not see here.
    wide = [x.astype(np.float64) for x in (a, b, s)]
    first = ((a * c) - wide[1] * wide[2]).astype(np.float32)
    second = ((b * c) + wide[0] * wide[2]).astype(np.float32)
    assert same([turned], [torch.from_numpy(np.concatenate((first, second), -1))])


def test_position_zero_changes_nothing_and_rotations_keep_lengths():
    q, k, positions, cos, sin = inputs()
    assert same(rope(q, k, torch.zeros_like(positions), cos, sin), (q, k))
    assert torch.allclose(rope(q, k, positions, cos, sin)[0].norm(dim=-1), q.norm(dim=-1))


def test_bits_are_the_same_however_it_is_called():
    q, k, *about = inputs()
    check_differentiable(lambda q, k: torch.cat(rope(q, k, *about), 1), (q, k))


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_alone_may_be_used(used):
    q, k, *about = inputs()
    leaves = [t.requires_grad_() for t in (q, k)]
    rope(*leaves, *about)[used].sum().backward()
    assert leaves[used].grad.any() and not leaves[1 - used].grad.any()


@pytest.mark.parametrize("needed", [[True, True], [True, False], [False, True]])
def test_registration(needed):
    q, k, *about = inputs()
    leaves = [t.requires_grad_(n) for t, n in zip((q, k), needed, strict=True)]
    torch.library.opcheck(registered.rope, (*leaves, *about))
    given = (*about, torch.randn(q.shape), torch.randn(k.shape), needed)
    torch.library.opcheck(registered.rope_backward, given)


def test_parts_of_a_joint_projection():
    q, k, *about = inputs()
    joint = torch.cat((q, k), 1).flatten(1)
    parts = joint[:, : HEADS * D].view(-1, HEADS, D), joint[:, -KV * D :].view(-1, KV, D)
    wide = [torch.cat((table, torch.full_like(table, torch.nan)), 1)[:, : D // 2] for table in about[1:]]
    found = rope(*parts, about[0], *wide)
    assert same(found, rope(q, k, *about)) and all(t.is_contiguous() for t in found)
    assert [t.shape for t in rope(q[:0], k[:0], about[0][:0], *about[1:])] == [(0, HEADS, D), (0, KV, D)]


def test_far_positions():
    q, k, _, _, _ = inputs(2)
    cos, sin = rope_tables(D, 131072, 1e6)
    positions = torch.tensor([131071, 65536], dtype=torch.int32)
    best = exact(q.double(), k.double(), positions, cos.double(), sin.double())
    assert (together(q, k, positions, cos, sin) - best).norm() < 1e-7 * best.norm()


def test_kernels_give_nan_for_positions_outside_the_tables():
    q, k, positions, cos, sin = (t.numpy() for t in inputs())
    wild = positions.copy()
    wild[[3, 5, 8]] = ROWS, -1, -(2**31)
    outs = [np.zeros_like(x) for x in (q, k)]
    cpu.rope(q, k, wild, cos, sin, *outs)
    known = [np.zeros_like(x) for x in (q, k)]
    cpu.rope(q, k, positions, cos, sin, *known)
    for out, wanted in zip(outs, known, strict=True):
        wanted[[3, 5, 8]] = np.nan
        assert np.array_equal(out.view(np.int32), wanted.view(np.int32))


# ---- Tables ----


def test_tables_are_the_formula_rounded_once():
    cos, sin = rope_tables(64, 3000, 500000.0)
    assert cos.shape == sin.shape == (3000, 32) and cos.dtype == torch.float32
    for position, i in ((0, 0), (1, 0), (2999, 0), (2999, 31), (1234, 7)):
        angle = position * 500000.0 ** (-2 * i / 64)
        assert cos[position, i] == np.float32(math.cos(angle))
        assert sin[position, i] == np.float32(math.sin(angle))
    longer = rope_tables(64, 4000, 500000.0)
    assert same((cos, sin), [table[:3000] for table in longer])


def test_llama_3_scaling():
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    frequencies = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    wavelengths, scaled = 2 * np.pi / frequencies, scaling(frequencies)
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert short.any() and long.any() and not (short | long).all()
    assert np.array_equal(scaled[short], frequencies[short])
    assert np.array_equal(scaled[long], frequencies[long] / 8)
    between = ~(short | long)
    share = (8192 / wavelengths - 1) / 3
    assert np.allclose(scaled, np.where(between, (1 - share) * frequencies / 8 + share * frequencies, scaled))
    cos, _ = rope_tables(128, 10, 500000.0, scaling)
    assert np.array_equal(cos[9].numpy(), np.cos(9 * scaled).astype(np.float32))


def test_scaling_is_read_from_a_config():
    stated = {"rope_type": "llama3", "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4}
    wanted = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert scaling_of({**stated, "original_max_position_embeddings": 8192}) == wanted
    assert scaling_of(None) is None and scaling_of({"rope_type": "default", "rope_theta": 1e6}) is None
    with pytest.raises(ValueError, match="rope_type must be default or llama3, got 'yarn'"):
        scaling_of({"type": "yarn"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((65, 10, 1e4), "head_dim must be even"),
        ((512, 10, 1e4), "head_dim must be an int between 2 and 256"),
        ((64, 0, 1e4), "max_positions must be between 1 and 131072"),
        ((64, 200000, 1e4), "max_positions must be between 1 and 131072"),
        ((64, 1.5, 1e4), "max_positions must be an int"),
        ((64, 10, 0.5), "theta must be a finite number above 1"),
    ],
)
def test_tables_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        rope_tables(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.5, 1, 4, 8192), "factor must be at least 1"),
        ((8, 4, 1, 8192), "low_freq_factor must be above 0 and below high_freq_factor"),
        ((8, 1, 4, 0), "original_max_position must be at least 1"),
    ],
)
def test_scaling_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Llama3Scaling(*arguments)


# ---- Refusals ----

Q, K, POSITIONS, COS, SIN = inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Q.double(), K, POSITIONS, COS, SIN), "q must be torch.float32"),
        ((Q, K.half(), POSITIONS, COS, SIN), "k must be torch.float32"),
        ((Q, K[:5], POSITIONS, COS, SIN), r"k must have shape \[37, any, 24\] to fit q"),
        ((Q[..., :23], K[..., :23], POSITIONS, COS, SIN), "q: head_dim must be even, got 23"),
        ((Q, K, POSITIONS.long(), COS, SIN), "positions must be torch.int32, got torch.int64"),
        ((Q, K, POSITIONS[:5], COS, SIN), r"positions must have shape \[37\] to fit q"),
        ((Q, K, POSITIONS, COS.double(), SIN), "cos must be torch.float32"),
        ((Q, K, POSITIONS, COS, SIN[:, :5]), r"sin must have shape \[any, 12\] to fit q"),
        ((Q, K, POSITIONS, COS, SIN[:5]), r"sin must have shape \[500, 12\] to fit cos"),
        ((Q, K, POSITIONS, COS[:3], SIN[:3]), "must lie between 0 and 2, the last row of cos and sin"),
        ((Q, K, POSITIONS - 1000, COS, SIN), r"positions\[0\] must lie between 0 and 499"),
        ((Q, K, POSITIONS, COS.clone().requires_grad_(), SIN), "cos requires grad"),
        ((Q.to("meta"), K, POSITIONS, COS, SIN), "q is on meta"),
        ((Q, K, [0] * TOKENS, COS, SIN), "positions must be a torch tensor"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        rope(*arguments)


def test_what_the_contract_excludes_is_refused_by_name():
    with pytest.raises(ValueError, match="interleaved is not part of contract rope/1"):
        rope(Q, K, POSITIONS, COS, SIN, interleaved=True)


def test_second_derivatives_are_refused():
    q, k, *about = inputs()
    q.requires_grad_()
    weights = torch.ones(TOKENS, HEADS + KV, D, requires_grad=True)
    (dq,) = torch.autograd.grad((together(q, k, *about) * weights).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dq.sum().backward()
