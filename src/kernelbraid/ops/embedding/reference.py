"""Embedding in float64, with the gradient; and the vendor's, to measure our error by. Needs torch."""

import torch
from torch import Tensor

from kernelbraid.ops.embedding.spec import FORM
from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [V, width] by ids [T]."""
    return torch.nn.functional.embedding(ids, weight)


def reference(problem: Problem) -> Rows:
    """Return float64 rows of out; where dout was drawn, dweight too."""
    return evaluate(problem, FORM, embedding, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same from torch's `embedding`: float32 on the CPU, 16 bits on the GPU."""
    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, embedding, torch.float32)
    return evaluate(problem, FORM, embedding, getattr(torch, problem.shape.dtype), "cuda")
