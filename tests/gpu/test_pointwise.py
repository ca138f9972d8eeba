"""SwiGLU and embedding on a GPU: values, bits however they are called, ids that name no row, graphs."""

import pytest
import torch
from tests.ops.public import check_differentiable, gradients, same

from kernelbraid import embedding, swiglu
from kernelbraid.ops.embedding import gpu
from kernelbraid.ops.swiglu import reference

DTYPES = (torch.bfloat16, torch.float16)
VOCABULARY, WIDTH = 97, 320
ROUNDED = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def ids_of(tokens, dtype=torch.int64, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, VOCABULARY, (tokens,), generator=generator, device="cuda", dtype=dtype)


def chains(ids, dout, start):
    """The gradient by the contract's words, on the CPU."""
    total, rows = start.cpu().clone(), dout.float().cpu()
    for t, v in enumerate(ids.tolist()):
        total[v] += rows[t]
    return total.cuda()


# ---- SwiGLU.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 3072])
def test_swiglu_is_the_formula_rounded_once(dtype, width):
    gate, up = 3 * randn(67, width, dtype=dtype), randn(67, width, dtype=dtype, seed=1)
    exact = reference.swiglu(gate.double(), up.double())
    assert (swiglu(gate, up) - exact).norm() < ROUNDED[dtype] * exact.norm()
    wanted = gradients(reference.swiglu, (gate.double(), up.double()))
    for ours, best in zip(gradients(swiglu, (gate, up)), wanted, strict=True):
        assert (ours - best).norm() < 2 * ROUNDED[dtype] * best.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_has_the_same_bits_however_it_is_called(dtype):
    gate, up = randn(37, WIDTH, dtype=dtype), randn(37, WIDTH, dtype=dtype, seed=1)
    check_differentiable(swiglu, (gate, up))
    x = torch.cat((gate, up), 1)
    assert same([swiglu(x)], [swiglu(gate, up)])
    for tokens in (1, 2, 16, 36):
        assert same([swiglu(x[:tokens])], [swiglu(x)[:tokens]])


# ---- Embedding.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_embedding_copies_and_adds_in_token_order(dtype, kind):
    ids, weight = ids_of(3000, kind), randn(VOCABULARY, WIDTH, dtype=dtype)
    ids[::3] = 5  # long runs
    assert same([embedding(ids, weight)], [weight[ids.long()]])
    dout = randn(3000, WIDTH, dtype=dtype, seed=2)
    start = randn(VOCABULARY, WIDTH, seed=3)
    total, leaf = start.clone(), weight.requires_grad_()
    embedding(ids, leaf, weight_grad=total).backward(dout)
    assert same([total], [chains(ids, dout, start)]) and leaf.grad is None
    pieces = start.clone()
    for first, last in ((0, 1), (1, 1300), (1300, 3000)):
        embedding(ids[first:last], leaf, weight_grad=pieces).backward(dout[first:last])
    assert same([total], [pieces])
    embedding(ids, leaf).backward(dout)
    assert same([leaf.grad], [chains(ids, dout, torch.zeros_like(start)).to(dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_has_the_same_bits_however_it_is_called(dtype):
    check_differentiable(embedding, (ids_of(137), randn(VOCABULARY, WIDTH, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_that_name_no_row_give_nan_and_add_nothing(dtype):
    ids = torch.tensor([3, -1, VOCABULARY, 2**31, 2**32 + 3, -(2**63), 3], device="cuda")
    weight = randn(VOCABULARY, WIDTH, dtype=dtype).requires_grad_()
    out = embedding(ids, weight)
    inside = torch.tensor([True, False, False, False, False, False, True], device="cuda")
    assert same([out[inside]], [weight[[3, 3]]])
    bits = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[dtype]
    assert (out[~inside].view(torch.int16) == bits).all()
    out.sum().backward()
    assert (weight.grad[3] == 2).all() and weight.grad.float().sum() == 2 * WIDTH


def test_nothing_waits_for_the_device():
    ids, weight = ids_of(5000), randn(VOCABULARY, WIDTH, dtype=torch.bfloat16).requires_grad_()
    embedding(ids, weight).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        embedding(ids, weight).sum().backward()
        swiglu(embedding(ids, weight)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [1, 300, 4097, 40000])
def test_gradients_replay_in_a_graph(tokens):
    """The sort too: other ids put into the same buffer give their own gradient."""
    ids, dout = ids_of(tokens), randn(tokens, WIDTH, dtype=torch.bfloat16, seed=2)
    total = torch.zeros(VOCABULARY, WIDTH, device="cuda")
    gpu.embedding_backward(ids, None, dout, total, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.embedding_backward(ids, None, dout, total, 0)
    ids.copy_(ids_of(tokens, seed=9))
    total.fill_(float("nan"))
    graph.replay()
    assert same([total], [chains(ids, dout, torch.zeros_like(total))])
