"""The public experts: values, loads, gradients, registration, refusals."""

import pytest
import torch
from tests.ops.public import check_differentiable, gradients, same

from kernelbraid import linear, moe_experts, moe_router
from kernelbraid.ops.moe_experts import cpu, reference, registered

TOKENS, WIDTH, INSIDE, EXPERTS, TOP_K = 37, 33, 20, 5, 3


def inputs(tokens=TOKENS, width=WIDTH, inside=INSIDE, experts=EXPERTS, top_k=TOP_K, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    chosen = torch.randint(0, experts, (tokens, top_k), generator=generator, dtype=torch.int32)
    gate_up, down = normal(experts, 2 * inside, width), normal(experts, width, inside)
    return normal(tokens, width), normal(tokens, top_k), chosen, gate_up / width**0.5, down / inside**0.5


def doubled(tensors):
    return tuple(x.double() if x.is_floating_point() else x for x in tensors)


LOADS = {
    "drawn": lambda chosen: chosen,
    "all on one": lambda chosen: torch.full_like(chosen, 2),
    "one expert empty": lambda chosen: torch.where(chosen == 1, 0, chosen),
    "half of it nobody's": lambda chosen: torch.where(
        chosen > 2, 2**31 - 1, torch.where(chosen == 2, -1, chosen)
    ),
    "nobody's": lambda chosen: torch.full_like(chosen, EXPERTS),
}


@pytest.mark.parametrize("load", LOADS)
def test_values_and_gradients_are_the_formulas(load):
    x, weights, chosen, gate_up, down = inputs()
    tensors = (x, weights, LOADS[load](chosen), gate_up, down)
    exact = reference.moe_experts(*doubled(tensors))
    assert (moe_experts(*tensors) - exact).norm() <= 1e-6 * exact.norm()
    wanted = gradients(reference.moe_experts, doubled(tensors))
    for ours, best in zip(gradients(moe_experts, tensors), wanted, strict=True):
        assert (ours - best).norm() <= 1e-6 * best.norm()


@pytest.mark.parametrize(("tokens", "width", "inside"), [(1, 200, 150), (70, 128, 16), (150, 300, 260)])
def test_products_have_the_order_of_a_linear_layer(tokens, width, inside):
    x, _, _, gate_up, down = inputs(tokens, width, inside, 1, 1)
    found = moe_experts(x, torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int32), gate_up, down)
    gate, up = linear(x, gate_up[0]).split(inside, 1)
    sigmoid = torch.tensor([cpu.sigmoid(x) for x in gate.flatten().numpy()]).view_as(gate)
    assert same([found], [linear(gate * sigmoid * up, down[0])])


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (70, 130, 65, 1, 1), (200, 7, 3, 2, 2), (9, 64, 16, 40, 16)]
)
def test_sizes(sizes):
    tensors = inputs(*sizes)
    exact = reference.moe_experts(*doubled(tensors))
    assert (moe_experts(*tensors) - exact).norm() <= 2e-6 * exact.norm()
    wanted = gradients(reference.moe_experts, doubled(tensors))
    for ours, best in zip(gradients(moe_experts, tensors), wanted, strict=True):
        assert (ours - best).norm() <= 2e-6 * best.norm()


def test_the_reference_passes_gradcheck():
    x, weights, chosen, gate_up, down = doubled(inputs(4, 5, 3, 3, 2))
    leaves = [each.requires_grad_() for each in (x, weights, gate_up, down)]
    assert torch.autograd.gradcheck(lambda a, b, c, d: reference.moe_experts(a, b, chosen, c, d), leaves)


def test_bits_are_the_same_however_it_is_called():
    check_differentiable(moe_experts, inputs())


def test_a_token_does_not_see_the_others():
    x, weights, chosen, gate_up, down = inputs(150)
    out = moe_experts(x, weights, chosen, gate_up, down)
    for t in (0, 71, 149):
        alone = slice(t, t + 1)
        assert same([out[alone]], [moe_experts(x[alone], weights[alone], chosen[alone], gate_up, down)])
    crowded = chosen.clone()
    crowded[1:] = chosen[0, 0]
    assert same([out[:1]], [moe_experts(x, weights, crowded, gate_up, down)[:1]])
    spoiled = x.clone()
    spoiled[1:] = torch.nan
    assert same([out[:1]], [moe_experts(spoiled, weights, chosen, gate_up, down)[:1]])


def test_parts_of_the_experts_are_the_slots_of_the_whole():
    """A rank that holds some experts numbers them from 0: other indices fall outside and add nothing."""
    x, weights, chosen, gate_up, down = inputs(top_k=1)
    out = moe_experts(x, weights, chosen, gate_up, down)
    low = moe_experts(x, weights, chosen, gate_up[:2], down[:2])
    high = moe_experts(x, weights, chosen - 2, gate_up[2:], down[2:])
    first = (chosen < 2).expand_as(out)
    assert same([out], [torch.where(first, low, high)])
    assert not low[~first].any() and not high[first].any()


def test_a_slot_that_is_nobodys_is_not_looked_at():
    x, weights, chosen, gate_up, down = inputs()
    chosen[:, 1], spoiled = -1, weights.clone()
    spoiled[:, 1] = torch.nan
    out = moe_experts(x, spoiled, chosen, gate_up, down)
    assert same(
        [out], [moe_experts(x, weights[:, ::2].contiguous(), chosen[:, ::2].contiguous(), gate_up, down)]
    )
    assert not gradients(moe_experts, (x, spoiled, chosen, gate_up, down))[1][:, 1].any()


