"""The linear layer in float64, with gradients; and the vendor's, to measure our error by. Needs torch."""

import torch
from torch import Tensor

from kernelbraid.ops.linear.spec import FORM
from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] times the transpose of weight [N, K], plus bias [N] where there is one."""
    out = x @ weight.mT
    return out if bias is None else out + bias


def reference(problem: Problem) -> Rows:
    """Return float64 rows of out; where dout was drawn, dx, dweight and dbias too."""
    return evaluate(problem, FORM, linear, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same from torch's `linear`: float32 on the CPU, 16 bits on the GPU."""

    def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, formula, torch.float32)
    return evaluate(problem, FORM, formula, getattr(torch, problem.shape.dtype), "cuda")
