"""Experts of a mixture in float64, with gradients; and the vendor's, to measure our error by. Needs torch."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernelbraid.ops.moe_experts.spec import FORM
from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import Problem, Rows


def moe_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, H] through the experts [T, k] of gate_up [E, 2 I, H] and down [E, H, I], weighted [T, k]."""
    out = torch.zeros_like(x)
    for number, (first, second) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
        tokens, slots = torch.nonzero(experts == number, as_tuple=True)
        gate, up = (x[tokens] @ first.T).chunk(2, -1)
        found = (silu(gate) * up) @ second.T * weights[tokens, slots, None]
        out = out.index_add(0, tokens, found)
    return out


def reference(problem: Problem) -> Rows:
    """Return float64 rows of out; where dout was drawn, all gradients too."""
    return evaluate(problem, FORM, moe_experts, torch.float64)


def vendor(problem: Problem) -> Rows:
    """Return the same from torch's matrix products: float32 on the CPU, 16 bits on the GPU."""
    if problem.shape.dtype == "float32":
        return evaluate(problem, FORM, moe_experts, torch.float32)
    return evaluate(problem, FORM, moe_experts, getattr(torch, problem.shape.dtype), "cuda")
