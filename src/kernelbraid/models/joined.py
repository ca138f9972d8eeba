"""Projections that read the same rows as one matrix, over parameters that keep their names and shapes.

Parameters that lie one after the other in one storage are one matrix already: `lay_adjacent` puts them
there, in place, and `join` returns that matrix without a copy. Parameters that lie apart, because they were
moved or replaced since, are copied together by every call. Both give the same bits, values and gradients
alike: whether memory is shared is never a numeric choice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelbraid.ops.dispatch import is_traced


def adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether tensors lie one after the other, whole rows, in one storage."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        same = part.dtype == first.dtype and part.shape[1:] == first.shape[1:] and part.is_contiguous()
        if not same or part.data_ptr() != end:
            return False
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return False
        end += part.numel() * part.element_size()
    return True


def alias(parts: Sequence[Tensor]) -> Tensor:
    """The matrix that adjacent tensors are: their memory, no part of any graph."""
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    found = torch.empty(0, dtype=first.dtype, device=first.device)
    with torch.no_grad():
        return found.set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())


def lay_adjacent(parts: Sequence[Tensor]) -> None:
    """Move tensors into one storage, one after the other; they stay the same objects with the same values.

    Left where they are: those in memory shared with other processes, and those that are views of a larger
    storage, whose other owners would no longer see their writes.
    """
    if len(parts) < 2 or adjacent(parts):
        return
    for part in parts:
        whole = part.untyped_storage().nbytes() == part.numel() * part.element_size()
        if not whole or _other_processes(part):
            return
    matrix = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, torch.split(matrix, [len(part) for part in parts]), strict=True):
        part.data = place


def _other_processes(part: Tensor) -> bool:
    """Whether other processes may see a tensor's memory."""
    return part.is_cpu and bool(part.untyped_storage().is_shared())


def lay_apart(parts: Sequence[Tensor]) -> None:
    """Give adjacent tensors a storage of their own each: the opposite of `lay_adjacent`."""
    if len(parts) > 1 and adjacent(parts):
        for part in parts:
            part.data = part.detach().clone()


def join(parts: Sequence[Tensor]) -> Tensor:
    """One matrix of all rows, differentiable in its parts.

    Args:
        parts: [rows, width] each, or vectors; of one dtype and device.

    Returns:
        [all rows, width]: the parts' own memory where they are adjacent, otherwise a copy.
    """
    if len(parts) == 1:
        return parts[0]
    if is_traced(parts[0]) or not adjacent(parts):
        return torch.cat(list(parts))
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        found: Tensor = _Join.apply(*parts)  # type: ignore[no-untyped-call]
        return found
    return alias(parts)


class _Join(torch.autograd.Function):
    """`alias`, recorded: the gradient of each part is that of its rows."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        # Saved for their versions alone: autograd refuses a backward after one was changed in place.
        ctx.save_for_backward(*parts)
        return alias(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        pieces = torch.split(gradient, [len(part) for part in ctx.saved_tensors])
        return tuple(
            piece if needed else None for piece, needed in zip(pieces, ctx.needs_input_grad, strict=True)
        )
