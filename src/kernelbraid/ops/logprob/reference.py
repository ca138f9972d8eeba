"""Log-probabilities in float64, with gradients; and the vendor's, to measure our error by. Needs torch."""

import torch
from torch import Tensor

from kernelbraid.ops.logprob.spec import FORM
from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows


def logprob(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of targets [T], entropy and log-sum-exp of x [T, width] @ weight.T / temperature.

    A target outside of the vocabulary has log-probability 0.
    """
    return of_logits((x @ weight.T) / temperature, targets)


def of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of scaled logits [T, vocabulary]."""
    inside = (targets >= 0) & (targets < logits.shape[1])
    logarithms = torch.log_softmax(logits, -1)
    chosen = logarithms.gather(1, torch.where(inside, targets, 0).long()[:, None])[:, 0]
    entropy = -(logarithms.exp() * logarithms).sum(-1)
    return torch.where(inside, chosen, 0), entropy, torch.logsumexp(logits, -1)


def reference(problem: Problem) -> Rows:
    """Return float64 rows of logprob, entropy and lse; where their gradients were drawn, dx and dweight."""
    return evaluate(problem, FORM, logprob, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same from torch: a linear layer in the problem's dtype, then float32."""

    def formula(
        x: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return of_logits(torch.nn.functional.linear(x, weight).float() / temperature, targets)

    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, formula, torch.float32)
    return evaluate(problem, FORM, formula, getattr(torch, problem.shape.dtype), "cuda")
