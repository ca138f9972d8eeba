"""torch's linear layer, log-softmax and gather on the CPU: what a benchmark runs beside ours."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]


def torch_logprob(x: Array, weight: Array, targets: Array, temperature: float) -> Tensor:
    """Log-probabilities alone: torch would need another pass for the entropies that ours gives."""
    with torch.no_grad():
        return _logprob(torch.from_numpy(x), torch.from_numpy(weight), targets, temperature)


def torch_logprob_backward(
    x: Array,
    weight: Array,
    targets: Array,
    temperature: float,
    dlogprob: Array,
    **others: Array,
) -> tuple[Tensor, ...]:
    """Gradients by torch's autograd, whose forward is part of what they need; none of the entropies."""
    leaves = [torch.from_numpy(array).requires_grad_() for array in (x, weight)]
    out = _logprob(leaves[0], leaves[1], targets, temperature)[:, 0]
    return torch.autograd.grad(out, leaves, torch.from_numpy(dlogprob))


def _logprob(x: Tensor, weight: Tensor, targets: Array, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(x, weight) / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(targets).long()[:, None])
