"""What a benchmark runs beside ours on a GPU.

torch's linear layer, log-softmax and gather; and Liger-Kernel's fused linear cross entropy, which computes
its gradients in its forward.
"""

from typing import Any

import torch
from torch import Tensor


def torch_logprob(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probabilities alone, of logits rounded to 16 bits and kept."""
    with torch.no_grad():
        return _logprob(x, weight, targets, temperature)


def torch_logprob_backward(
    x: Tensor, weight: Tensor, targets: Tensor, temperature: float, dlogprob: Tensor, **others: Tensor
) -> Any:
    """Gradients by torch's autograd, whose forward is part of what they need; none of the entropies."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    return torch.autograd.grad(_logprob(leaves[0], leaves[1], targets, temperature)[:, 0], leaves, dlogprob)


def liger_logprob(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
    """Liger's forward with no gradient asked for: losses of every token, at temperature 1."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    with torch.no_grad():
        return liger_fused_linear_cross_entropy(x, weight, targets.long(), reduction="none")


def liger_logprob_backward(
    x: Tensor, weight: Tensor, targets: Tensor, temperature: float, dlogprob: Tensor, **others: Tensor
) -> Any:
    """Liger's gradients of the summed loss: forward and backward, at temperature 1, no weights of tokens."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    loss = liger_fused_linear_cross_entropy(*leaves, targets.long(), reduction="sum")
    return torch.autograd.grad(loss, leaves)


def _logprob(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(x, weight).float() / temperature
    return torch.log_softmax(logits, -1).gather(1, targets.long()[:, None])
