import numpy as np
import pytest
import torch
from tests.ops.programs import Plain

from kernelbraid.ops.attention import reference as module
from kernelbraid.ops.attention.inputs import draw
from kernelbraid.ops.attention.reference import attention, reference, vendor
from kernelbraid.ops.problem import ProblemShape

AXES = (("query_heads", 6), ("kv_heads", 2), ("head_dim", 64))


def test_reference_is_the_formula():
    shape = ProblemShape(AXES, (37, 1, 0, 20), (5, 1, 0, 20))
    problem = draw(shape, np.random.default_rng(2))
    exact = reference(problem)
    for b, request in enumerate(problem.requests):
        out = np.empty((shape.rows[b], 6, 64))
        lse = np.empty((6, shape.rows[b]))
        Plain._rows(*(request[n] for n in ("q", "k", "v")), problem.scalars["softmax_scale"], out, lse)
        assert exact["out", b].dtype == np.float64
        np.testing.assert_allclose(exact["out", b], out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(exact["lse", b], lse.T, rtol=1e-12, atol=1e-13)


def test_gradients():
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, 3, dtype=torch.float64, requires_grad=True)
        for n, heads in ((3, 4), (5, 2), (5, 2))
    )
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, 0.7), (q, k, v))


def test_chunks_of_rows_do_not_matter(monkeypatch):
    problem = draw(ProblemShape(AXES, (40,), (33,)), np.random.default_rng(2))
    whole = reference(problem)
    monkeypatch.setattr(module, "SCORE_ELEMENTS", 6 * 40 * 4)
    for key, rows in reference(problem).items():
        np.testing.assert_allclose(rows, whole[key], rtol=1e-13, atol=1e-14)
    grad_q = torch.from_numpy(problem.requests[0]["q"]).double().requires_grad_()
    k, v = (torch.from_numpy(problem.requests[0][n]).double() for n in ("k", "v"))
    out, _ = attention(grad_q, k, v, 0.1)
    out.sum().backward()
    assert grad_q.grad is not None and torch.isfinite(grad_q.grad).all()


def test_rows_before_a_spoiled_key_are_exact_and_those_after_are_nan():
    problem = draw(ProblemShape(AXES, (20,), (20,)), np.random.default_rng(2))
    clean = reference(problem)
    problem.requests[0]["v"][12, 1, 3] = np.nan
    spoiled = reference(problem)
    np.testing.assert_array_equal(spoiled["out", 0][:12], clean["out", 0][:12])
    np.testing.assert_array_equal(spoiled["out", 0][:, :3], clean["out", 0][:, :3])
    assert np.isnan(spoiled["out", 0][12:, 3:]).all()
    np.testing.assert_array_equal(spoiled["lse", 0], clean["lse", 0])
    problem.requests[0]["k"][15, 0, 0] = np.inf
    spoiled = reference(problem)
    assert np.isnan(spoiled["lse", 0][15:, :3]).all() and np.isfinite(spoiled["lse", 0][15:, 3:]).all()


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_vendor_is_close_in_float32(rows):
    problem = draw(ProblemShape(AXES, (40,), (rows,)), np.random.default_rng(2))
    exact = reference(problem)
    for key, value in vendor(problem).items():
        assert value.dtype == np.float32
        assert np.linalg.norm(value - exact[key]) < 1e-6 * np.linalg.norm(exact[key])
