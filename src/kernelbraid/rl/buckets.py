"""Decode steps in a few fixed sizes, which a GPU replays as CUDA graphs.

A step is padded to the next size with rows of nobody, each at a place of its own in pages that no request
holds. What is padded changes no bit of a row: the operators' contracts say so. Without a GPU the same padded
calls run as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelbraid.models.layer import Paged
from kernelbraid.models.model import Cache, Decoder

SHORTEST_CONTEXT = 1024
MOST_MISSING = 7
"""Rows that `rows_of` adds at most."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One token each of some requests, on the host."""

    ids: Tensor
    """int32 [rows]."""
    page_table: Tensor
    """int32 [rows, columns]."""
    lengths: Tensor
    """int32 [rows]: keys of each row, the new token included."""
    longest: int
    """At least the largest of them."""


def rows_of(rows: int, largest: int) -> int | None:
    """What a step of `rows` rows is padded to: 1, 2, 4, then multiples of 8; None above `largest`."""
    size = next((each for each in (1, 2, 4) if rows <= each), -(-rows // 8) * 8)
    return size if size <= largest else None


def context_of(longest: int, most: int) -> int:
    """The longest context that a padded step allows for: a power of two from 1024, at most `most`."""
    context = SHORTEST_CONTEXT
    while context < longest:
        context *= 2
    return max(MOST_MISSING, min(context, most))


def scratch_pages(page_size: int) -> int:
    """Pages that padded rows need."""
    return -(-MOST_MISSING // page_size)


def padded(
    ids: Sequence[int],
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    rows: int,
    columns: int,
    context: int,
    scratch: Sequence[int],
) -> DecodeInputs:
    """Inputs of a decode step with rows of nobody after the requests' own.

    Args:
        ids: the requests' new tokens.
        tables: their pages.
        lengths: their keys, the new token included.
        rows: how many rows to make.
        columns: of the page table.
        context: what to allow for.
        scratch: pages of nobody: padded row i writes position i in them.
    """
    missing = rows - len(ids)
    table = torch.zeros(rows, columns, dtype=torch.int32)
    for b, pages in enumerate(tables):
        table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    used = scratch[:columns]
    table[len(ids) :, : len(used)] = torch.tensor(used, dtype=torch.int32)
    return DecodeInputs(
        torch.tensor([*ids, *[0] * missing], dtype=torch.int32),
        table,
        torch.tensor([*lengths, *range(1, missing + 1)], dtype=torch.int32),
        context,
    )


Step = Callable[[], tuple[Tensor, Tensor]]


def captured(step: Step) -> Step:
    """A CUDA graph of a step on fixed tensors: each call replays it into the same results."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles what is to be captured; it writes what the replay will write again
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return results

    return replay


class Buckets:
    """Runs decode steps in fixed sizes, one graph a size, captured when it is first needed.

    Args:
        decoder: the model.
        cache: its pages, those of nobody included.
        scratch: the pages of nobody.
        largest: most rows.
        most: tokens of the longest request that the cache can hold.
        capture: what makes a step repeatable; `captured` on GPUs, the step itself by default on CPUs.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        scratch: Sequence[int],
        *,
        largest: int,
        most: int,
        capture: Callable[[Step], Step] | None = None,
    ) -> None:
        self._decoder, self._cache, self._scratch = decoder, cache, list(scratch)
        self._largest, self._most = largest, most
        device = decoder.weights.norm.device
        self._capture = capture or (captured if device.type == "cuda" else lambda step: step)
        self.steps: dict[tuple[int, int], tuple[DecodeInputs, Step]] = {}

    def run(
        self, ids: Sequence[int], tables: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Hidden states [R, hidden] and scores [R, vocabulary] of R requests' new tokens.

        None where there are more rows than the largest size. The results are overwritten by the next call.
        """
        rows = rows_of(len(ids), self._largest)
        if rows is None:
            return None
        page_size = self._cache.k[0].shape[1]
        context = context_of(max(lengths), self._most)
        columns = max(-(-context // page_size), len(self._scratch))
        given = padded(
            ids, tables, lengths, rows=rows, columns=columns, context=context, scratch=self._scratch
        )
        if (rows, context) not in self.steps:
            self.steps[rows, context] = self._made(given)
        fixed, step = self.steps[rows, context]
        for name in ("ids", "page_table", "lengths"):
            getattr(fixed, name).copy_(getattr(given, name))
        hidden, scores = step()
        return hidden[: len(ids)], scores[: len(ids)]

    def _made(self, given: DecodeInputs) -> tuple[DecodeInputs, Step]:
        device = self._decoder.weights.norm.device
        ids, table, lengths = (
            each.to(device, copy=True) for each in (given.ids, given.page_table, given.lengths)
        )
        fixed = DecodeInputs(ids, table, lengths, given.longest)
        singles = torch.arange(len(given.ids) + 1, dtype=torch.int32, device=device)
        batch = Paged(fixed.page_table, singles, fixed.lengths, 1, given.longest)

        def step() -> tuple[Tensor, Tensor]:
            hidden = self._decoder.rollout(fixed.ids, self._cache, batch)
            return hidden, self._decoder.logits(hidden)

        return fixed, self._capture(step)
