"""SwiGLU in float64, with gradients; and the vendor's, to measure our error by. Needs torch."""

import torch
from torch import Tensor

from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows
from kernelbraid.ops.swiglu.spec import FORM


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) * up, element by element."""
    return torch.nn.functional.silu(gate) * up


def reference(problem: Problem) -> Rows:
    """Return float64 rows of out; where dout was drawn, dgate and dup too."""
    return evaluate(problem, FORM, swiglu, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same from torch's `silu` and product: float32 on the CPU, 16 bits on the GPU."""
    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, swiglu, torch.float32)
    return evaluate(problem, FORM, swiglu, getattr(torch, problem.shape.dtype), "cuda")
