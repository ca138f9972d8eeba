"""The public SwiGLU: values, gradients, registration, refusals."""

import math

import numpy as np
import pytest
import torch
from tests.ops.public import check_differentiable, gradients, same

from kernelbraid import swiglu
from kernelbraid.ops.swiglu import reference, registered

TOKENS, WIDTH = 37, 100


def inputs(tokens=TOKENS, width=WIDTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, width, generator=generator) * 3,
        torch.randn(tokens, width, generator=generator),
    )


def packed(x):
    return swiglu(x)


def test_values_and_gradients_are_the_formulas():
    gate, up = inputs()
    exact = reference.swiglu(gate.double(), up.double())
    assert (swiglu(gate, up) - exact).norm() < 1e-7 * exact.norm()
    found = gradients(swiglu, (gate, up))
    wanted = gradients(reference.swiglu, (gate.double(), up.double()))
    for ours, best in zip(found, wanted, strict=True):
        assert (ours - best).norm() < 2e-7 * best.norm()


def test_every_gate_is_near_the_formula():
    """Relative to the result itself, from where exp overflows to where the gate is all."""
    gate = torch.linspace(-87, 100, 1 << 16).view(64, -1)
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    found = swiglu(gate, torch.ones_like(gate)).double()
    assert ((found - exact).abs() <= 3e-7 * exact.abs()).all()


def test_the_reference_passes_gradcheck():
    leaves = tuple(t.double().requires_grad_() for t in inputs(5, 7))
    assert torch.autograd.gradcheck(reference.swiglu, leaves)


def test_bits_are_the_same_however_it_is_called():
    check_differentiable(swiglu, inputs())
    check_differentiable(packed, (torch.cat(inputs(), 1),))


def test_halves_of_one_tensor_are_gate_and_up():
    gate, up = inputs()
    x = torch.cat((gate, up), 1)
    assert same([swiglu(x)], [swiglu(gate, up)])
    assert same([gradients(packed, (x,))[0]], [torch.cat(gradients(swiglu, (gate, up)), 1)])


def test_registration():
    gate, up = (t.requires_grad_() for t in inputs())
    torch.library.opcheck(registered.swiglu, (gate, up))
    given = (gate.detach(), up.detach(), torch.randn(TOKENS, WIDTH))
    torch.library.opcheck(registered.swiglu_backward, given)


def test_any_leading_shape_and_row_stride():
    gate, up = inputs(24)
    out = swiglu(gate, up)
    shape = (2, 3, 4, WIDTH)
    assert torch.equal(swiglu(gate.view(shape), up.view(shape)), out.view(shape))
    wide = torch.full((24, 3 * WIDTH), torch.nan)
    wide[:, WIDTH : 2 * WIDTH], wide[:, :WIDTH] = gate, up
    assert torch.equal(swiglu(wide[:, WIDTH : 2 * WIDTH], wide[:, :WIDTH]), out)
    wide[:, 2 * WIDTH :] = up
    assert torch.equal(swiglu(wide[:, WIDTH:]), out)
    assert swiglu(gate[:0], up[:0]).shape == (0, WIDTH)
    assert swiglu(torch.empty(0, 3, 2 * WIDTH)).shape == (0, 3, WIDTH)
    assert torch.equal(swiglu(gate[3], up[3]), out[3])
    assert swiglu(torch.ones(2)).shape == (1,)


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 33])
def test_an_element_does_not_know_its_place(width):
    """Vectors of any length, and what is left over, give the bits of an element alone."""
    gate, up = inputs(3, width)
    alone = [swiglu(g.view(1, 1), u.view(1, 1)) for g, u in zip(gate.view(-1), up.view(-1), strict=True)]
    assert same([swiglu(gate, up).view(-1)], [torch.cat(alone).view(-1)])


def test_special_values():
    gate = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, -88.5, -3e38, 3e38, 2.0**-140])
    out = swiglu(gate[None], torch.ones(1, len(gate)))[0]
    assert out[0].isnan() and out[1] == math.inf and out[2].isnan()
    assert torch.equal(torch.signbit(out[3:7]), torch.tensor([False, True, True, True]))
    assert (out[3:7] == 0).all() and out[7] == gate[7] and out[8] == 2.0**-141
    assert (out.view(torch.int32)[[0, 2]] == 0x7FC00000).all()
    payload = torch.tensor([[0x7FC12345]], dtype=torch.int32).view(torch.float32)
    assert swiglu(payload, payload).view(torch.int32).item() == 0x7FC00000
    for leaf in gradients(swiglu, (gate[None, 3:8], torch.ones(1, 5))):
        assert leaf.isfinite().all()


GATE, UP = inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GATE.double(), UP.double()), "gate must be torch.float32"),
        ((GATE, UP.half()), "up must be torch.float32"),
        ((GATE, UP[:7]), r"up must have the shape of x, \[37, 100\], got \[7, 100\]"),
        ((GATE.t(), UP.t()), "gate's last dimension must have stride 1"),
        ((GATE[:, :99],), r"x must end with an even size, gate and up, got shape \[37, 99\]"),
        ((torch.tensor(1.0),), "x must end with an even size"),
        ((torch.empty(3, 0),), "x must end with an even size"),
        ((torch.empty(0, 2 * 131072 + 2),), "gate: width must be between 1 and 131072, got 131073"),
        ((torch.empty(131073, 2),), "gate: tokens must be between 0 and 131072, got 131073"),
        ((GATE.to("meta"), UP.to("meta")), "gate is on meta"),
        ((GATE, UP.to("meta")), "up is on meta, others on cpu"),
        ((GATE.to_sparse(), UP), "gate must be a dense tensor"),
        (("x",), "x must be a torch tensor"),
        ((GATE, 1.0), "up must be a torch tensor"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        swiglu(*arguments)


@pytest.mark.parametrize("feature", ["limit", "alpha"])
def test_what_the_contract_excludes_is_refused_by_name(feature):
    with pytest.raises(ValueError, match=f"{feature} is not part of contract swiglu/1"):
        swiglu(GATE, UP, **{feature: 7.0})


def test_forward_mode_is_refused():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(GATE, UP)
        with pytest.raises(ValueError, match="x has a tangent, and swiglu has no forward-mode derivatives"):
            swiglu(dual, UP)


def test_second_derivatives_are_refused():
    for tensors in (inputs(), (torch.cat(inputs(), 1),)):
        leaves = [t.requires_grad_() for t in tensors]
        (dx,) = torch.autograd.grad(swiglu(*leaves).sum(), leaves[0], create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            dx.sum().backward()


def test_threads_that_flush_denormals_are_refused():
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(RuntimeError, match="flushes denormal numbers"):
            swiglu(*inputs())
    finally:
        torch.set_flush_denormal(False)
    assert np.float32(2.0**-100) * np.float32(2.0**-40) != 0
