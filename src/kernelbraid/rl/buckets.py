"""Decode steps in a few fixed sizes, which a GPU replays as CUDA graphs.

A step is padded to the next size with rows of nobody, each at a place of its own in pages that no request
holds. What is padded changes no bit of a row: the operators' contracts say so. Without a GPU the same padded
calls run as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
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


def uses_graphs(asked: bool | None, device: torch.device, waits: bool) -> bool:
    """Whether decode steps are padded, and captured on a GPU.

    Args:
        asked: yes, no, or None to choose: yes on GPUs where it can be done.
        device: of the model.
        waits: whether its operators read device tensors on the host.

    Raises:
        ValueError: graphs are asked for and no graph can hold the operators.
    """
    impossible = device.type == "cuda" and waits
    if asked and impossible:
        raise ValueError(
            "graphs must be off or None: the decoder's operators read device tensors on the host, which a "
            "CUDA graph cannot hold"
        )
    return device.type == "cuda" and not impossible if asked is None else asked


def page_table(tables: Sequence[Sequence[int]], rows: int, columns: int) -> Tensor:
    """Pages of some requests as int32 [rows, columns] on the host, 0 where there is none.

    Arrays of C integers are copied as they are; lists are slower.
    """
    table = np.zeros((rows, columns), dtype=np.int32)
    for b, pages in enumerate(tables):
        table[b, : len(pages)] = np.asarray(pages, dtype=np.int32)
    return torch.from_numpy(table)


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
    table = page_table(tables, rows, columns)
    used = scratch[:columns]
    table[len(ids) :, : len(used)] = torch.tensor(used, dtype=torch.int32)
    return DecodeInputs(
        torch.tensor([*ids, *[0] * missing], dtype=torch.int32),
        table,
        torch.tensor([*lengths, *range(1, missing + 1)], dtype=torch.int32),
        context,
    )


Step = Callable[[], Tensor]


def captures(device: torch.device) -> Callable[[Step], Step]:
    """What makes CUDA graphs of steps on fixed tensors: each call of one replays it into the same result.

    All of them share one pool of memory, so a result holds until any of them is called again.
    """
    pool = torch.cuda.graph_pool_handle()

    def captured(step: Step) -> Step:
        with torch.cuda.device(device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()  # compiles what is to be captured; it writes what the replay will write again
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return captured


class Buckets:
    """Runs decode steps in fixed sizes, one graph a size, captured when it is first needed.

    Args:
        decoder: the model.
        cache: its pages, those of nobody included.
        scratch: the pages of nobody.
        largest: most rows.
        most: tokens of the longest request that the cache can hold.
        capture: what makes a step repeatable; by default `captures` on GPUs, nothing on CPUs.
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
        graphs = capture is None and device.type == "cuda"
        self._capture = captures(device) if graphs else capture or (lambda step: step)
        self.steps: dict[tuple[int, int], tuple[DecodeInputs, Step]] = {}
        self._batches: dict[tuple[int, int], Paged] = {}

    def run(
        self, ids: Sequence[int], tables: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> Tensor | None:
        """Hidden states [R, hidden] of R requests' new tokens, overwritten by the next call.

        None where there are more rows than the largest size. Scores are left to the caller: those of every
        size would stay in memory with its graph.
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
        size = rows, context
        known = self.steps.get(size)
        fixed = known[0] if known else self._fixed(size, given)
        for name in ("ids", "page_table", "lengths"):
            getattr(fixed, name).copy_(getattr(given, name))
        batch = self._batches[size]
        singles = torch.arange(rows + 1, dtype=torch.int32)
        host = Paged(given.page_table, singles, given.lengths, 1, given.longest)
        self._decoder.plan(self._cache, batch, host, fixed=True)
        if known is None:

            def step() -> Tensor:
                return self._decoder.rollout(fixed.ids, self._cache, batch)

            known = self.steps[size] = fixed, self._capture(step)
        return known[1]()[: len(ids)]

    def _fixed(self, size: tuple[int, int], given: DecodeInputs) -> DecodeInputs:
        """Tensors that a size's steps read, where they stay."""
        device = self._decoder.weights.norm.device
        ids, table, lengths = (
            each.to(device, copy=True) for each in (given.ids, given.page_table, given.lengths)
        )
        singles = torch.arange(len(given.ids) + 1, dtype=torch.int32, device=device)
        self._batches[size] = Paged(table, singles, lengths, 1, given.longest)
        return DecodeInputs(ids, table, lengths, given.longest)
