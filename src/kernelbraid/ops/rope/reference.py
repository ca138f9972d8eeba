"""Rotary position embedding in float64, with gradients; and the vendor's, as a measure. Needs torch."""

import torch
from torch import Tensor

from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows
from kernelbraid.ops.rope.spec import FORM


def rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Heads of q and k [T, H, D], their halves turned by the angles of positions [T]."""
    c, s = (table[positions.long()][:, None] for table in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    return turned(q), turned(k)


def reference(problem: Problem) -> Rows:
    """Return float64 rows of q_out and k_out; where gradients were drawn, dq and dk too."""
    return evaluate(problem, FORM, rope, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same as models written in torch do, all in the problem's dtype, 16 bits on the GPU."""

    def formula(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        c, s = (torch.cat((table, table), -1)[positions.long()][:, None] for table in (cos, sin))

        def turned(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * c + torch.cat((-b, a), -1) * s

        return turned(q), turned(k)

    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, formula, torch.float32)
    return evaluate(problem, FORM, formula, getattr(torch, problem.shape.dtype), "cuda")
