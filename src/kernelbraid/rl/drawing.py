"""From the scores of a step's rows to tokens, with the log-probabilities that are recorded of them.

Penalties, then the bias, then the temperature, then min-p, top-k and top-p, as contract `sample` 1 orders
them. What is cut gets a score of -inf here, and the token is drawn and recorded from the same scores:
`processed_logprobs` are exactly those of what was drawn from. Each row is computed alone, by operations that
round every element correctly, so that no bit depends on the rows beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import factorial

import numpy as np
import torch
from torch import Tensor

from kernelbraid.ops.logprob.api import logprob_of_logits
from kernelbraid.ops.sample.api import sample
from kernelbraid.rl.records import Sampling

UNITS = 40
"""Weights of cuts are counted in 2^-40 of the largest, as in contract `sample` 1."""

CUT_AT_A_TIME = 1 << 22
"""Scores that a GPU cuts in one call, some 60 bytes each meanwhile; a CPU cuts row by row, in its cache."""

LN2, LOG2E = 0.6931471805599453, 1.4426950408889634
SERIES = tuple(float(Fraction(LN2) ** n / factorial(n)) for n in range(16))
"""Of 2^f for f from -0.5 to 0.5, each coefficient rounded once."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a row's token is drawn with."""

    sampling: Sampling
    seed: int
    sample_index: int
    ids: Sequence[int]
    """The prompt and the tokens after it so far."""
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """What was drawn for each row."""

    tokens: list[int]
    logprobs: list[float]
    """Under the whole distribution at the temperature; NaN for greedy rows, which have none."""
    processed: list[float]
    """Under what the token was drawn from; NaN for greedy rows and for those where nothing was processed."""


def draw(logits: Tensor, rows: Sequence[Row]) -> Tokens:
    """Draw a token a row.

    Args:
        logits: [R, vocabulary] float32.
        rows: R of them.

    Bits: a row's token and numbers depend on the row alone.
    """
    device = logits.device
    changed = [i for i, row in enumerate(rows) if row.sampling.processed]
    scores = logits
    if changed:
        scores = logits.clone()
        for i in changed:
            _penalise(scores[i], rows[i].sampling, rows[i].ids, rows[i].prompt_length)
        cuts = [_Cut.of(row.sampling) for row in rows]
        for cut in dict.fromkeys(cuts):
            if cut is not None:
                _cut(scores, [i for i, each in enumerate(cuts) if each == cut], cut)

    def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    found = sample(
        scores,
        seeds=column([row.seed for row in rows], torch.int64),
        samples=column([row.sample_index for row in rows], torch.int32),
        positions=column([len(row.ids) for row in rows], torch.int32),
        temperature=column([row.sampling.temperature for row in rows], torch.float64),
    )
    logprobs, processed = [float("nan")] * len(rows), [float("nan")] * len(rows)
    for temperature in dict.fromkeys(row.sampling.temperature for row in rows):
        if temperature == 0:
            continue
        at = [i for i, row in enumerate(rows) if row.sampling.temperature == temperature]
        _record(logprobs, logits, found, at, temperature)
        _record(processed, scores, found, [i for i in at if rows[i].sampling.processed], temperature)
    return Tokens(found.tolist(), logprobs, processed)


def processed_logits(logits: Tensor, sampling: Sampling, ids: Sequence[int], prompt_length: int) -> Tensor:
    """The scores that a token is drawn from, before the temperature: penalised, biased, and cut to -inf.

    Args:
        logits: [vocabulary] float32, of the state after `ids`.
        sampling: names penalties, biases and cuts.
        ids: the prompt and the tokens after it so far.
        prompt_length: how many of them are the prompt.

    Returns:
        [vocabulary] float32.

    Bits: of float32 operations on single elements: those of one row alone, on any device.
    """
    scores = logits.clone()
    _penalise(scores, sampling, ids, prompt_length)
    cut = _Cut.of(sampling)
    if cut is not None:
        _cut(scores[None], [0], cut)
    return scores