def test_gradients_may_be_added_over_pieces():
    from kernelbraid.ops.moe_experts import cpu

    x, weights, chosen, gate_up, down = (each.numpy() for each in inputs(150))
    dout = torch.randn(150, WIDTH).numpy()

    def added(pieces):
        found = torch.full(gate_up.shape, torch.nan), torch.full(down.shape, torch.nan)
        for i, at in enumerate(pieces):
            operands = (x[at], weights[at], chosen[at], gate_up, down, dout[at], None, None)
            cpu.moe_experts_backward(*operands, *(each.numpy() for each in found), int(i > 0))
        return found

    assert same(added([slice(0, 150)]), added([slice(0, 64), slice(64, 150)]))


def test_passes_do_not_matter(monkeypatch):
    from kernelbraid.ops.moe_experts import cpu

    tensors = inputs(150)
    whole = [moe_experts(*tensors), *gradients(moe_experts, tensors)]
    monkeypatch.setattr(cpu, "PASS_FLOATS", 1)
    monkeypatch.setattr(cpu, "THREAD_COST", 1)
    assert same(whole, [moe_experts(*tensors), *gradients(moe_experts, tensors)])


@pytest.mark.parametrize("needed", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 0)])
def test_registration(needed):
    x, weights, chosen, gate_up, down = inputs(6)
    leaves = [x, weights, gate_up, down]
    for each, need in zip(leaves, needed, strict=True):
        each.requires_grad_(bool(need))
    torch.library.opcheck(registered.moe_experts, (x, weights, chosen, gate_up, down))
    x, weights, gate_up, down = (each.detach() for each in leaves)
    given = (x, weights, chosen, gate_up, down, torch.randn(6, WIDTH), [bool(n) for n in needed])
    torch.library.opcheck(registered.moe_experts_backward, given)


def test_any_leading_shape_and_strides():
    x, weights, chosen, gate_up, down = inputs(24)
    out = moe_experts(x, weights, chosen, gate_up, down)
    shaped = (x.view(2, 12, WIDTH), weights.view(2, 12, TOP_K), chosen.view(2, 12, TOP_K))
    assert torch.equal(moe_experts(*shaped, gate_up, down), out.view(2, 12, WIDTH))

    def spread(tensor):
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 7, dtype=tensor.dtype)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]

    everything = [spread(each) for each in (x, weights, chosen, gate_up, down)]
    assert torch.equal(moe_experts(*everything), out)
    assert same(
        gradients(moe_experts, (x, weights, chosen, gate_up, down)),
        gradients(lambda *t: moe_experts(*map(spread, t)), (x, weights, chosen, gate_up, down)),
    )
    assert torch.equal(moe_experts(x[3], weights[3], chosen[3], gate_up, down), out[3])


def test_no_tokens():
    x, weights, chosen, gate_up, down = inputs()
    empty = (x[:0], weights[:0], chosen[:0], gate_up, down)
    assert moe_experts(*empty).shape == (0, WIDTH)
    assert not any(each.any() for each in gradients(moe_experts, empty))


def test_router_and_experts_together():
    x, _, _, gate_up, down = inputs()
    leaf = x.requires_grad_()
    weights, chosen = moe_router(leaf[:, :EXPERTS].contiguous(), 2)
    moe_experts(leaf, weights, chosen, gate_up, down).square().sum().backward()
    assert torch.isfinite(leaf.grad).all()


X, WEIGHTS, CHOSEN, GATE_UP, DOWN = inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.double(), WEIGHTS, CHOSEN, GATE_UP, DOWN), "x must be torch.float32"),
        ((X, WEIGHTS.half(), CHOSEN, GATE_UP, DOWN), "weights must be torch.float32"),
        ((X, WEIGHTS, CHOSEN.long(), GATE_UP, DOWN), "experts must be torch.int32"),
        ((X, WEIGHTS[1:], CHOSEN, GATE_UP, DOWN), r"weights must have shape \[37, any\] to fit x"),
        ((X, WEIGHTS, CHOSEN[:, :2], GATE_UP, DOWN), r"experts must have shape \[37, 3\] to fit weights"),
        (
            (X, WEIGHTS, CHOSEN, GATE_UP[:, :7], DOWN),
            r"gate_up must have shape \[any, 40, 33\] to fit x and down",
        ),
        (
            (X, WEIGHTS, CHOSEN, GATE_UP, DOWN[1:]),
            r"down must have shape \[5, 33, any\] to fit x and gate_up",
        ),
        ((X, WEIGHTS, CHOSEN, GATE_UP[0], DOWN), "gate_up must have 3 dimensions"),
        (
            (X, WEIGHTS, CHOSEN, GATE_UP.mT.contiguous().mT, DOWN),
            "gate_up's last dimension must have stride 1",
        ),
        ((X.to("meta"), WEIGHTS, CHOSEN, GATE_UP, DOWN), "x is on meta"),
        ((X, "w", CHOSEN, GATE_UP, DOWN), "weights must be a torch tensor"),
        ((X, WEIGHTS.repeat(1, 6), CHOSEN.repeat(1, 6), GATE_UP, DOWN), "top_k must be between 1 and 16"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        moe_experts(*arguments)


@pytest.mark.parametrize("feature", ["bias", "activation"])
def test_what_the_contract_excludes_is_refused_by_name(feature):
    with pytest.raises(ValueError, match=f"{feature} is not part of contract moe_experts/1"):
        moe_experts(X, WEIGHTS, CHOSEN, GATE_UP, DOWN, **{feature: "gelu"})


def test_second_derivatives_are_refused():
    x, *others = inputs()
    (dx,) = torch.autograd.grad(moe_experts(x.requires_grad_(), *others).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()
