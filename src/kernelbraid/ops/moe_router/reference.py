"""The router of a mixture in float64, with its gradient; and torch's, to measure our error. Needs torch."""

import torch
from torch import Tensor

from kernelbraid.ops.moe_router.spec import form
from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows


def moe_router(logits: Tensor, top_k: int, by_sigmoid: bool, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights and indices [T, top_k] of the largest logits [T, E]; equal ones by index, NaN last."""
    lost = torch.isnan(logits).to(torch.int8)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    late = torch.sort(lost.gather(-1, order), dim=-1, stable=True).indices
    experts = order.gather(-1, late)[:, :top_k]
    scores = torch.sigmoid(logits) if by_sigmoid else torch.softmax(logits, -1)
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.to(torch.int32)


def _evaluate(problem: Problem, dtype: torch.dtype, device: str = "") -> Rows:
    axes = dict(problem.shape.constant_axes)

    def formula(logits: Tensor, by_sigmoid: float, renormalize: float) -> tuple[Tensor, Tensor]:
        return moe_router(logits, axes["top_k"], bool(by_sigmoid), bool(renormalize))

    return evaluate(problem, form(axes), formula, dtype, device)


def reference(problem: Problem) -> Rows:
    """Return float64 rows of weights and experts; where dweights was drawn, dlogits too."""
    return _evaluate(problem, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same from torch in float32, on the problem's device."""
    return _evaluate(problem, torch.float32, "cpu" if problem.shape.dtype == "float32" else "cuda")
