"""QK norm in float64, with gradients; and the vendor's, to measure our error by. Needs torch."""

import torch
from torch import Tensor

from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows
from kernelbraid.ops.qk_norm.spec import FORM


def qk_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Heads of q and k [T, H, D] divided by the root of their mean square + eps, times a weight [D]."""
    q_out, k_out = (
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q_out, k_out


def reference(problem: Problem) -> Rows:
    """Return float64 rows of q_out and k_out; where gradients were drawn, those of inputs and weights too."""
    return evaluate(problem, FORM, qk_norm, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same from torch's `rms_norm`: float32 on the CPU, 16 bits on the GPU."""

    def formula(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        norm = torch.nn.functional.rms_norm
        return norm(q, q_weight.shape, q_weight, eps), norm(k, k_weight.shape, k_weight, eps)

    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, formula, torch.float32)
    return evaluate(problem, FORM, formula, getattr(torch, problem.shape.dtype), "cuda")
