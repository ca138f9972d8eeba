"""Float64 references of 16-bit problems and of whole heads; what an accuracy bound allows in a case."""

import numpy as np
import pytest
import torch

from kernelbraid import ops
from kernelbraid.audit.accuracy import relative_error
from kernelbraid.contract import HALF_ULP, AccuracyBound
from kernelbraid.ops import oracle
from kernelbraid.ops.logprob import reference as logprob
from kernelbraid.ops.problem import WHOLE_PROBLEM, ProblemShape


def drawn(name: str, kind: str = "normal", dtype: str = "bfloat16", rows=(5, 0, 30), **axes: int):
    operator = ops.get(name, "cuda" if dtype != "float32" else "cpu")
    shape = ProblemShape(tuple(axes.items()), rows, rows, kind, dtype)
    return operator, operator.draw(shape, np.random.default_rng(3))


@pytest.mark.parametrize("kind", ["normal", "non_finite"])
def test_a_head_in_pieces_is_the_same_reference(kind, monkeypatch):
    operator, problem = drawn("logprob", kind, width=64, vocabulary=1000)
    whole = operator.reference(problem)
    monkeypatch.setattr(logprob, "HUGE", 0)
    monkeypatch.setattr(logprob, "PIECE", 300)
    pieces = operator.reference(problem)
    assert whole.keys() == pieces.keys() and ("dweight", WHOLE_PROBLEM) in whole
    for key, value in whole.items():
        np.testing.assert_allclose(pieces[key], value, rtol=1e-6, atol=1e-9)


def test_tensors_of_arrays_keep_bits():
    problem = drawn("linear", width=1, in_features=17, out_features=33, bias=1)[1]
    array = problem.requests[0]["x"]
    assert torch.equal(oracle.tensor_of(array).float(), torch.from_numpy(array.astype(np.float32)))
    frozen = np.arange(5.0)
    frozen.flags.writeable = False
    assert oracle.tensor_of(frozen).tolist() == [0, 1, 2, 3, 4]


def test_references_stay_on_the_cpu_without_a_gpu():
    if not torch.cuda.is_available():
        assert oracle.device_for(drawn("swiglu", width=8)[1]) == "cpu"
    assert oracle.device_for(drawn("swiglu", dtype="float32", width=8)[1]) == "cpu"


def test_large_parameters_are_the_same_in_all_problems():
    first, second = (
        drawn("linear", kind, in_features=1024, out_features=1024, bias=1)[1].shared
        for kind in ("normal",) * 2
    )
    assert first["weight"] is second["weight"] and not first["weight"].flags.writeable
    assert first["bias"] is not second["bias"]
    saturated, cancelling = (
        drawn("linear", kind, in_features=1024, out_features=1024, bias=1)[1].shared
        for kind in ("saturated", "cancelling")
    )
    assert saturated["weight"] is first["weight"] and cancelling["weight"] is not first["weight"]


def test_half_ulps_are_those_of_rounding_once():
    numbers = torch.rand(1 << 20, dtype=torch.float64) + 1
    for dtype, half in HALF_ULP.items():
        error = ((numbers.to(getattr(torch, dtype)).double() - numbers) / numbers).abs().max()
        assert 0.99 * half < error <= half
    bound = AccuracyBound("out", 1.0, 1e-6, ("decode",), half_ulps=2.0)
    assert bound.least("bfloat16") == 2.0**-7 and bound.least("float32") == 1e-6


def test_errors_of_long_arrays_are_added_up_in_pieces(monkeypatch):
    rng = np.random.default_rng(0)
    exact = {("y", 0): rng.standard_normal((40, 30)), ("y", 1): np.array([np.nan, np.inf, 1.0])}
    rows = {("y", 0): exact["y", 0].astype(np.float32), ("y", 1): np.array([np.nan, np.inf, 1.5], np.float32)}
    whole = relative_error(rows, exact)
    monkeypatch.setattr("kernelbraid.audit.accuracy.PIECE", 7)
    assert relative_error(rows, exact) == pytest.approx(whole, rel=1e-12)
    rows["y", 1][1] = 1
    assert relative_error(rows, exact) == np.inf
