"""torch's linear layer on the CPU: what a benchmark runs beside ours."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear

Array = npt.NDArray[np.generic]


def torch_linear(x: Array, weight: Array, bias: Array | None) -> Tensor:
    return linear(
        torch.from_numpy(x), torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias)
    )


def torch_linear_backward(x: Array, weight: Array, dout: Array) -> tuple[Tensor, Tensor]:
    """The two products of which torch's autograd makes the gradients of x and weight."""
    given = torch.from_numpy(dout)
    return given.mm(torch.from_numpy(weight)), given.t().mm(torch.from_numpy(x))
