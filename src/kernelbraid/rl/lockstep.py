"""A plain engine: prompts in one call, then one token of each completion a call, all in lockstep."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from kernelbraid.models.layer import Paged
from kernelbraid.models.model import Cache
from kernelbraid.ops.logprob.api import logprob_of_logits
from kernelbraid.ops.sample.api import sample
from kernelbraid.rl.drawing import Wanted
from kernelbraid.rl.policy import Policy
from kernelbraid.rl.records import Completion, Finish, Sampling, Snapshot

PAGE = 16


@dataclass(slots=True)
class _Open:
    """A completion that is being drawn."""

    wanted: Wanted
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    finish: Finish | None = None


def draw(
    policy: Policy,
    wanted: Sequence[Wanted],
    sampling: Sampling,
    snapshot: Snapshot,
    *,
    seed: int,
    ends: Sequence[int],
) -> list[Completion]:
    """Draw completions.

    Args:
        policy: draws them, and where it has a value head also values states.
        wanted: what to draw.
        sampling: parameters; penalties, biases and stop strings are not covered.
        snapshot: recorded with each.
        seed: with prompt, sample and position it decides every token.
        ends: tokens that end a sequence.
    """
    if sampling.changes_logits or sampling.stop:
        raise ValueError("sampling: penalties, logit_bias and stop strings are not covered")
    held = [_Open(each) for each in wanted]
    with torch.no_grad():
        _draw(policy, held, sampling, seed, {*ends, *sampling.stop_tokens})
    return [_closed(each, sampling, snapshot) for each in held]


def _draw(policy: Policy, held: Sequence[_Open], sampling: Sampling, seed: int, ends: set[int]) -> None:
    model, device = policy.decoder, policy.device
    lengths = [len(each.wanted.prompt) for each in held]
    pages = max(-(-(n + sampling.max_tokens) // PAGE) for n in lengths)
    table = torch.arange(len(held) * pages, dtype=torch.int32, device=device).view(len(held), pages)
    cache = Cache.empty(model.config, table.numel(), PAGE, model.weights.norm)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    ids = torch.cat([each.wanted.prompt for each in held]).to(device)
    keys = torch.tensor(lengths, dtype=torch.int32, device=device)
    hidden = model.rollout(ids, cache, Paged(table, starts, keys, max(lengths), max(lengths)))
    hidden = hidden[(starts[1:] - 1).long()]
    active = list(range(len(held)))
    for step in range(sampling.max_tokens):
        logits = model.logits(hidden)
        places = [lengths[i] + step for i in active]
        drawn = sample(
            logits,
            seeds=torch.tensor([_seed(seed, held[i].wanted.prompt_index) for i in active], device=device),
            samples=torch.tensor(
                [held[i].wanted.sample_index for i in active], dtype=torch.int32, device=device
            ),
            positions=torch.tensor(places, dtype=torch.int32, device=device),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        scores = logprob_of_logits(logits, drawn, temperature=sampling.temperature)
        assert isinstance(scores, Tensor)
        values = None if policy.value is None else policy.value(hidden, policy.operators)
        rows = []
        for row, (i, token) in enumerate(zip(active, drawn.tolist(), strict=True)):
            one = held[i]
            one.tokens.append(token)
            one.logprobs.append(scores[row])
            if values is not None:
                one.values.append(values[row])
            if token in ends:
                one.finish = Finish.END
            else:
                rows.append(row)
        active = [active[row] for row in rows]
        if not active or step + 1 == sampling.max_tokens:
            return
        keys = torch.tensor([lengths[i] + step + 1 for i in active], dtype=torch.int32, device=device)
        singles = torch.arange(len(active) + 1, dtype=torch.int32, device=device)
        batch = Paged(table[active], singles, keys, 1, max(lengths) + step + 1)
        hidden = model.rollout(drawn[rows], cache, batch)


def _closed(one: _Open, sampling: Sampling, snapshot: Snapshot) -> Completion:
    return Completion(
        prompt=one.wanted.prompt,
        tokens=torch.tensor(one.tokens, dtype=torch.int32),
        sampling=sampling,
        finish=one.finish or Finish.LENGTH,
        snapshot=snapshot,
        prompt_index=one.wanted.prompt_index,
        sample_index=one.wanted.sample_index,
        logprobs=torch.stack(one.logprobs).float().cpu(),
        values=torch.stack(one.values).float().cpu() if one.values else None,
    )


def _seed(seed: int, prompt_index: int) -> int:
    return (seed * 1_000_003 + prompt_index) % 2**62
