"""The public router: values, ties, gradients, registration, refusals."""

import itertools

import pytest
import torch
from tests.ops.public import check_differentiable, gradients

from kernelbraid import moe_router
from kernelbraid.ops.moe_router import reference, registered

TOKENS, EXPERTS, TOP_K = 37, 20, 3
WAYS = list(itertools.product(("softmax", "sigmoid"), (True, False)))
NAN, INF = float("nan"), float("inf")


def inputs(tokens=TOKENS, experts=EXPERTS, seed=0):
    return 2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def exact(logits, scoring, renormalize, top_k=TOP_K):
    return reference.moe_router(logits.double(), top_k, scoring == "sigmoid", renormalize)


@pytest.mark.parametrize(("scoring", "renormalize"), WAYS)
def test_values_and_gradients_are_the_formulas(scoring, renormalize):
    logits = inputs()
    weights, experts = moe_router(logits, TOP_K, scoring=scoring, renormalize=renormalize)
    wanted, indices = exact(logits, scoring, renormalize)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    assert torch.equal(experts, indices)
    assert (weights - wanted).norm() < 3e-7 * wanted.norm()
    (found,) = gradients(
        lambda x: moe_router(x, TOP_K, scoring=scoring, renormalize=renormalize)[0], (logits,)
    )
    (best,) = gradients(lambda x: exact(x, scoring, renormalize)[0], (logits.double(),))
    assert (found - best).norm() < 1e-6 * best.norm()


@pytest.mark.parametrize(("scoring", "renormalize"), WAYS)
def test_the_reference_passes_gradcheck(scoring, renormalize):
    logits = inputs(4, 7).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: exact(x, scoring, renormalize)[0], (logits,))


@pytest.mark.parametrize(("scoring", "renormalize"), WAYS)
def test_bits_are_the_same_however_it_is_called(scoring, renormalize):
    check_differentiable(
        lambda x: moe_router(x, TOP_K, scoring=scoring, renormalize=renormalize)[0], (inputs(),)
    )


@pytest.mark.parametrize("top_k", [1, 4, EXPERTS // 2, 16])
def test_slots_descend(top_k):
    logits = inputs()
    weights, experts = moe_router(logits, top_k)
    assert torch.equal(experts.long(), logits.topk(top_k).indices)
    assert (weights.diff(dim=-1) <= 0).all()


def test_equal_logits_come_by_index_and_zeros_are_equal():
    row = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, 1.0, 3.0]])
    weights, experts = moe_router(row, 7)
    assert experts.tolist() == [[1, 3, 6, 0, 5, 2, 4]]
    assert weights[0, 0] == weights[0, 2] and weights[0, 5] == weights[0, 6]


def test_nan_comes_last_and_stays_in_its_row():
    rows = torch.tensor([[NAN, 1.0, -INF, 2.0], [0.0, 1.0, 2.0, 3.0]])
    for top_k, wanted in ((3, [3, 1, 2]), (4, [3, 1, 2, 0])):
        weights, experts = moe_router(rows, top_k, scoring="sigmoid", renormalize=False)
        assert experts[0].tolist() == wanted
        assert torch.isfinite(weights[0, :3]).all()
        assert torch.equal(
            weights[1], moe_router(rows[1:], top_k, scoring="sigmoid", renormalize=False)[0][0]
        )
    assert moe_router(rows, 2, renormalize=False)[0][0].isnan().all()
    assert moe_router(rows, 4)[0][0].isnan().all()
    assert not moe_router(rows, 3)[0][0].isnan().any()
    everywhere = torch.full((1, 5), NAN)
    assert moe_router(everywhere, 2)[1].tolist() == [[0, 1]]


def test_infinity_follows_the_arithmetic():
    rows = torch.tensor([[INF, 0.0, 1.0], [-INF, -INF, -INF], [200.0, -200.0, 0.0]])
    weights, experts = moe_router(rows, 2, renormalize=False)
    assert experts.tolist() == [[0, 2], [0, 1], [0, 2]]
    assert weights[:2].isnan()[:, 0].all() and weights[2].tolist() == [1.0, 0.0]
    assert moe_router(rows[2:], 3, scoring="sigmoid", renormalize=False)[0].tolist() == [[1.0, 0.5, 0.0]]


@pytest.mark.parametrize(("scoring", "renormalize"), WAYS)
def test_registration(scoring, renormalize):
    logits = inputs(5).requires_grad_()
    ways = (scoring == "sigmoid", renormalize)
    torch.library.opcheck(registered.moe_router, (logits, TOP_K, *ways))
    weights, experts = moe_router(logits.detach(), TOP_K, scoring=scoring, renormalize=renormalize)
    given = (logits.detach(), weights, experts, torch.randn(5, TOP_K), *ways)
    torch.library.opcheck(registered.moe_router_backward, given)


def test_any_leading_shape_and_row_stride():
    logits = inputs(24)
    weights, experts = moe_router(logits, TOP_K)
    shaped = moe_router(logits.view(2, 3, 4, EXPERTS), TOP_K)
    assert torch.equal(shaped[0], weights.view(2, 3, 4, TOP_K))
    assert torch.equal(shaped[1], experts.view(2, 3, 4, TOP_K))
    wide = torch.full((24, 2 * EXPERTS), torch.nan)
    wide[:, :EXPERTS] = logits
    assert torch.equal(moe_router(wide[:, :EXPERTS], TOP_K)[0], weights)
    assert [tuple(each.shape) for each in moe_router(logits[:0], TOP_K)] == [(0, TOP_K)] * 2
    assert torch.equal(moe_router(logits[3], TOP_K)[1], experts[3])


def test_an_index_that_is_none_is_not_followed():
    logits = inputs(2, 5)
    weights, experts = moe_router(logits, 2)
    experts[0, 0], experts[1, 1] = 2**31 - 1, -5
    for ways in itertools.product((False, True), (False, True)):
        found = registered.differentiate(logits, weights, experts, torch.ones(2, 2), *ways)
        assert found.shape == logits.shape


LOGITS = inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LOGITS.double(), 2), "logits must be torch.float32"),
        ((LOGITS.t(), 2), "logits's last dimension must have stride 1"),
        ((LOGITS.to("meta"), 2), "logits is on meta"),
        (("x", 2), "logits must be a torch tensor"),
        ((torch.zeros(2, 600), 2), "experts must be between 1 and 512"),
        ((LOGITS, 0), "top_k must be between 1 and 16, got 0"),
        ((LOGITS, 17), "top_k must be between 1 and 16, got 17"),
        ((LOGITS[:, :2].contiguous(), 3), "top_k must be at most logits' 2 experts, got 3"),
        ((LOGITS, 2.0), "top_k must be an int"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        moe_router(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "tanh"}, "scoring must be one of softmax, sigmoid"),
        ({"renormalize": 1}, "renormalize must be a bool"),
        ({"bias": LOGITS[0]}, "bias is not part of contract moe_router/1"),
        ({"groups": 4}, "groups is not part of contract moe_router/1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        moe_router(LOGITS, 2, **options)


def test_second_derivatives_are_refused():
    logits = inputs().requires_grad_()
    (found,) = torch.autograd.grad(moe_router(logits, 2)[0].square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        found.sum().backward()
