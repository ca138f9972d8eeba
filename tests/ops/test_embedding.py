"""The public embedding: values, gradients, accumulation, registration, refusals."""

import numpy as np
import pytest
import torch
from tests.ops.public import check_differentiable, gradients, same
from torch.utils.checkpoint import checkpoint

from kernelbraid import embedding
from kernelbraid.ops.embedding import cpu, reference, registered

TOKENS, VOCABULARY, WIDTH = 137, 31, 100


def inputs(tokens=TOKENS, vocabulary=VOCABULARY, width=WIDTH, dtype=torch.int64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator, dtype=dtype)
    return ids, torch.randn(vocabulary, width, generator=generator)


def chains(ids, dout, start):
    """The gradient by the contract's words."""
    total = start.clone()
    for t, v in enumerate(ids.tolist()):
        total[v] += dout[t]
    return total


def test_values_and_gradients_are_the_formulas():
    ids, weight = inputs()
    assert torch.equal(embedding(ids, weight), weight[ids])
    (found,) = gradients(embedding, (ids, weight))
    (wanted,) = gradients(reference.embedding, (ids, weight.double()))
    assert (found - wanted).norm() < 2e-7 * wanted.norm()


def test_the_gradient_adds_tokens_in_order():
    ids, weight = inputs(1000)
    dout = torch.randn(1000, WIDTH)
    leaf = weight.requires_grad_()
    embedding(ids, leaf).backward(dout)
    assert same([leaf.grad], [chains(ids, dout, torch.zeros(VOCABULARY, WIDTH))])


def test_the_reference_passes_gradcheck():
    ids, weight = inputs(5, 3, 7)
    leaf = weight.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: reference.embedding(ids, w), (leaf,))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bits_are_the_same_however_it_is_called(dtype):
    check_differentiable(embedding, inputs(dtype=dtype))


def test_rows_keep_every_bit():
    payloads = torch.arange(-(2**31), 2**31, 12345677, dtype=torch.int64).to(torch.int32)
    weight = payloads.view(torch.float32).view(-1, 4)[:80]
    ids = torch.arange(80).flip(0)
    assert same([embedding(ids, weight)], [weight.flip(0)])


def test_registration():
    ids, weight = inputs()
    torch.library.opcheck(registered.embedding, (ids, weight.requires_grad_()))
    torch.library.opcheck(registered.embedding_backward, (ids, torch.randn(TOKENS, WIDTH), VOCABULARY))


def test_any_shape_of_ids_and_row_stride():
    ids, weight = inputs(24)
    out = embedding(ids, weight)
    assert torch.equal(embedding(ids.view(2, 3, 4), weight), out.view(2, 3, 4, WIDTH))
    assert torch.equal(embedding(ids[::3], weight), out[::3])
    assert torch.equal(embedding(ids.view(4, 6).t(), weight), out.view(4, 6, WIDTH).transpose(0, 1))
    assert torch.equal(embedding(ids[3], weight), out[3])
    assert embedding(ids[:0], weight).shape == (0, WIDTH)
    assert embedding(ids[:0].view(2, 0), weight).shape == (2, 0, WIDTH)
    wide = torch.full((VOCABULARY, 2 * WIDTH), torch.nan)
    wide[:, :WIDTH] = weight
    assert torch.equal(embedding(ids, wide[:, :WIDTH]), out)


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 33])
def test_odd_widths(width):
    ids, weight = inputs(50, 7, width)
    assert torch.equal(embedding(ids, weight), weight[ids])
    dout = torch.randn(50, width)
    leaf = weight.requires_grad_()
    embedding(ids, leaf).backward(dout)
    assert same([leaf.grad], [chains(ids, dout, torch.zeros(7, width))])


def test_rows_of_ids_that_do_not_occur_are_zero():
    ids, weight = torch.tensor([2, 2]), torch.randn(5, 3).requires_grad_()
    embedding(ids, weight).sum().backward()
    assert weight.grad.tolist() == [[0.0] * 3, [0.0] * 3, [2.0] * 3, [0.0] * 3, [0.0] * 3]
    weight.grad = None
    embedding(ids[:0], weight).sum().backward()
    assert not weight.grad.any()


# ---- weight_grad.


@pytest.mark.parametrize("cuts", [(), (1,), (64,), (64, 128), (3, 77, 78, 130)])
def test_any_pieces_of_a_batch_add_up_to_the_same_bits(cuts):
    ids, weight = inputs()
    weight.requires_grad_()
    dout = torch.randn(TOKENS, WIDTH)
    start = torch.randn(VOCABULARY, WIDTH)
    start[3] = -0.0
    total = start.clone()
    for first, last in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        embedding(ids[first:last], weight, weight_grad=total).backward(dout[first:last])
    assert same([total], [chains(ids, dout, start)])
    assert weight.grad is None


def test_weight_grad_keeps_rows_that_do_not_occur_and_takes_several_passes():
    ids, weight = torch.tensor([1, 3]), torch.randn(5, 3).requires_grad_()
    total = torch.full((5, 3), torch.nan)
    total[[1, 3]] = 1.0
    outs = [embedding(ids, weight, weight_grad=total) for _ in range(3)]
    torch.stack(outs).sum().backward()
    assert total[[1, 3]].tolist() == [[4.0] * 3] * 2 and total[[0, 2, 4]].isnan().all()


