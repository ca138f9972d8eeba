"""Completions as packed batches of the update, cut so that the cut changes no bit.

Every sequence, prompt and completion, is filled up to a multiple of 64 tokens: causal attention keeps what
fills from what is before it, and it has no gradient. Sums over tokens then begin a block with each sequence
wherever a batch is cut, and go on from what is there (`models.accumulating`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernelbraid.models.accumulating import TOKEN_BLOCK
from kernelbraid.rl.records import Completion

IGNORED = -100
"""A target that does not count, as contract `logprob` 1 has it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some completions with their prompts, on a device."""

    ids: Tensor
    """int32 [S]: tokens of the sequences, each filled up with token 0."""
    cu_seqlens: Tensor
    """int32 [N + 1]."""
    max_seqlen: int
    rows: Tensor
    """int64 [R], ascending: rows of hidden states that the head reads, whole blocks of 64."""
    targets: Tensor
    """int32 [R]: the token after each of these rows, `IGNORED` where it is not of the completion."""
    counted: Tensor
    """int64 [T]: places among the R rows of the completions' tokens, in order."""


def filled(tokens: int) -> int:
    """The next multiple of 64."""
    return -(-tokens // TOKEN_BLOCK) * TOKEN_BLOCK


def padded(completion: Completion) -> int:
    """Tokens that a completion takes in a piece: prompt and completion without the last token, filled up."""
    return filled(max(1, len(completion.prompt) + len(completion.tokens) - 1))


def cut(completions: Sequence[Completion], most: int) -> Iterator[range]:
    """Runs of completions of at most `most` tokens; one that is longer alone is a run of its own.

    Args:
        completions: in the order of the step.
        most: tokens of a piece, filled up ones counted.
    """
    start = held = 0
    for i, each in enumerate(completions):
        tokens = padded(each)
        if i > start and held + tokens > most:
            yield range(start, i)
            start, held = i, 0
        held += tokens
    if start < len(completions):
        yield range(start, len(completions))


def piece(completions: Sequence[Completion], device: torch.device | str) -> Piece:
    """Lay completions out one after another.

    Args:
        completions: at least one.
        device: where the piece is used.
    """
    ids, rows, targets, counted = [], [], [], []
    offsets, first_row = [0], 0
    for each in completions:
        whole = torch.cat([each.prompt, each.tokens])
        size, start = padded(each), len(each.prompt) - 1
        sequence = torch.zeros(size, dtype=torch.int32)
        held = min(size, len(whole))
        sequence[:held] = whole[:held]
        low, high = start // TOKEN_BLOCK * TOKEN_BLOCK, filled(start + max(1, len(each.tokens)))
        after = torch.full((high - low,), IGNORED, dtype=torch.int32)
        after[start - low : start - low + len(each.tokens)] = each.tokens
        ids.append(sequence)
        rows.append(torch.arange(low, high) + offsets[-1])
        targets.append(after)
        counted.append(torch.arange(len(each.tokens)) + (first_row + start - low))
        offsets.append(offsets[-1] + size)
        first_row += high - low
    longest = max(b - a for a, b in pairwise(offsets))
    return Piece(
        torch.cat(ids).to(device),
        torch.tensor(offsets, dtype=torch.int32, device=device),
        longest,
        torch.cat(rows).to(device),
        torch.cat(targets).to(device),
        torch.cat(counted).to(device),
    )


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = rows
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        dx = dout.new_zeros(ctx.rows, *dout.shape[1:])
        return dx.index_copy_(0, index, dout), None, None


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor, each at most once: its gradient is copied, never added, so that it has one order."""
    found: Tensor = _Rows.apply(x, index, x.shape[0])  # type: ignore[no-untyped-call]
    return found
