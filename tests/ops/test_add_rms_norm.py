"""The public residual add and RMS norm: values, gradients, registration, refusals."""

import pytest
import torch
from tests.ops.public import check_differentiable, gradients, same

from kernelbraid import add_rms_norm, rms_norm
from kernelbraid.ops.add_rms_norm import reference, registered

TOKENS, WIDTH = 37, 100


def inputs(tokens=TOKENS, width=WIDTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    return x, residual, torch.rand(width, generator=generator) + 0.5


def together(*tensors):
    """Both results as one tensor."""
    return torch.cat(add_rms_norm(*tensors, eps=1e-5))


def exact(*tensors):
    return torch.cat(reference.add_rms_norm(*tensors, 1e-5, torch.float64))


def test_values_and_gradients_are_the_formulas():
    tensors = inputs()
    best = [t.double() for t in tensors]
    assert (together(*tensors) - exact(*best)).norm() < 2e-7 * exact(*best).norm()
    for ours, wanted in zip(gradients(together, tensors), gradients(exact, best), strict=True):
        assert (ours - wanted).norm() < 5e-7 * wanted.norm()


def test_the_norm_has_the_bits_of_rms_norm_on_the_rounded_sum():
    x, residual, weight = inputs(200, 576)
    out, residual_out = add_rms_norm(x, residual, weight)
    assert same([residual_out, out], [x + residual, rms_norm(residual_out, weight)])


def test_the_reference_passes_gradcheck():
    tensors = tuple(t.double().requires_grad_() for t in inputs(5, 7))
    assert torch.autograd.gradcheck(exact, tensors)


def test_the_reference_rounds_the_sum():
    x, residual, weight = (t.double() for t in inputs())
    _, total = reference.add_rms_norm(x, residual, weight, 1e-6, torch.bfloat16)
    assert torch.equal(total, (x + residual).bfloat16().double())


def test_bits_are_the_same_however_it_is_called():
    check_differentiable(together, inputs())


def test_the_norm_alone_may_be_used():
    tensors = inputs()
    alone = gradients(lambda *t: add_rms_norm(*t)[0], tensors)
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, residual_out = add_rms_norm(*leaves)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    assert same(alone, torch.autograd.grad((out, residual_out), leaves, (dout, torch.zeros_like(out))))


def test_the_sum_alone_may_be_used():
    leaves = [t.requires_grad_() for t in inputs()]
    add_rms_norm(*leaves)[1].sum().backward()
    assert same([leaves[0].grad, leaves[1].grad], [torch.ones(TOKENS, WIDTH)] * 2)


@pytest.mark.parametrize("needed", [[True, True, True], [True, False, False], [False, True, True]])
def test_registration(needed):
    x, residual, weight = (t.requires_grad_(n) for t, n in zip(inputs(), needed, strict=True))
    torch.library.opcheck(registered.add_rms_norm, (x, residual, weight, 1e-6))
    dout = torch.randn(TOKENS, WIDTH)
    for others in (None, torch.randn(TOKENS, WIDTH)):
        given = (x.detach(), weight.detach(), dout, others, 1e-6, [needed[0], needed[2]])
        torch.library.opcheck(registered.add_rms_norm_backward, given)


def test_any_leading_shape_and_row_stride():
    x, residual, weight = inputs(24)
    found = add_rms_norm(x, residual, weight)
    shape = (2, 3, 4, WIDTH)
    assert same(add_rms_norm(x.view(shape), residual.view(shape), weight), [t.view(shape) for t in found])
    wide = torch.full((24, 2 * WIDTH), torch.nan)
    wide[:, :WIDTH] = x
    assert same(add_rms_norm(wide[:, :WIDTH], residual, weight), found)
    assert same(add_rms_norm(residual, wide[:, :WIDTH], weight), found)
    assert [t.shape for t in add_rms_norm(x[:0], residual[:0], weight)] == [(0, WIDTH)] * 2
    assert same(add_rms_norm(x[3], residual[3], weight), [t[3] for t in found])


X, RESIDUAL, WEIGHT = inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.double(), RESIDUAL, WEIGHT), "x must be torch.float32"),
        ((X, RESIDUAL.half(), WEIGHT), "residual must be torch.float32"),
        ((X, RESIDUAL[:5], WEIGHT), r"residual must have shape \[37, 100\] to fit x"),
        ((X, RESIDUAL[0], WEIGHT), "residual must have 2 dimensions"),
        ((X.t(), RESIDUAL.t(), WEIGHT), "x's last dimension must have stride 1"),
        ((X, RESIDUAL, WEIGHT[:7]), r"weight must have shape \[100\] to fit x"),
        ((X.to("meta"), RESIDUAL, WEIGHT), "x is on meta"),
        ((X, "residual", WEIGHT), "residual must be a torch tensor"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        add_rms_norm(*arguments)


@pytest.mark.parametrize("eps", [0.0, float("nan"), 2.0, "1e-6"])
def test_eps_is_checked(eps):
    with pytest.raises(ValueError, match="eps must be"):
        add_rms_norm(X, RESIDUAL, WEIGHT, eps=eps)


def test_what_the_contract_excludes_is_refused_by_name():
    with pytest.raises(ValueError, match="bias is not part of contract add_rms_norm/1"):
        add_rms_norm(X, RESIDUAL, WEIGHT, bias=WEIGHT)


def test_second_derivatives_are_refused():
    tensors = [t.requires_grad_() for t in inputs()]
    (dx,) = torch.autograd.grad(together(*tensors).sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()
