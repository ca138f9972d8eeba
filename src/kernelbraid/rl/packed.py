"""Numbers of packed tokens: which completion each belongs to, and sums in token order."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_offsets(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise ValueError unless offsets start at 0, never fall, and end at the number of tokens."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        found = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens must be int32 or int64 [completions + 1], got {found}")
    if cu_seqlens.is_cpu:  # elsewhere reading values would wait for the device
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] != tokens:
            raise ValueError(f"cu_seqlens must go up from 0 to {tokens}, the number of tokens, got {offsets}")


def owners(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Position of the completion that each token belongs to, int64 [T]."""
    check_offsets(cu_seqlens, tokens)
    counts = cu_seqlens.diff().long()
    numbers = torch.arange(len(counts), device=cu_seqlens.device)
    return torch.repeat_interleave(numbers, counts, output_size=tokens)


def spread(values: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Give each token its completion's number or flag: [N] to [T].

    Args:
        values: [N], any dtype.
        cu_seqlens: [N + 1] int32 or int64.
        tokens: T.

    Raises:
        ValueError: lengths disagree.
    """
    if values.dim() != 1 or len(values) != len(cu_seqlens) - 1:
        raise ValueError(
            f"values must have one number a completion, [{len(cu_seqlens) - 1}], got {list(values.shape)}"
        )
    return values[owners(cu_seqlens, tokens)]


class _OrderedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, start: float) -> Tensor:
        ctx.shape, ctx.dtype = terms.shape, terms.dtype
        numbers = np.empty(len(terms) + 1)
        numbers[0] = start
        numbers[1:] = terms.detach().cpu().numpy()
        total = np.add.accumulate(numbers)[-1]
        return torch.tensor(total, dtype=torch.float64, device=terms.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(ctx.dtype).expand(ctx.shape), None


def sum_in_token_order(terms: Tensor, start: float = 0.0) -> Tensor:
    """Add packed numbers from the first token to the last, in float64.

    A sum that is continued, with what the pieces before gave as `start`, has the bits of the sum of them all,
    wherever it is cut. On a GPU this waits for the device: the numbers are added on the host.

    Args:
        terms: [T] float32 or float64. The gradient of each is that of the result.
        start: what is added first.

    Returns:
        0-d float64, on the device of terms.
    """
    if terms.dim() != 1:
        raise ValueError(f"terms must be [tokens], got {list(terms.shape)}")
    if not terms.is_floating_point():
        terms = terms.double()
    found = _OrderedSum.apply(terms, float(start))  # type: ignore[no-untyped-call]
    assert isinstance(found, Tensor)
    return found
