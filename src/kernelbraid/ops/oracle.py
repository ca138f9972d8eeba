"""Rows and gradients of an operator on rows by a formula in torch: the float64 reference, and the vendor's.

A formula takes the operator's inputs, parameters and scalars as keywords and returns its outputs in order,
differentiable. What it gives is split into requests as an audit expects it.

A GPU computes in float64 what its own operators are measured by, if there is one and it has the memory.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernelbraid.ops.formats import BFLOAT16
from kernelbraid.ops.problem import WHOLE_PROBLEM, Array, Problem, Rows
from kernelbraid.ops.rows import RowForm, finite

Formula = Callable[..., Tensor | tuple[Tensor, ...]]


HUGE = 1 << 26
"""Gradients of so many numbers are returned in float32: what that rounds away is far below any bound."""
RESERVED = 8 << 30
"""Bytes of the device that are given back at once where more were taken."""
_DEVICE = Lock()
"""Held while a GPU computes for one of several threads, so that their memory does not add up."""


def device_for(problem: Problem) -> str:
    """Where a problem's float64 rows are computed: on the GPU whose operators it is for, or on the CPU."""
    return "cuda" if problem.shape.dtype != "float32" and torch.cuda.is_available() else "cpu"


def evaluate(problem: Problem, form: RowForm, formula: Formula, dtype: torch.dtype, device: str = "") -> Rows:
    """Return every request's outputs and, where their gradients were drawn, the gradients of inputs and
    parameters, computed in `dtype` on `device`; by default on that of `device_for`.

    Rows of a row that holds NaN or infinity follow the formula; gradients are taken of finite numbers, as in
    the problem's programs.
    """
    chosen = device or device_for(problem)
    if chosen == "cpu":
        return _evaluate(problem, form, formula, dtype, chosen)
    try:
        with on_device():
            return _evaluate(problem, form, formula, dtype, chosen)
    except torch.OutOfMemoryError:
        if device:
            raise
    return _evaluate(problem, form, formula, dtype, "cpu")


@contextmanager
def on_device() -> Iterator[None]:
    """Compute on the GPU, one thread at a time, and give much memory back."""
    with _DEVICE:
        try:
            yield
        finally:
            if torch.cuda.is_available() and torch.cuda.memory_reserved() > RESERVED:
                torch.cuda.empty_cache()


def tensor_of(array: Array) -> Tensor:
    """An array as a tensor over the same memory, bfloat16 too; nobody writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arrays that are read-only
        if array.dtype == BFLOAT16:
            return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(array))


def _evaluate(problem: Problem, form: RowForm, formula: Formula, dtype: torch.dtype, device: str) -> Rows:
    shape = problem.shape
    form = form.under(dict(shape.constant_axes))
    ends = np.cumsum((0, *shape.rows))
    total = int(ends[-1])

    def tensor(array: Array) -> Tensor:
        found = tensor_of(array).to(device)
        return found if array.dtype.kind == "i" else found.to(dtype)

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
        kept = torch.float32 if value.numel() > HUGE else torch.float64
        rows[name, WHOLE_PROBLEM] = value.detach().to(kept).cpu().numpy()
    return rows
