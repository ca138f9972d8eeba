"""Log-probabilities of padded batches by the packed forward, for trainers that know rows and masks."""

from typing import Any

import torch
from torch import Tensor

from kernelbraid.models.shared import hidden_of, require_complete
from kernelbraid.ops.logprob.api import logprob

IGNORED = -100
"""A label that does not count, as contract `logprob` 1 has it."""


def padded_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    look: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label given the tokens before it, and the entropy there, differentiable.

    Padding is left out before anything is computed, and the head reads only rows whose label counts. On a GPU
    this waits for the device, to know how many tokens are real.

    Args:
        model: a model that `unify` covers as a whole.
        input_ids: [B, S] int32 or int64, padding anywhere.
        attention_mask: [B, S], 0 where there is padding.
        labels: [B, S] int32 or int64: the token that a slot holds where it is scored, -100 elsewhere.
        temperature: as in `logprob`.
        look: whether to look first if the model is unified as a whole; False for callers that looked.

    Returns:
        Log-probabilities and entropies, float32 [B, S - 1]: of slot s + 1 at place s. 0 where no
        label is, and where slot s is padding, so that nothing stands before it.

    Raises:
        ValueError: shapes differ, a module of the model is not unified, or an argument lies outside a
            contract.

    Bits: those of `packed_logprobs` of the same rows without padding.
    """
    shape = input_ids.shape
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"input_ids must be [batch, slots], got {list(shape)}")
    for name, each in (("attention_mask", attention_mask), ("labels", labels)):
        if each.shape != shape:
            given = list(each.shape)
            raise ValueError(f"{name} must have the shape of input_ids, {list(shape)}, got {given}")
    if look:
        require_complete(model)
    real = attention_mask.bool()
    lengths = real.sum(1, dtype=torch.int32)
    lengths = lengths[lengths > 0]
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    hidden = hidden_of(model, input_ids[real], offsets, max_seqlen=longest)
    after = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)[real]
    rows = torch.nonzero(after != IGNORED).flatten()
    places = torch.nonzero(real.flatten()).flatten()[rows]
    empty = torch.zeros(shape.numel(), dtype=torch.float32, device=hidden.device)
    if not len(rows):
        nothing = (empty + 0.0 * hidden.float().sum()).view(shape)[:, :-1]
        return nothing, nothing
    found = logprob(
        hidden.index_select(0, rows),
        model.lm_head.weight,
        after[rows],
        temperature=temperature,
        return_entropy=True,
    )
    scored, entropies = (empty.index_copy(0, places, each).view(shape)[:, :-1] for each in found)
    return scored, entropies
