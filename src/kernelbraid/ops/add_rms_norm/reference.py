"""Residual add and RMS norm in float64, with gradients; and the vendor's, as a measure. Needs torch."""

from functools import partial

import torch
from torch import Tensor

from kernelbraid.ops.add_rms_norm.spec import FORM
from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to a dtype, in its own dtype; gradients pass as they are."""
    exact = x.detach()
    return x + (exact.to(dtype).to(x.dtype) - exact)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sum x + residual [T, width], which is rounded to `dtype`, and its RMS norm: (norm, sum)."""
    total = rounded(x + residual, dtype)
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight, total


def reference(problem: Problem) -> Rows:
    """Return float64 rows of out and residual_out; where gradients were drawn, dx and dweight too."""
    dtype = getattr(torch, problem.shape.dtype)
    return evaluate(problem, FORM, partial(add_rms_norm, dtype=dtype), torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same from torch's sum and `rms_norm`: float32 on the CPU, 16 bits on the GPU."""

    def formula(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total

    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, formula, torch.float32)
    return evaluate(problem, FORM, formula, getattr(torch, problem.shape.dtype), "cuda")
