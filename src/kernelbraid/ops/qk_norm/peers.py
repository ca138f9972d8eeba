"""torch's RMS norm of queries and of keys on the CPU: what a benchmark runs beside ours."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

Array = npt.NDArray[np.generic]


def torch_qk_norm(q: Array, k: Array, q_weight: Array, k_weight: Array, eps: float) -> tuple[Tensor, Tensor]:
    pairs = ((torch.from_numpy(x), torch.from_numpy(weight)) for x, weight in ((q, q_weight), (k, k_weight)))
    q_out, k_out = (rms_norm(x, weight.shape, weight, eps) for x, weight in pairs)
    return q_out, k_out


def torch_qk_norm_backward(
    q: Array, k: Array, q_weight: Array, k_weight: Array, dq_out: Array, dk_out: Array, eps: float
) -> tuple[Tensor, ...]:
    """Gradients by torch's autograd, whose forward is part of what they need."""
    leaves = [torch.from_numpy(array).requires_grad_() for array in (q, k, q_weight, k_weight)]
    outs = [rms_norm(leaves[i], leaves[i + 2].shape, leaves[i + 2], eps) for i in range(2)]
    return torch.autograd.grad(outs, leaves, [torch.from_numpy(dout) for dout in (dq_out, dk_out)])
