"""The public RMS norm: values, gradients, registration, refusals."""

import pytest
import torch
from tests.ops.public import check_differentiable, gradients

from kernelbraid import rms_norm
from kernelbraid.ops.rms_norm import reference, registered

TOKENS, WIDTH = 37, 100


def inputs(tokens=TOKENS, width=WIDTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=generator), torch.rand(width, generator=generator) + 0.5


def test_values_and_gradients_are_the_formulas():
    x, weight = inputs()
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert (rms_norm(x, weight, eps=1e-5) - exact).norm() < 2e-7 * exact.norm()
    found = gradients(lambda *t: rms_norm(*t, eps=1e-5), (x, weight))
    wanted = gradients(lambda *t: reference.rms_norm(*t, 1e-5), (x.double(), weight.double()))
    for ours, best in zip(found, wanted, strict=True):
        assert (ours - best).norm() < 5e-7 * best.norm()


def test_the_reference_passes_gradcheck():
    x, weight = (t.double().requires_grad_() for t in inputs(5, 7))
    assert torch.autograd.gradcheck(lambda x, w: reference.rms_norm(x, w, 1e-3), (x, weight))


def test_bits_are_the_same_however_it_is_called():
    check_differentiable(rms_norm, inputs())


@pytest.mark.parametrize("needed", [[True, True], [True, False], [False, True]])
def test_registration(needed):
    x, weight = inputs()
    tensors = (x.requires_grad_(needed[0]), weight.requires_grad_(needed[1]))
    torch.library.opcheck(registered.rms_norm, (*tensors, 1e-6))
    given = (x.detach(), weight.detach(), torch.randn(TOKENS, WIDTH), 1e-6, needed)
    torch.library.opcheck(registered.rms_norm_backward, given)


def test_any_leading_shape_and_row_stride():
    x, weight = inputs(24)
    out = rms_norm(x, weight)
    assert torch.equal(rms_norm(x.view(2, 3, 4, WIDTH), weight), out.view(2, 3, 4, WIDTH))
    wide = torch.full((24, 2 * WIDTH), torch.nan)
    wide[:, :WIDTH] = x
    assert torch.equal(rms_norm(wide[:, :WIDTH], weight), out)
    assert rms_norm(x[:0], weight).shape == (0, WIDTH)
    assert torch.equal(rms_norm(x[3], weight), out[3])


X, WEIGHT = inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.double(), WEIGHT), "x must be torch.float32"),
        ((X.t(), WEIGHT), "x's last dimension must have stride 1"),
        ((X, WEIGHT[:7]), r"weight must have shape \[100\] to fit x"),
        ((X, WEIGHT.half()), "weight must be torch.float32"),
        ((X.to("meta"), WEIGHT), "x is on meta"),
        ((X.to_sparse(), WEIGHT), "x must be a dense tensor"),
        (("x", WEIGHT), "x must be a torch tensor"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(*arguments)


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan"), 2.0, "1e-6"])
def test_eps_is_checked(eps):
    with pytest.raises(ValueError, match="eps must be"):
        rms_norm(X, WEIGHT, eps=eps)


def test_what_the_contract_excludes_is_refused_by_name():
    with pytest.raises(ValueError, match="weight_offset is not part of contract rms_norm/1"):
        rms_norm(X, WEIGHT, weight_offset=1.0)


def test_second_derivatives_are_refused():
    x, weight = (t.requires_grad_() for t in inputs())
    (dx,) = torch.autograd.grad(rms_norm(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()
