"""The public QK norm: values, gradients, registration, refusals."""

import numpy as np
import pytest
import torch
from tests.ops.public import check_differentiable, gradients, same

from kernelbraid import qk_norm, rms_norm
from kernelbraid.ops.qk_norm import reference, registered

TOKENS, HEADS, KV, D = 37, 4, 2, 24


def inputs(tokens=TOKENS, heads=HEADS, kv=KV, d=D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, n, d, generator=generator) for n in (heads, kv))
    return q, k, *(torch.rand(d, generator=generator) + 0.5 for _ in range(2))


def together(*tensors):
    """Both results as one tensor."""
    return torch.cat(qk_norm(*tensors, eps=1e-5), 1)


def exact(*tensors):
    return torch.cat(reference.qk_norm(*tensors, 1e-5), 1)


def test_values_and_gradients_are_the_formulas():
    tensors = inputs()
    best = [t.double() for t in tensors]
    assert (together(*tensors) - exact(*best)).norm() < 2e-7 * exact(*best).norm()
    for ours, wanted in zip(gradients(together, tensors), gradients(exact, best), strict=True):
        assert (ours - wanted).norm() < 5e-7 * wanted.norm()


def test_the_reference_passes_gradcheck():
    tensors = tuple(t.double().requires_grad_() for t in inputs(3, 2, 1, 6))
    assert torch.autograd.gradcheck(exact, tensors)


def alone(q, k, q_weight, k_weight):
    """The same from RMS norm on single heads."""
    pairs = ((q, q_weight), (k, k_weight))
    return torch.cat([rms_norm(x.reshape(-1, x.shape[2]), w, eps=1e-5).view(x.shape) for x, w in pairs], 1)


@pytest.mark.parametrize("sizes", [(37, 4, 2, 24), (130, 9, 3, 64), (50, 3, 5, 101), (5, 1, 1, 1)])
def test_values_and_gradients_have_the_bits_of_rms_norm_on_heads(sizes):
    tensors = inputs(*sizes)
    assert same([together(*tensors)], [alone(*tensors)])
    assert same(gradients(together, tensors)[:2], gradients(alone, tensors)[:2])


def in_order(terms):
    """Rounded to float32 after every term, as a fused multiply-add is."""
    total = np.zeros(terms[0].shape, np.float32)
    for term in terms:
        total = (np.longdouble(total) + term).astype(np.float32)
    return total


def folded(terms):
    """[T, H, D] added over tokens and heads in the order of README.md; the terms are exact."""
    total = np.zeros(terms.shape[2], np.float32)
    for first in range(0, len(terms), 64):
        sums = list(terms[first : first + 64].reshape(-1, terms.shape[2]))
        for _ in range(3):
            sums = [in_order(sums[i : i + 8]) for i in range(0, len(sums), 8)]
        total = in_order([total, *sums])
    return total


@pytest.mark.parametrize("sizes", [(130, 9, 3, 64), (64, 8, 1, 16), (5, 1, 1, 1)])
def test_gradients_of_weights_are_added_in_the_stated_order(sizes):
    q, k, *weights = inputs(*sizes)
    factored = together(q, k, *map(torch.ones_like, weights))
    dout = torch.randn(factored.shape, generator=torch.Generator().manual_seed(5))  # as gradients() draws it
    terms = np.longdouble(dout.numpy()) * np.longdouble(factored.numpy())
    heads = q.shape[1]
    wanted = [torch.from_numpy(folded(part)) for part in (terms[:, :heads], terms[:, heads:])]
    assert same(gradients(together, (q, k, *weights))[2:], wanted)
    plain = torch.from_numpy(in_order(list(terms[:, :heads].reshape(-1, q.shape[2]))))
    assert same(wanted[:1], [plain]) == (len(q) * heads <= 8)


def test_bits_are_the_same_however_it_is_called():
    check_differentiable(together, inputs())


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_alone_may_be_used(used):
    tensors = [t.requires_grad_() for t in inputs()]
    qk_norm(*tensors)[used].sum().backward()
    assert tensors[used].grad.any() and not tensors[1 - used].grad.any()


@pytest.mark.parametrize("needed", [[True] * 4, [False, True, True, False], [True, False, False, False]])
def test_registration(needed):
    tensors = [t.requires_grad_(n) for t, n in zip(inputs(), needed, strict=True)]
    torch.library.opcheck(registered.qk_norm, (*tensors, 1e-6))
    douts = [torch.randn(x.shape) for x in tensors[:2]]
    given = (*(t.detach() for t in tensors), *douts, 1e-6, needed)
    torch.library.opcheck(registered.qk_norm_backward, given)


def test_parts_of_a_joint_projection():
    q, k, *weights = inputs()
    joint = torch.cat((q, torch.full_like(k, torch.nan), k), 1).flatten(1)
    parts = joint[:, : HEADS * D].view(-1, HEADS, D), joint[:, -KV * D :].view(-1, KV, D)
    assert not parts[0].is_contiguous()
    found, wanted = qk_norm(*parts, *weights), qk_norm(q, k, *weights)
    assert same(found, wanted) and all(t.is_contiguous() for t in found)
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert same(qk_norm(turned, k, *weights), wanted)


def test_no_tokens():
    q, k, *weights = (t.requires_grad_() for t in inputs(0))
    outs = qk_norm(q, k, *weights)
    assert [t.shape for t in outs] == [(0, HEADS, D), (0, KV, D)]
    (outs[0].sum() + outs[1].sum()).backward()
    assert not weights[0].grad.any() and not weights[1].grad.any()


Q, K, QW, KW = inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Q.double(), K, QW, KW), "q must be torch.float32"),
        ((Q, K.half(), QW, KW), "k must be torch.float32"),
        ((Q[0], K, QW, KW), "q must have 3 dimensions"),
        ((Q, K[:5], QW, KW), r"k must have shape \[37, any, 24\] to fit q"),
        ((Q, K[..., :5], QW, KW), r"k must have shape \[37, any, 24\] to fit q"),
        ((Q[..., ::2], K[..., ::2], QW[::2], KW[::2]), "q's last dimension must have stride 1"),
        ((Q, K, QW[:7], KW), r"q_weight must have shape \[24\] to fit q"),
        ((Q, K, QW, KW.half()), "k_weight must be torch.float32"),
        ((Q.repeat(1, 1, 20), K, QW, KW), "q: head_dim must be between 1 and 256, got 480"),
        ((Q.to("meta"), K, QW, KW), "q is on meta"),
        ((Q, K, QW, None), "k_weight must be a torch tensor"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        qk_norm(*arguments)


@pytest.mark.parametrize("eps", [0.0, float("nan"), 2.0, "1e-6"])
def test_eps_is_checked(eps):
    with pytest.raises(ValueError, match="eps must be"):
        qk_norm(Q, K, QW, KW, eps=eps)


def test_what_the_contract_excludes_is_refused_by_name():
    with pytest.raises(ValueError, match="layer_norm is not part of contract qk_norm/1"):
        qk_norm(Q, K, QW, KW, layer_norm=True)


def test_second_derivatives_are_refused():
    tensors = [t.requires_grad_() for t in inputs()]
    (dq,) = torch.autograd.grad(together(*tensors).sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dq.sum().backward()
