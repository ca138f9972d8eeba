"""Rows and gradients of an operator on rows by a formula in torch: the float64 reference, and the vendor's.

A formula takes the operator's inputs, parameters and scalars as keywords and returns its outputs in order,
differentiable. What it gives is split into requests as an audit expects it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernelbraid.ops.problem import WHOLE_PROBLEM, Array, Problem, Rows
from kernelbraid.ops.rows import RowForm, finite

Formula = Callable[..., Tensor | tuple[Tensor, ...]]


def evaluate(
    problem: Problem, form: RowForm, formula: Formula, dtype: torch.dtype, device: str = "cpu"
) -> Rows:
    """Return every request's outputs and, where their gradients were drawn, the gradients of inputs and
    parameters, computed in `dtype`.

    Rows of a row that holds NaN or infinity follow the formula; gradients are taken of finite numbers, as in
    the problem's programs.
    """
    shape = problem.shape
    form = form.under(dict(shape.constant_axes))
    ends = np.cumsum((0, *shape.rows))
    total = int(ends[-1])

    def tensor(array: Array, keep_integers: bool = True) -> Tensor:
        if array.dtype.kind == "i":
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)
        return torch.from_numpy(np.asarray(array, np.float32)).to(device, dtype)

    def packed(name: str, only_finite: bool) -> Tensor:
        blocks = [request[name] for request in problem.requests if len(request[name])]
        joined = np.concatenate(blocks) if blocks else np.empty((0,), np.float32)
        return tensor(finite(joined) if only_finite else joined)

    rows: Rows = {}
    if not total:
        return rows
    parameters = {each.name: tensor(problem.shared[each.name]) for each in form.parameters}

    def outputs(inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        found = formula(**inputs, **parameters, **dict.fromkeys(form.absent), **problem.scalars)
        return found if isinstance(found, tuple) else (found,)

    def keep(name: str, value: Tensor) -> None:
        array: np.ndarray[Any, Any] = value.detach().to("cpu", torch.float64).numpy()
        for b, count in enumerate(shape.rows):
            if count:
                rows[name, b] = array[ends[b] : ends[b + 1]]

    with torch.no_grad():
        found = outputs({each.name: packed(each.name, False) for each in form.inputs}, parameters)
    for each, value in zip(form.outputs, found, strict=True):
        keep(each.name, value)
    gradients = form.gradients
    if gradients is None or not all(g.name in r for r in problem.requests for g in gradients.given):
        return rows
    inputs = {each.name: packed(each.name, True) for each in form.inputs}
    leaves = {
        name: value.requires_grad_()
        for name, value in {**inputs, **parameters}.items()
        if value.is_floating_point()
    }
    wanted = [(each.name, leaves[each.name.removeprefix("d")]) for each in gradients.rows]
    summed = [(each.name, leaves[each.name.removeprefix("d")]) for each in gradients.parameters]
    given = [packed(each.name, True) for each in gradients.given]
    differentiable = [value for value in outputs(inputs, parameters) if value.requires_grad]
    values = torch.autograd.grad(differentiable[: len(given)], [leaf for _, leaf in wanted + summed], given)
    for (name, _), value in zip(wanted, values, strict=False):
        keep(name, value)
    for (name, _), value in zip(summed, values[len(wanted) :], strict=True):
        rows[name, WHOLE_PROBLEM] = value.detach().to("cpu", torch.float64).numpy()
    return rows
