"""The public linear layer: values, gradients, adding to a gradient, registration, refusals."""

import numpy as np
import pytest
import torch
from tests.ops.public import check_differentiable, gradients, same
from torch.utils.checkpoint import checkpoint

from kernelbraid import linear
from kernelbraid.contract import Workload
from kernelbraid.ops.linear import cpu, peers, reference, registered
from kernelbraid.ops.linear.spec import LINEAR, LINEAR_CUDA
from kernelbraid.ops.problem import Layout, ProblemShape, View

TOKENS, IN, OUT = 37, 100, 70


def inputs(tokens=TOKENS, features=(IN, OUT), bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, features[0]), (features[1], features[0])] + [(features[1],)] * bias
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("features", [(IN, OUT), (1, 1), (16, 64), (130, 129), (513, 3)])
@pytest.mark.parametrize("tokens", [1, 7, 9, 130, 400])
def test_values_and_gradients_are_the_formulas(tokens, features, bias):
    tensors = inputs(tokens, features, bias)
    exact = reference.linear(*(t.double() for t in tensors), *([] if bias else [None]))
    assert (linear(*tensors) - exact).norm() < 1e-6 * exact.norm()
    formula = lambda x, weight, bias=None: reference.linear(x, weight, bias)  # noqa: E731
    wanted = gradients(formula, [t.double() for t in tensors])
    for ours, best in zip(gradients(linear, tensors), wanted, strict=True):
        assert (ours - best).norm() < 1e-6 * best.norm()


def in_blocks(a, b, block):
    """a @ b by the order of README.md, in float64, where a product of float32 numbers is exact."""
    total = torch.zeros(len(a), b.shape[1])
    for first in range(0, a.shape[1], block):
        chain = torch.zeros(total.shape, dtype=torch.float64)
        for k in range(first, min(first + block, a.shape[1])):
            chain = (chain + a[:, k, None].double() * b[None, k].double()).float().double()
        total = total + chain.float()
    return total


@pytest.mark.parametrize("tokens", [1, 7, 11, 70, 400])
@pytest.mark.parametrize("width", [50, 128, 144, 200, 272, 300])
def test_sums_are_chains_of_fused_multiply_adds_in_blocks(tokens, width):
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-64, 64, (tokens, width), generator=generator).float() / 7
    weight = torch.randint(-64, 64, (140, width), generator=generator).float() / 3
    dout = torch.randint(-64, 64, (tokens, 140), generator=generator).float() / 5
    bias = torch.randn(140, generator=generator)
    assert same([linear(x, weight)], [in_blocks(x, weight.T, 128)])
    assert same([linear(x, weight, bias)], [in_blocks(x, weight.T, 128) + bias])
    found = registered.differentiate(x, weight, bias, dout, [True, True, True])
    ones = torch.ones(1, tokens)
    assert same(found, [in_blocks(dout, weight, 128), in_blocks(dout.T, x, 64), in_blocks(ones, dout, 16)[0]])


