"""The public log-probabilities: values, gradients, registration, agreement of their forms, refusals."""

import pytest
import torch
from tests.ops.public import check_differentiable, gradients, same

from kernelbraid import head_logits, linear, logprob, logprob_of_logits, next_token_logprobs
from kernelbraid.ops.logprob import reference, registered

TOKENS, WIDTH, VOCABULARY = 37, 100, 421


def inputs(tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * 2 / width**0.5
    return x, weight, torch.randint(0, vocabulary, (tokens,), generator=generator)


def both(x, weight, targets):
    """Log-probabilities and entropies as one tensor."""
    return torch.stack(logprob(x, weight, targets, temperature=0.7, return_entropy=True))


@pytest.mark.parametrize(("width", "vocabulary"), [(WIDTH, VOCABULARY), (64, 256), (1, 2), (17, 63)])
def test_values_and_gradients_are_the_formulas(width, vocabulary):
    x, weight, targets = inputs(width=width, vocabulary=vocabulary)
    found = logprob(x, weight, targets, temperature=0.7, return_entropy=True, return_lse=True)
    exact = reference.logprob(x.double(), weight.double(), targets, 0.7)
    for ours, best in zip(found, exact, strict=True):
        assert (ours - best).abs().max() < 1e-5
    wanted = gradients(
        lambda *t: torch.stack(reference.logprob(*t, 0.7)[:2]), (x.double(), weight.double(), targets)
    )
    for ours, best in zip(gradients(both, (x, weight, targets)), wanted, strict=True):
        assert (ours - best).norm() < 3e-6 * best.norm()


def test_the_reference_passes_gradcheck():
    x, weight, targets = inputs(5, 4, 7)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    assert torch.autograd.gradcheck(lambda a, b: reference.logprob(a, b, targets, 0.8)[:2], leaves)


def test_bits_are_the_same_however_it_is_called():
    check_differentiable(both, inputs())
    check_differentiable(logprob, inputs())


def test_entropy_without_a_gradient_of_its_own_changes_nothing():
    x, weight, targets = inputs()
    alone = gradients(logprob, (x, weight, targets))
    beside = gradients(lambda *t: logprob(*t, return_entropy=True)[0], (x, weight, targets))
    assert same(alone, beside)


@pytest.mark.parametrize("width", [WIDTH, 128, 300, 576])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_logits_are_those_of_a_linear_layer(tokens, width):
    x, weight, _ = inputs(tokens, width)
    assert same([head_logits(x, weight)], [linear(x, weight)])


def test_errors_do_not_grow_with_the_logits():
    """Tokens that are nearly certain: lse has a last bit of 4e-6 here, what follows has not."""
    logits = torch.full((4, 300), 45.0)
    logits[:, 7] = torch.tensor([53.0, 56.0, 60.0, 70.0])
    targets = torch.full((4,), 7)
    exact = torch.log_softmax(logits.double(), 1)[:, 7]
    found = logprob_of_logits(logits, targets, temperature=1.0)
    assert ((found - exact).abs() < 5e-7).all()
    x, weight, targets = torch.ones(1, 1), torch.full((300, 1), 45.0), torch.tensor([7])
    weight[7] = 55.3
    wanted = gradients(lambda *t: reference.logprob(*t, 1.0)[0], (x.double(), weight.double(), targets))
    ours = gradients(lambda *t: logprob(*t, temperature=1.0), (x, weight, targets))
    for mine, best in zip(ours, wanted, strict=True):
        assert (mine - best).norm() < 2e-4 * best.norm()


def test_rollout_and_update_agree():
    """Logits to sample from, the token's log-probability, alone and from those logits: one set of bits."""
    x, weight, targets = inputs()
    update = logprob(x, weight, targets, temperature=0.9, return_entropy=True, return_lse=True)
    logits = head_logits(x, weight)
    assert same(
        update, logprob_of_logits(logits, targets, temperature=0.9, return_entropy=True, return_lse=True)
    )
    for t in range(TOKENS):
        row = slice(t, t + 1)
        assert same([update[0][row]], [next_token_logprobs(x[row], weight, targets[row], temperature=0.9)])
        assert same([logits[row]], [head_logits(x[row], weight)])
    assert (logits - x.double() @ weight.double().T).abs().max() < 1e-5


def test_a_token_that_does_not_count():
    x, weight, targets = inputs()
    ignored = targets.clone()
    ignored[5] = -100
    out = logprob(x, weight, ignored, return_entropy=True)
    full = logprob(x, weight, targets, return_entropy=True)
    assert out[0][5] == 0 and same([out[1]], [full[1]])
    x.requires_grad_()
    logprob(x, weight, ignored).sum().backward()
    assert torch.count_nonzero(x.grad[5]) == 0 and torch.count_nonzero(x.grad[4]) == WIDTH


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_leading_shape_stride_and_index(dtype):
    x, weight, targets = inputs(24)
    out = logprob(x, weight, targets)
    assert same(
        [logprob(x.view(2, 3, 4, WIDTH), weight, targets.view(2, 3, 4).to(dtype))], [out.view(2, 3, 4)]
    )
    wide = torch.full((24, 2 * WIDTH), torch.nan)
    wide[:, :WIDTH] = x
    tall = torch.full((VOCABULARY, WIDTH + 3), torch.nan)
    tall[:, :WIDTH] = weight
    assert same([logprob(wide[:, :WIDTH], tall[:, :WIDTH], targets.to(dtype))], [out])
    strided = gradients(logprob, (wide[:, :WIDTH], tall[:, :WIDTH], targets))
    assert same(strided, gradients(logprob, (x, weight, targets)))
    assert logprob(x[:0], weight, targets[:0]).shape == (0,)
    assert head_logits(x[:0], weight).shape == (0, VOCABULARY)
    assert same([logprob(x[3], weight, targets[3])], [out[3]])


def test_logits_that_are_not_finite():
    logits = torch.randn(4, 300)
    logits[0, 7], logits[1, 3], logits[2, 250] = -torch.inf, torch.inf, torch.nan
    logits[3] = -torch.inf
    targets = torch.tensor([0, 0, 0, 0])
    values, entropies, lse = logprob_of_logits(logits, targets, return_entropy=True, return_lse=True)
    exact = torch.log_softmax(logits[0].double(), -1)
    assert abs(values[0] - exact[0]) < 1e-5
    assert abs(entropies[0] + torch.nansum(exact.exp() * exact)) < 1e-5
    assert values[1:].isnan().all() and entropies[1:].isnan().all()
    assert lse[3] == -torch.inf and lse[1:3].isnan().all()
    masked = logprob_of_logits(logits[:1], torch.tensor([7]))
    assert masked[0] == -torch.inf


def test_the_gradient_of_the_weight_is_added_where_it_is_kept():
    x, weight, targets = inputs(200)
    weight.requires_grad_()
    total = torch.zeros(VOCABULARY, WIDTH)
    for part in (slice(0, 128), slice(128, 200)):
        logprob(x[part], weight, targets[part], weight_grad=total).sum().backward()
    assert weight.grad is None
    logprob(x, weight, targets).sum().backward()
    assert same([weight.grad], [total])
    leaf = x.clone().requires_grad_()
    logprob(leaf, weight, targets, weight_grad=total).sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("needed", [[True, True], [True, False], [False, True]])
def test_registration(needed):
    x, weight, targets = inputs()
    tensors = (x.requires_grad_(needed[0]), weight.requires_grad_(needed[1]), targets)
    torch.library.opcheck(registered.logprob, (*tensors, 0.7))
    given = [torch.randn(TOKENS) for _ in range(4)]
    arguments = (x.detach(), weight.detach(), targets, 0.7, *given, needed)
    torch.library.opcheck(registered.logprob_backward, arguments)


def test_registration_of_the_forms_of_rollout():
    x, weight, targets = inputs()
    torch.library.opcheck(registered.head_logits, (x, weight))
    torch.library.opcheck(registered.logprob_of_logits, (x @ weight.T, targets, 0.7))


X, WEIGHT, TARGETS = inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.double(), WEIGHT, TARGETS), "x must be torch.float32"),
        ((X.t(), WEIGHT, TARGETS[:1].expand(WIDTH)), "x's last dimension must have stride 1"),
        ((X, WEIGHT[:, :7], TARGETS), r"weight must have shape \[any, 100\] to fit x"),
        ((X, WEIGHT.half(), TARGETS), "weight must be torch.float32"),
        ((X, WEIGHT[:1], TARGETS), "vocabulary must be between 2"),
        ((X, WEIGHT, TARGETS[:5]), r"targets must have the shape of the rows before them, \[37\]"),
        ((X, WEIGHT, TARGETS.float()), "targets must be torch.int32 or torch.int64"),
        ((X, WEIGHT, TARGETS * 0 - 1), "targets must lie between 0 and 420, or be -100"),
        ((X, WEIGHT, TARGETS * 0 + VOCABULARY), "got 421"),
        ((X.to("meta"), WEIGHT, TARGETS), "x is on meta"),
        (("x", WEIGHT, TARGETS), "x must be a torch tensor"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        logprob(*arguments)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), 1e6, "1"])
