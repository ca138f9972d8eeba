"""torch's RMS norm on the CPU: what a benchmark runs beside ours."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

Array = npt.NDArray[np.generic]


def torch_rms_norm(x: Array, weight: Array, eps: float) -> Tensor:
    return rms_norm(torch.from_numpy(x), weight.shape, torch.from_numpy(weight), eps)


def torch_rms_norm_backward(x: Array, weight: Array, dout: Array, eps: float) -> tuple[Tensor, ...]:
    """Gradients by torch's autograd, whose forward is part of what they need."""
    leaves = [torch.from_numpy(array).requires_grad_() for array in (x, weight)]
    out = rms_norm(leaves[0], weight.shape, leaves[1], eps)
    return torch.autograd.grad(out, leaves, torch.from_numpy(dout))
