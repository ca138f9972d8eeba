"""torch's linear layer on a GPU: what a benchmark runs beside ours."""

from torch import Tensor
from torch.nn.functional import linear


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias)


def torch_linear_backward(x: Tensor, weight: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """The two products of which torch's autograd makes the gradients of x and weight."""
    return dout.mm(weight), dout.t().mm(x)