def test_temperature_is_checked(temperature):
    with pytest.raises(ValueError, match="temperature must be"):
        logprob(X, WEIGHT, TARGETS, temperature=temperature)


def test_weight_grad_is_checked():
    for wrong, message in (
        (torch.zeros(3, WIDTH), "weight_grad must have shape"),
        (WEIGHT.double(), "weight_grad must be torch.float32"),
        (WEIGHT, "weight_grad must not share memory with weight"),
        (torch.zeros_like(WEIGHT), "weight does not require a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            logprob(X, WEIGHT, TARGETS, weight_grad=wrong)


def test_what_has_no_gradient_refuses_one():
    leaf = X.clone().requires_grad_()
    with pytest.raises(ValueError, match="x requires a gradient, which head_logits has not"):
        head_logits(leaf, WEIGHT)
    with pytest.raises(ValueError, match="logits requires a gradient"):
        logprob_of_logits(leaf @ WEIGHT.T, TARGETS)
    assert not logprob(leaf, WEIGHT, TARGETS, return_lse=True)[1].requires_grad


def test_what_the_contract_excludes_is_refused_by_name():
    with pytest.raises(ValueError, match="softcap is not part of contract logprob/1"):
        logprob(X, WEIGHT, TARGETS, softcap=30.0)


def test_second_derivatives_are_refused():
    x, weight = (t.clone().requires_grad_() for t in (X, WEIGHT))
    (dx,) = torch.autograd.grad(logprob(x, weight, TARGETS).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()
