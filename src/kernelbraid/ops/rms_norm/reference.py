"""RMS norm in float64, with gradients; and the vendor's, to measure our error by. Needs torch."""

import torch
from torch import Tensor

from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows
from kernelbraid.ops.rms_norm.spec import FORM


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, width] divided by the root of its rows' mean square + eps, times weight [width]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def reference(problem: Problem) -> Rows:
    """Return float64 rows of out; where dout was drawn, dx and dweight too."""
    return evaluate(problem, FORM, rms_norm, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same from torch's `rms_norm`: float32 on the CPU, 16 bits on the GPU."""

    def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, formula, torch.float32)
    return evaluate(problem, FORM, formula, getattr(torch, problem.shape.dtype), "cuda")
