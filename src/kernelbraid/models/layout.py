"""Where the tokens of a padded or packed batch are: what unified attention needs, worked out once a forward.

Attention's order starts at a request's first real token. A batch with an attention mask is therefore
unpadded: rows of real tokens only, one request after the other, positions counted from the mask. A cache of
transformers is read as pages, slots of padding left out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernelbraid.models.layer import packed_positions

LARGEST_PAGE = 256


@dataclass(frozen=True)
class Layout:
    """The real tokens of a batch [B, S]."""

    batch: int
    length: int
    real: Tensor | None
    """[T] int64: rows of [B * S] that hold tokens; None where all do."""
    positions: Tensor
    """[T] int32, of each token in its request."""
    cu_seqlens: Tensor
    """[requests + 1] int32, of the new tokens."""
    max_seqlen: int
    pages: "Pages | None" = None
    """Of a cache that held tokens before this call."""

    def unpadded(self, x: Tensor) -> Tensor:
        """Rows of tokens: [B, S, ...] to [T, ...]."""
        rows = x.reshape(self.batch * self.length, *x.shape[2:])
        return rows if self.real is None else rows.index_select(0, self.real)

    def padded(self, rows: Tensor) -> Tensor:
        """The opposite, zeros where there is padding: [T, ...] to [B, S, ...]."""
        if self.real is not None:
            whole = rows.new_zeros((self.batch * self.length, *rows.shape[1:]))
            rows = whole.index_copy(0, self.real, rows)
        return rows.view(self.batch, self.length, *rows.shape[1:])


@dataclass(frozen=True)
class Pages:
    """How the slots of a cache [B, K] are read as pages."""

    slots: Tensor | None
    """[B, most keys] int64: a request's real slots in order, then others; None where all K are real."""
    table: Tensor
    """[B, pages of a request] int32."""
    page_size: int
    seqlens: Tensor
    """[B] int32: real keys of each request, new tokens included."""
    longest: int

    def of(self, cached: Tensor) -> Tensor:
        """[B, Hkv, K, D] as [pages, page_size, Hkv, D]; a copy where slots are left out or K is no page."""
        kept = cached.transpose(1, 2)
        if self.slots is not None:
            index = self.slots[:, :, None, None].expand(-1, -1, *kept.shape[2:])
            kept = kept.gather(1, index)
        missing = self.table.shape[1] * self.page_size - kept.shape[1]
        if missing:
            kept = pad(kept, (0, 0, 0, 0, 0, missing))
        return kept.reshape(self.table.numel(), self.page_size, *kept.shape[2:])


def layout(
    shape: tuple[int, int],
    device: torch.device,
    *,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    past: int = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    alone: bool = True,
) -> Layout:
    """Find the real tokens of a batch.

    Args:
        shape: (B, S) of the new tokens.
        device: of the model.
        mask: [B, past + S], nonzero where a slot holds a token; None: all do.
        positions: [B or 1, S] as the caller states them, or None. They have to be those that the mask gives;
            without mask and cache they may count from 0 several times in a row: packed sequences.
        past: slots that the cache held before.
        cu_seqlens: [sequences + 1] int32: row 0 holds packed sequences that begin there.
        max_seqlen: at least the longest of them.
        alone: whether there is no cache, so that positions may mean packed sequences.

    Raises:
        ValueError: an argument does not fit the others; the message names it.
    """
    batch, length = shape
    if positions is not None and positions.shape not in ((batch, length), (1, length)):
        raise ValueError(f"position_ids must be [{batch}, {length}], got {list(positions.shape)}")
    if cu_seqlens is not None:
        if batch != 1 or not alone or mask is not None:
            raise ValueError(
                "cu_seq_lens_q is for one row of packed sequences, without attention_mask and cache"
            )
        return packed(cu_seqlens, length, max_seqlen, positions)
    if mask is None:
        if positions is None or not alone:
            return _whole(batch, length, past, device, positions)
        counted: Layout = _counted(batch, length, positions)
        return counted
    masked: Layout = _masked(batch, length, mask, past, positions)
    return masked