@pytest.mark.parametrize("features", [(576, 192), (2048, 128)])
def test_results_are_as_near_to_float64_as_the_vendors(features):
    x, weight = inputs(200, features, bias=False)
    exact = x.double() @ weight.double().T
    ours, theirs = linear(x, weight), torch.nn.functional.linear(x, weight)
    assert (ours - exact).norm() <= 1.25 * max((theirs - exact).norm(), 1e-7 * exact.norm())


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_parts_of_the_sum_are_added_in_pairs(groups, monkeypatch):
    """Parts computed apart, as by ranks, give the bits of `k_groups` parts."""
    monkeypatch.setattr(cpu, "K_GROUPS", groups)
    for tokens, features in ((37, (96, 70)), (2, (50, 64)), (9, (5, 3)), (400, (64, 10))):
        x, weight, bias = inputs(tokens, features)
        out = linear(x, weight, bias)
        length = -(-features[0] // groups)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "K_GROUPS", 1)
            cuts = [slice(g * length, (g + 1) * length) for g in range(groups)]
            zero = torch.zeros(tokens, features[1])
            parts = [linear(x[:, cut], weight[:, cut]) if x[:, cut].numel() else zero for cut in cuts]
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        assert same([out], [parts[0] + bias])


@pytest.mark.parametrize("groups", [2, 8])
def test_parts_of_the_gradient_of_x_are_added_in_pairs(groups, monkeypatch):
    x, weight = inputs(37, (100, 96), bias=False)
    dout = torch.randn(37, 96)
    monkeypatch.setattr(cpu, "N_GROUPS", groups)
    (dx,) = registered.differentiate(x, weight, None, dout, [True, False, False])
    monkeypatch.setattr(cpu, "N_GROUPS", 1)
    length = 96 // groups
    parts = [
        registered.differentiate(x, weight[cut], None, dout[:, cut], [True, False, False])[0]
        for cut in (slice(g * length, (g + 1) * length) for g in range(groups))
    ]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert same([dx], parts)


def test_the_reference_passes_gradcheck():
    tensors = tuple(t.double().requires_grad_() for t in inputs(5, (7, 3)))
    assert torch.autograd.gradcheck(reference.linear, tensors)


@pytest.mark.parametrize("bias", [True, False])
def test_bits_are_the_same_however_it_is_called(bias):
    check_differentiable(linear, inputs(bias=bias))


@pytest.mark.parametrize("needed", [[True, True, True], [True, False, False], [False, True, False]])
def test_registration(needed):
    tensors = [t.requires_grad_(need) for t, need in zip(inputs(), needed, strict=True)]
    torch.library.opcheck(registered.linear, tuple(tensors))
    torch.library.opcheck(registered.linear, (*tensors[:2], None))
    given = (*(t.detach() for t in tensors), torch.randn(TOKENS, OUT), needed)
    torch.library.opcheck(registered.linear_backward, given)


def test_any_leading_shape_and_row_stride():
    x, weight, bias = inputs(24)
    out = linear(x, weight, bias)
    assert same([linear(x.view(2, 3, 4, IN), weight, bias)], [out.view(2, 3, 4, OUT)])
    wide, tall = torch.full((24, 2 * IN), torch.nan), torch.full((OUT, IN + 3), torch.nan)
    wide[:, :IN], tall[:, :IN] = x, weight
    assert same([linear(wide[:, :IN], tall[:, :IN], bias)], [out])
    assert same([linear(x[3], weight, bias)], [out[3]])
    assert same([linear(x[3:4].expand(5, IN), weight, bias)], [out[3:4].expand(5, OUT)])


def test_gradients_through_strided_rows():
    x, weight, bias = inputs(24)
    dout = torch.full((24, 2 * OUT), torch.nan)
    dout[:, :OUT] = torch.randn(24, OUT)
    wide = torch.full((24, 2 * IN), torch.nan)
    wide[:, :IN] = x
    strided = registered.differentiate(wide[:, :IN], weight, bias, dout[:, :OUT], [True] * 3)
    assert same(strided, registered.differentiate(x, weight, bias, dout[:, :OUT].contiguous(), [True] * 3))


def test_no_tokens():
    x, weight, bias = inputs(0)
    assert linear(x, weight, bias).shape == (0, OUT)
    found = gradients(linear, (x, weight, bias))
    assert [tuple(g.shape) for g in found] == [(0, IN), (OUT, IN), (OUT,)]
    assert not any(g.any() for g in found)


# ---- weight_grad


def test_gradients_are_added_over_pieces():
    """Pieces of multiples of 64 rows add up to the bits of all rows at once; so do x and bias as ever."""
    x, weight, bias = inputs(300)
    dout = torch.randn(300, OUT)
    weight.requires_grad_()
    (at_once,) = torch.autograd.grad(linear(x, weight, bias), weight, dout)
    total = torch.zeros(OUT, IN)
    for start, stop in ((0, 64), (64, 256), (256, 300)):
        linear(x[start:stop], weight, bias, weight_grad=total).backward(dout[start:stop])
    assert weight.grad is None and same([total], [at_once])


def test_other_gradients_beside_weight_grad():
    leaves = [t.requires_grad_() for t in inputs()]
    dout = torch.randn(TOKENS, OUT)
    wanted = torch.autograd.grad(linear(*leaves), leaves, dout)
    total = torch.zeros(OUT, IN)
    found = torch.autograd.grad(linear(*leaves, weight_grad=total), (leaves[0], leaves[2]), dout)
    assert same(found, (wanted[0], wanted[2]))
    total.zero_()
    linear(*leaves, weight_grad=total).backward(dout)
    assert leaves[1].grad is None and same([total, leaves[0].grad], wanted[1::-1])


def test_weight_grad_under_checkpointing_is_added_once():
    x, weight, bias = inputs()
    weight.requires_grad_()
    dout = torch.randn(TOKENS, OUT)
    (wanted,) = torch.autograd.grad(linear(x, weight, bias), weight, dout)
    for reentrant in (False, True):
        total = torch.zeros(OUT, IN)
        call = lambda x: linear(x, weight, bias, weight_grad=total)  # noqa: B023, E731
        checkpoint(call, x.clone().requires_grad_(), use_reentrant=reentrant).backward(dout)
        assert same([total], [wanted])


def test_a_strided_weight_grad():
    x, weight, bias = inputs()
    weight.requires_grad_()
    wide = torch.zeros(OUT, IN + 7)
    linear(x, weight, bias, weight_grad=wide[:, :IN]).sum().backward()
    (wanted,) = torch.autograd.grad(linear(x, weight, bias).sum(), weight)
    assert same([wide[:, :IN]], [wanted]) and not wide[:, IN:].any()


def test_without_gradients_weight_grad_stays():
    total = torch.ones(OUT, IN)
    with torch.no_grad():
        linear(*inputs(), weight_grad=total)
    assert bool((total == 1).all())


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (torch.zeros(OUT, IN, dtype=torch.float64), "weight_grad must be torch.float32"),
        (torch.zeros(OUT, IN + 1), r"weight_grad must have shape \[70, 100\] to fit weight"),
        (torch.zeros(IN, OUT).t(), "weight_grad's last dimension must have stride 1"),
        (torch.zeros(OUT, IN, requires_grad=True), "weight_grad must not require a gradient"),
        (torch.zeros(1, IN).expand(OUT, IN), "weight_grad's elements overlap"),
        ("total", "weight_grad must be a torch tensor"),
    ],
)
def test_weight_grad_is_checked(total, message):
    x, weight, bias = inputs()
    with pytest.raises(ValueError, match=message):
        linear(x, weight.requires_grad_(), bias, weight_grad=total)


