"""A loop over experts in torch on the CPU: what a benchmark runs beside ours."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import silu

Array = npt.NDArray[Any]


def _loop(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Each expert that somebody chose, for its tokens together."""
    out = torch.zeros_like(x)
    first, second = gate_up.unbind(), down.unbind()
    for number in np.unique(experts.numpy()):
        tokens, slots = torch.nonzero(experts == int(number), as_tuple=True)
        gate, up = (x[tokens] @ first[number].T).chunk(2, -1)
        found = (silu(gate) * up) @ second[number].T * weights[tokens, slots, None]
        out.index_add_(0, tokens, found)
    return out


def torch_experts(x: Array, weights: Array, experts: Array, gate_up: Array, down: Array) -> Tensor:
    with torch.no_grad():
        return _loop(*(torch.from_numpy(array) for array in (x, weights, experts, gate_up, down)))


def torch_experts_backward(
    x: Array, weights: Array, experts: Array, gate_up: Array, down: Array, dout: Array
) -> tuple[Tensor, ...]:
    """Gradients by torch's autograd, whose forward is part of what they need."""
    leaves = [torch.from_numpy(array).requires_grad_() for array in (x, weights, gate_up, down)]
    out = _loop(leaves[0], leaves[1], torch.from_numpy(experts), leaves[2], leaves[3])
    return torch.autograd.grad(out, leaves, torch.from_numpy(dout))