def test_weight_grad_counts_as_written():
    ids, weight = inputs()
    total = torch.zeros(VOCABULARY, WIDTH)
    factor = torch.ones(VOCABULARY, WIDTH, requires_grad=True)
    product = (factor * total).sum()
    embedding(ids, weight.requires_grad_(), weight_grad=total).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_weight_grad_under_checkpointing_and_without_gradients():
    ids, weight = inputs()
    weight.requires_grad_()
    totals = [torch.zeros(VOCABULARY, WIDTH) for _ in range(2)]
    embedding(ids, weight, weight_grad=totals[0]).square().sum().backward()
    again = checkpoint(lambda: embedding(ids, weight, weight_grad=totals[1]).square(), use_reentrant=False)
    again.sum().backward()
    assert same(totals[:1], totals[1:])
    with torch.no_grad():
        embedding(ids, weight, weight_grad=totals[1])
    assert same(totals[:1], totals[1:])


IDS, WEIGHT = inputs()
GRAD = torch.zeros(VOCABULARY, WIDTH)


@pytest.mark.parametrize(
    ("weight_grad", "message"),
    [
        (GRAD.double(), "weight_grad must be torch.float32"),
        (GRAD[:5], r"weight_grad must have shape \[31, 100\] to fit weight"),
        (WEIGHT, "weight_grad must not share memory with weight"),
        (torch.zeros(1, WIDTH).expand(VOCABULARY, WIDTH), "weight_grad's elements overlap in memory"),
        (torch.zeros(VOCABULARY, WIDTH, requires_grad=True), "must not require a gradient itself"),
        (1.0, "weight_grad must be a torch tensor"),
    ],
)
def test_refused_accumulators(weight_grad, message):
    with pytest.raises(ValueError, match=message):
        embedding(IDS, WEIGHT, weight_grad=weight_grad)


def test_weight_grad_is_refused_where_operators_are_traced():
    compiled = torch.compile(
        lambda: embedding(IDS, WEIGHT, weight_grad=GRAD), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="weight_grad is for eager calls"):
        compiled()


# ---- Ids.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-1, VOCABULARY, -(2**31), 2**31 - 1])
def test_ids_outside_of_the_table_are_refused(dtype, wrong):
    ids = torch.tensor([0, wrong, 1], dtype=dtype)
    with pytest.raises(ValueError, match=f"ids must lie between 0 and 30, as weight has rows, got {wrong}"):
        embedding(ids, WEIGHT)


def test_ids_that_would_wrap_are_refused():
    with pytest.raises(ValueError, match=f"got {2**32}"):
        embedding(torch.tensor([2**32]), WEIGHT)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_implementation_reads_nothing_outside_of_the_table(dtype):
    """Where nobody checks ids, as on a GPU: NaN rows, and nothing added."""
    ids = np.array([2, -1, 0, 31, 2**31 - 1, -(2**31), 2], dtype)
    weight, out = WEIGHT.numpy(), np.zeros((7, WIDTH), np.float32)
    cpu.embedding(ids, weight, out)
    inside = [0, 2, 6]
    assert np.array_equal(out[inside], weight[[2, 0, 2]])
    outside = np.delete(out, inside, 0)
    assert (outside.view(np.uint32) == 0x7FC00000).all()
    dweight = np.full((VOCABULARY, WIDTH), np.nan, np.float32)
    cpu.embedding_backward(ids, weight, np.ones((7, WIDTH), np.float32), dweight, 0)
    assert (dweight[2] == 2).all() and (dweight[0] == 1).all() and dweight.sum() == 3 * WIDTH


def test_a_gradient_of_strided_rows():
    wide = np.full((VOCABULARY, 2 * WIDTH), 7, np.float32)
    dout = np.random.default_rng(0).standard_normal((TOKENS, WIDTH), np.float32)
    cpu.embedding_backward(IDS.numpy(), None, dout, wide[:, :WIDTH], 0)
    assert same([torch.from_numpy(wide[:, :WIDTH])], [chains(IDS, torch.from_numpy(dout), GRAD)])
    assert (wide[:, WIDTH:] == 7).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS, WEIGHT.double()), "weight must be torch.float32"),
        ((IDS.float(), WEIGHT), "ids must be torch.int32 or torch.int64"),
        ((IDS, WEIGHT[0]), "weight must have 2 dimensions"),
        ((IDS, WEIGHT.t()), "weight's last dimension must have stride 1"),
        ((IDS, WEIGHT[:0]), "weight: vocabulary must be between 1 and 1048576, got 0"),
        ((IDS, WEIGHT[:, :0]), "weight: width must be between 1 and 65536, got 0"),
        ((torch.zeros(131073, dtype=torch.int64), WEIGHT), "ids: tokens must be between 0 and 131072"),
        ((IDS, WEIGHT.to("meta")), "weight is on meta"),
        ((IDS.to("meta"), WEIGHT), "ids is on meta, others on cpu"),
        ((IDS, WEIGHT.to_sparse()), "weight must be a dense tensor"),
        (([0, 1], WEIGHT), "ids must be a torch tensor"),
        ((IDS, "weight"), "weight must be a torch tensor"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        embedding(*arguments)


@pytest.mark.parametrize("feature", ["padding_idx", "max_norm", "scale"])
def test_what_the_contract_excludes_is_refused_by_name(feature):
    with pytest.raises(ValueError, match=f"{feature} is not part of contract embedding/1"):
        embedding(IDS, WEIGHT, **{feature: 1})


def test_second_derivatives_are_refused():
    ids, weight = inputs()
    dout = torch.randn(TOKENS, WIDTH, requires_grad=True)
    (dweight,) = torch.autograd.grad(embedding(ids, weight.requires_grad_()), weight, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dweight.sum().backward()
    out = embedding(ids, weight, weight_grad=torch.zeros(VOCABULARY, WIDTH)).sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out, weight, create_graph=True, allow_unused=True)