def test_weight_grad_needs_memory_of_its_own_and_a_weight_that_requires_a_gradient():
    x, weight, bias = inputs()
    with pytest.raises(ValueError, match="weight does not require a gradient"):
        linear(x, weight, bias, weight_grad=torch.zeros(OUT, IN))
    with pytest.raises(ValueError, match="must not share memory with weight"):
        linear(x, weight.requires_grad_(), bias, weight_grad=weight.detach())


def test_weight_grad_is_refused_where_no_eager_backward_adds_to_it():
    x, weight, bias = inputs()
    weight.requires_grad_()
    total = torch.zeros(OUT, IN)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"weight_grad must be None under torch\.compile"):
        torch.compile(lambda x: linear(x, weight, bias, weight_grad=total), fullgraph=True, backend="eager")(
            x
        )
    with pytest.raises(ValueError, match=r"weight_grad must be None under torch\.compile, transforms"):
        torch.func.grad(lambda x: linear(x, weight, bias, weight_grad=total).sum())(x)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        out = linear(x.requires_grad_(), weight, bias, weight_grad=total)
        torch.autograd.grad(out.sum(), (x, weight), create_graph=True, allow_unused=True)


# ---- Refusals

X, WEIGHT, BIAS = inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.double(), WEIGHT), "x must be torch.float32"),
        ((X.t(), WEIGHT), "x's last dimension must have stride 1"),
        ((X, WEIGHT.t()), "weight's last dimension must have stride 1"),
        ((X, WEIGHT[:, :7]), r"weight must have shape \[any, 100\] to fit x"),
        ((X, WEIGHT[0]), "weight must have 2 dimensions"),
        ((X, WEIGHT.half()), "weight must be torch.float32"),
        ((X, WEIGHT, BIAS[:7]), r"bias must have shape \[70\] to fit weight"),
        ((X, WEIGHT, BIAS.double()), "bias must be torch.float32"),
        ((X, WEIGHT, 1.0), "bias must be a torch tensor"),
        ((X[:, :0], WEIGHT[:, :0]), "x: in_features must be between 1 and 262144, got 0"),
        ((X, WEIGHT[:0]), "weight: out_features must be between 1 and 262144, got 0"),
        ((X[:1].expand(131073, IN), WEIGHT), "x: tokens must be between 0 and 131072"),
        ((X.to("meta"), WEIGHT), "x is on meta"),
        ((X.to_sparse(), WEIGHT), "x must be a dense tensor"),
        (("x", WEIGHT), "x must be a torch tensor"),
        ((X, "weight"), "weight must be a torch tensor"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        linear(*arguments)


@pytest.mark.parametrize("feature", ["weight_scale", "activation"])
def test_what_the_contract_excludes_is_refused_by_name(feature):
    with pytest.raises(ValueError, match=f"{feature} is not part of contract linear/1"):
        linear(X, WEIGHT, **{feature: 1.0})


def test_second_derivatives_are_refused():
    x, weight = (t.requires_grad_() for t in inputs(bias=False))
    (dx,) = torch.autograd.grad(linear(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()


# ---- What benchmarks and verifications ask


def test_a_bias_is_there_where_its_axis_says_so():
    for operator in (LINEAR, LINEAR_CUDA):
        for bias in (0, 1):
            axes = (("in_features", 8), ("out_features", 6), ("bias", bias))
            shape = ProblemShape(axes, (3, 2), (3, 2), dtype=operator.contract.dtypes[0])
            problem = operator.draw(shape, np.random.default_rng(1))
            assert ("bias" in problem.shared) == bool(bias)
            (call,) = operator.lower(problem, Layout("update", (0, 1))).calls
            assert (call.arguments["bias"] is None) == (not bias)
            (call,) = operator.lower(problem, Layout("backward", (0, 1))).calls
            assert (call.arguments["dbias"] is None) == (not bias) and "bias" not in call.arguments
            workload = Workload("backward", (("tokens", 5), *axes))
            (call,) = operator.timed(workload, np.random.default_rng(1), 1, 0, contiguous=False).calls
            assert (call.arguments["dbias"] is None) == (not bias)
            size = 4 if operator is LINEAR else 2
            moved = size * (5 * (8 + 6 + 8) + 48) + 4 * 48 + (4 * 6 if bias else 0)
            assert operator.cost(workload).bytes == moved


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("phase", ["decode", "backward"])
def test_peers_compute_the_layer(phase, bias):
    axes = (("tokens", 5), ("in_features", 8), ("out_features", 6), ("bias", bias))
    program = LINEAR.timed(Workload(phase, axes), np.random.default_rng(1), 2, 0, contiguous=True)
    peer = next(peer for peer in LINEAR.peers if phase in peer.phases)
    for call in program.calls:
        given = {
            name: program.inputs[value.buffer][value.start : value.stop] if isinstance(value, View) else value
            for name, value in call.arguments.items()
        }
        found = getattr(peers, peer.entry_point)(**given)
        x, weight = given["x"], given["weight"]
        if phase == "decode":
            exact = x @ weight.T + (given["bias"] if bias else 0)
            np.testing.assert_allclose(found.numpy(), exact, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_allclose(found[0].numpy(), given["dout"] @ weight, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found[1].numpy(), given["dout"].T @ x, rtol=1e-4, atol=1e-5)
