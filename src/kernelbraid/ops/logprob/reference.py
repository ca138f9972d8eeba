"""Log-probabilities in float64, with gradients; and the vendor's, to measure our error by. Needs torch."""

import numpy as np
import torch
from torch import Tensor

from kernelbraid.ops.logprob.spec import FORM
from kernelbraid.ops.oracle import HUGE, device_for, evaluate, on_device, tensor_of
from kernelbraid.ops.problem import WHOLE_PROBLEM, Problem, Rows
from kernelbraid.ops.rows import finite

PIECE = 16384
"""Rows of the weight that are in float64 at a time."""


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
    if problem.shared["weight"].size <= HUGE:
        return evaluate(problem, FORM, logprob, torch.float64)
    if device_for(problem) == "cpu":
        return in_pieces(problem, "cpu")
    with on_device():
        return in_pieces(problem, "cuda")


def in_pieces(problem: Problem, device: str) -> Rows:
    """The same with a piece of the weight in float64 at a time, for a model's head; dweight in float32."""
    pieces = [slice(at, at + PIECE) for at in range(0, problem.shared["weight"].shape[0], PIECE)]
    weight = tensor_of(problem.shared["weight"]).to(device)
    rows: Rows = {}

    def packed(name: str, only_finite: bool) -> Tensor:
        joined = np.concatenate([request[name] for request in problem.requests])
        found = tensor_of(finite(joined) if only_finite else joined).to(device)
        return found.double() if found.is_floating_point() else found

    def split(name: str, value: Tensor) -> None:
        ends, array = np.cumsum((0, *problem.shape.rows)), value.detach().cpu().numpy()
        for b, count in enumerate(problem.shape.rows):
            if count:
                rows[name, b] = array[ends[b] : ends[b + 1]]

    def logits(x: Tensor) -> Tensor:
        return torch.cat([x @ weight[at].double().T for at in pieces], 1) / problem.scalars["temperature"]

    targets = packed("targets", False)
    for name, value in zip(
        ("logprob", "entropy", "lse"), of_logits(logits(packed("x", False)), targets), strict=True
    ):
        split(name, value)
    if not all("dlogprob" in request for request in problem.requests):
        return rows
    x = packed("x", True)
    scaled = logits(x).requires_grad_()
    given = [packed(name, True) for name in ("dlogprob", "dentropy")]
    (gradient,) = torch.autograd.grad(of_logits(scaled, targets)[:2], scaled, given)
    gradient /= problem.scalars["temperature"]
    dx, dweight = torch.zeros_like(x), np.empty(weight.shape, np.float32)
    for at in pieces:
        dx += gradient[:, at] @ weight[at].double()
        dweight[at] = (gradient[:, at].T @ x).float().cpu().numpy()
    split("dx", dx)
    rows["dweight", WHOLE_PROBLEM] = dweight
    return rows


def vendor(problem: Problem) -> Rows:
    """Return the same from torch: a linear layer in the problem's dtype, then float32."""

    def formula(
        x: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return of_logits(torch.nn.functional.linear(x, weight).float() / temperature, targets)

    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, formula, torch.float32)
    return evaluate(problem, FORM, formula, getattr(torch, problem.shape.dtype), "cuda")
