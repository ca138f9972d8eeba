"""What every differentiable public function promises, as checks that a test calls."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether tensors have the same bits."""
    return all(
        torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))
        if a.is_floating_point()
        else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def gradients(function: Callable[..., Tensor], tensors: Sequence[Tensor], seed: int = 5) -> list[Tensor]:
    """Gradients of a function's result in its float tensors, for a gradient drawn from `seed`."""
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    out = function(*leaves)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype).to(out.device)
    return list(torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout))


def check_differentiable(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> None:
    """Bits of values and gradients: eager, recorded, compiled, checkpointed, and for a part of the inputs."""
    eager, recorded = function(*tensors), gradients(function, tensors)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert same([eager], [compiled(*tensors)])
    assert same(recorded, gradients(compiled, tensors))
    again = gradients(lambda *leaves: checkpoint(function, *leaves, use_reentrant=False), tensors)
    assert same(recorded, again)
    floats = [i for i, x in enumerate(tensors) if x.is_floating_point()]
    for at, i in enumerate(floats):
        leaves = [x.detach().clone().requires_grad_(j == i) for j, x in enumerate(tensors)]
        out = function(*leaves)
        assert same([eager], [out.detach()])
        generator = torch.Generator().manual_seed(5)
        dout = torch.randn(out.shape, generator=generator).to(out.dtype).to(out.device)
        assert same([recorded[at]], torch.autograd.grad(out, leaves[i], dout))
    expanded = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    function(*expanded).sum().backward()
    ones = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    out = function(*ones)
    out.backward(torch.ones_like(out))
    assert same([expanded[i].grad for i in floats], [ones[i].grad for i in floats])
