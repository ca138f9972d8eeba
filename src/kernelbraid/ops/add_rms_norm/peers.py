"""torch's sum and RMS norm on the CPU: what a benchmark runs beside ours."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

Array = npt.NDArray[np.generic]


def torch_add_rms_norm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.from_numpy(x) + torch.from_numpy(residual)
    return rms_norm(total, weight.shape, torch.from_numpy(weight), eps), total


def torch_add_rms_norm_backward(
    residual_out: Array, weight: Array, dout: Array, dresidual_out: Array, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients by torch's autograd, whose forward is part of what they need."""
    leaves = [torch.from_numpy(array).requires_grad_() for array in (residual_out, weight)]
    out = rms_norm(leaves[0], weight.shape, leaves[1], eps)
    dx, dweight = torch.autograd.grad(out, leaves, torch.from_numpy(dout))
    return dx + torch.from_numpy(dresidual_out), dweight
