"""torch's embedding on the CPU: what a benchmark runs beside ours."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]


def torch_embedding(ids: Array, weight: Array) -> Tensor:
    return torch.nn.functional.embedding(torch.from_numpy(ids), torch.from_numpy(weight))


def torch_embedding_backward(ids: Array, weight: Array, dout: Array) -> Tensor:
    """The dense gradient that torch's autograd asks for."""
    tensors = torch.from_numpy(dout), torch.from_numpy(ids)
    found: Tensor = torch.ops.aten.embedding_dense_backward(*tensors, len(weight), -1, False)
    return found