@dataclass(frozen=True, slots=True)
class _Cut:
    """How rows are cut; rows that share it are cut in the same calls."""

    inverse_temperature: float
    min_p: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, sampling: Sampling) -> "_Cut | None":
        """None where nothing is cut."""
        if sampling.greedy or not sampling.truncates:
            return None
        return cls(sampling.inverse_temperature, sampling.min_p, sampling.top_k, sampling.top_p)


def _cut(scores: Tensor, at: Sequence[int], cut: _Cut) -> None:
    """Set what is cut of some rows to -inf, a few rows at a time so that memory stays small."""
    most = 1 if scores.is_cpu else max(1, CUT_AT_A_TIME // scores.shape[1])
    for start in range(0, len(at), most):
        chosen = torch.tensor(at[start : start + most], dtype=torch.int64, device=scores.device)
        rows = scores[chosen]
        scores[chosen] = rows.masked_fill_(~_kept(rows, cut), float("-inf"))


def _penalise(scores: Tensor, sampling: Sampling, ids: Sequence[int], prompt_length: int) -> None:
    """Repetition over prompt and completion; presence and frequency over the completion; then the bias."""
    device = scores.device
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(ids)), dtype=torch.int64, device=device)
        held, factor = scores[seen], scores.new_tensor(sampling.repetition_penalty)
        scores[seen] = torch.where(held > 0, held / factor, held * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts: dict[int, int] = {}
        for token in ids[prompt_length:]:
            counts[token] = counts.get(token, 0) + 1
        seen = torch.tensor(list(counts), dtype=torch.int64, device=device)
        less = [sampling.frequency_penalty * n + sampling.presence_penalty for n in counts.values()]
        scores[seen] = scores[seen] - torch.tensor(less, dtype=torch.float32, device=device)
    if sampling.logit_bias:
        biased = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.int64, device=device)
        added = [added for _, added in sampling.logit_bias]
        scores[biased] = scores[biased] + torch.tensor(added, dtype=torch.float32, device=device)


def _kept(scores: Tensor, cut: _Cut) -> Tensor:
    """Which tokens of each row stay after min-p, top-k and top-p, bool [R, vocabulary].

    Weights are integers, so that sums have no order; NaN counts as -inf.
    """
    scaled = scores * scores.new_tensor(cut.inverse_temperature)
    scaled.masked_fill_(scaled.isnan(), float("-inf"))
    top = scaled.amax(1, keepdim=True)
    weights = _exp(torch.where(scaled == top, 0.0, scaled.double() - top))
    stays = weights >= cut.min_p
    if cut.top_k == 0 and cut.top_p == 1:
        return stays
    order = torch.sort(scaled, dim=1, descending=True, stable=True).indices
    stays = stays.gather(1, order)
    if cut.top_k:
        stays[:, cut.top_k :] = False
    if cut.top_p < 1:
        units = (weights.gather(1, order) * 2.0**UNITS).floor() * stays
        units = units.long()
        reached = units.cumsum(1)
        wanted = (reached[:, -1:].double() * float(np.float32(cut.top_p))).long().clamp(min=1)
        stays &= (reached - units) < wanted
    return torch.empty_like(stays).scatter_(1, order, stays)


def _exp(x: Tensor) -> Tensor:
    """exp(x) of x <= 0 in float64, by products and sums alone: an element has the same bits anywhere."""
    exponent = (x * LOG2E).clamp_(min=-1000.0)
    whole = exponent.round()
    rest = exponent.sub_(whole)
    value = torch.full_like(rest, SERIES[-1])
    for coefficient in reversed(SERIES[:-1]):
        value.mul_(rest).add_(coefficient)
    power = ((whole.long() + 1023) << 52).view(torch.float64)
    return value.mul_(power)


def _record(into: list[float], scores: Tensor, tokens: Tensor, at: list[int], temperature: float) -> None:
    if not at:
        return
    rows, wanted = scores, tokens
    if len(at) < len(scores):
        chosen = torch.tensor(at, dtype=torch.int64, device=scores.device)
        rows, wanted = scores[chosen], tokens[chosen]
    found = logprob_of_logits(rows, wanted, temperature=temperature)
    assert isinstance(found, Tensor)
    for i, value in zip(at, found.tolist(), strict=True):
        into[i] = value
