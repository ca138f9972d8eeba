"""The fused step in float64, and in torch's arithmetic, to measure our error by. Needs torch."""

import numpy as np
import torch
from torch import Tensor

from kernelbraid.ops.problem import Array, Problem, Rows


def heads(
    x: Tensor, weight: Tensor | None, positions: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Heads x [T, H, D], normalized if there is a weight [D], their halves turned by their positions."""
    if weight is not None:
        x = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    c, s = (table[positions.long()][:, None] for table in (cos, sin))
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def _evaluate(problem: Problem, dtype: torch.dtype, device: str) -> Rows:
    def tensor(array: Array) -> Tensor:
        if array.dtype.kind == "i":
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)
        return torch.from_numpy(np.asarray(array, np.float32)).to(device, dtype)

    shared = {name: tensor(array) for name, array in problem.shared.items()}
    rows: Rows = {}
    for b, request in enumerate(problem.requests):
        positions = tensor(request["positions"])
        for name in ("q", "k"):
            about = positions, shared["cos"], shared["sin"], problem.scalars["eps"]
            found = heads(tensor(request[name]), shared.get(f"{name}_weight"), *about)
            rows[name, b] = found.to("cpu", torch.float64).numpy()
    return rows


def reference(problem: Problem) -> Rows:
    """Return float64 rows of q and k of every request; v is a copy."""
    return _evaluate(problem, torch.float64, "cpu")


def vendor(problem: Problem) -> Rows:
    """Return the same in the problem's dtype, every step rounded: float32 on the CPU, 16 bits on the GPU."""
    if problem.shape.dtype == "float32":
        return _evaluate(problem, torch.float32, "cpu")
    return _evaluate(problem, getattr(torch, problem.shape.dtype), "cuda")
