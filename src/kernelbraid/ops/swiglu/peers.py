"""torch's SwiGLU on the CPU: what a benchmark runs beside ours."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import silu

Array = npt.NDArray[np.generic]


def torch_swiglu(gate: Array, up: Array) -> Tensor:
    return silu(torch.from_numpy(gate)) * torch.from_numpy(up)


def torch_swiglu_backward(gate: Array, up: Array, dout: Array) -> tuple[Tensor, ...]:
    """Gradients by the calls that torch's autograd makes, given silu of the forward's gate."""
    g, u, d = (torch.from_numpy(array) for array in (gate, up, dout))
    return torch.ops.aten.silu_backward(d * u, g), d * silu(g)