def packed(cu_seqlens: Tensor, tokens: int, max_seqlen: int | None, positions: Tensor | None) -> Layout:
    """One row of sequences that begin at stated places."""
    if max_seqlen is None:
        max_seqlen = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    cu_seqlens = cu_seqlens.to(torch.int32)
    max_seqlen = int(max_seqlen)
    counted = packed_positions(cu_seqlens, tokens)
    if positions is not None and not torch.equal(positions.reshape(-1).int().to(counted.device), counted):
        raise ValueError("position_ids differ from those of cu_seq_lens_q: leave position_ids out")
    return Layout(1, tokens, None, counted, cu_seqlens, max_seqlen)


def _whole(batch: int, length: int, past: int, device: torch.device, positions: Tensor | None) -> Layout:
    """Rows without padding."""
    new = torch.arange(past, past + length, dtype=torch.int32, device=device)
    if positions is not None and not bool((positions.to(device) == new).all()):
        raise ValueError(
            f"position_ids must be {past} to {past + length - 1}, the places after what the cache holds: "
            "leave position_ids out, or pass the attention_mask that they come from"
        )
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    pages = None
    if past:
        seqlens = torch.full((batch,), past + length, dtype=torch.int32, device=device)
        pages = _pages(batch, None, seqlens, past + length)
    return Layout(batch, length, None, new.repeat(batch), offsets, length, pages)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _counted(batch: int, length: int, positions: Tensor) -> Layout:
    """Rows whose positions count from 0 once or several times."""
    rows = positions.expand(batch, -1)
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1] + 1
    if bool((rows[begins] != 0).any()):
        raise ValueError(
            "position_ids must count from 0 in every sequence: pass the attention_mask of a padded batch and "
            "leave position_ids out"
        )
    starts = begins.reshape(-1).nonzero().reshape(-1)
    offsets = pad(starts, (0, 1), value=batch * length).int()
    longest = int(offsets.diff().max()) if len(starts) else 0
    return Layout(batch, length, None, rows.reshape(-1).int(), offsets, longest)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _masked(batch: int, length: int, mask: Tensor, past: int, positions: Tensor | None) -> Layout:
    """Rows with padding, wherever it is."""
    if mask.shape != (batch, past + length):
        raise ValueError(
            f"attention_mask must be [{batch}, {past + length}], a place for every slot of the cache and "
            f"every new token, got {list(mask.shape)}"
        )
    slots = mask != 0
    if bool(slots.all()):
        return _whole(batch, length, past, mask.device, positions)
    counts = slots.cumsum(1, dtype=torch.int32)
    new = slots[:, past:]
    real = new.reshape(-1).nonzero().reshape(-1)
    counted = (counts[:, past:] - 1).reshape(-1)[real]
    if positions is not None:
        stated = positions.to(mask.device).expand(batch, -1).reshape(-1)
        if not torch.equal(stated[real].int(), counted):
            raise ValueError(
                "position_ids differ from those that attention_mask gives, which count real tokens: leave "
                "position_ids out"
            )
    lengths = new.sum(1, dtype=torch.int32)
    offsets = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    pages = None
    if past:
        longest = int(counts[:, -1].max())
        order = torch.argsort(slots.logical_not().byte(), dim=1, stable=True)[:, : max(1, longest)]
        pages = _pages(batch, order, counts[:, -1].contiguous(), longest)
    return Layout(batch, length, real, counted, offsets, int(lengths.max()), pages)


def _pages(batch: int, slots: Tensor | None, seqlens: Tensor, longest: int) -> Pages:
    page_size = max(1, min(LARGEST_PAGE, longest))
    count = max(1, -(-longest // page_size))
    table = torch.arange(batch * count, dtype=torch.int32, device=seqlens.device).view(batch, count)
    return Pages(slots, table, page_size, seqlens, longest)


def cached_tokens(cache: Any) -> int:
    """Slots that a cache of transformers holds.

    Raises:
        ValueError: it is of a kind that unified attention does not read.
    """
    if cache is None:
        return 0
    layers = getattr(cache, "layers", None)
    kinds = {type(each).__name__ for each in layers} if layers is not None else {type(cache).__name__}
    if layers is None or not kinds <= {"DynamicLayer"}:
        raise ValueError(
            f"cache is a {type(cache).__name__} of {', '.join(sorted(kinds))}, which unified attention does "
            "not read: pass a DynamicCache, without cache_implementation"
        )
    return int(cache.get_seq_length())
