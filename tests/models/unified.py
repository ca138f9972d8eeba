"""Tiny transformers models for the tests of `unify`, and batches of the same sequences in every form."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tests.models.test_load import made

from kernelbraid.models.relations import roll_out
from kernelbraid.models.shared import ModelDecoder
from kernelbraid.models.unify import Unification, unify

NAMES = ("llama", "llama3", "qwen2", "qwen3", "qwen3_moe")
LENGTHS = (33, 1, 17, 50)


def quietly(model: Any, **options: Any) -> Unification:
    """`unify` without its warning of missing certificates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return unify(model, **options)


def unified(name: str, **changes: object) -> Any:
    """A tiny model of a family with random weights, unified."""
    model = made(name, **changes)
    assert quietly(model).complete
    return model


def sequences(
    lengths: Sequence[int] = LENGTHS, seed: int = 1, low: int = 0, high: int = 200
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (n,), generator=generator) for n in lengths]


def packed(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids one after the other, where sequences begin, and the longest one."""
    offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).to(torch.int32)
    return torch.cat(list(parts)), offsets, max(len(part) for part in parts)


def padded(parts: Sequence[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B, longest], padding on the left, on the right, or somewhere between."""
    longest = max(len(part) for part in parts)
    ids, mask = torch.zeros(2, len(parts), longest, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    for row, part in enumerate(parts):
        places = {
            "left": torch.arange(longest - len(part), longest),
            "right": torch.arange(len(part)),
            "between": torch.randperm(longest, generator=generator)[: len(part)].sort().values,
        }[side]
        ids[row, places], mask[row, places] = part, 1
    return ids, mask


def bits(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.dtype == torch.float32
    return tensor.detach().contiguous().view(torch.int32)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and bits."""
    return one.shape == other.shape and one.numel() > 0 and torch.equal(bits(one), bits(other))


def packed_logits(decoder: ModelDecoder, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits of the Decoder's packed forward, of all tokens."""
    with torch.no_grad():
        return decoder.logits(decoder.hidden(*packed(parts)))


def decoded_logits(decoder: ModelDecoder, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits of the Decoder's rollout, token by token through the paged cache."""
    with torch.no_grad():
        found = roll_out(decoder, parts, [[1] * len(part) for part in parts], page_size=5)
        return decoder.logits(torch.cat(found.hidden))


def call(model: Any, *arguments: Any, **options: Any) -> Any:
    with torch.no_grad():
        return model(*arguments, **options)
