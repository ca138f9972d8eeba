"""The phases of a training step before the update: drawing, scoring, old log-probabilities, advantages."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelbraid.rl.advantages import generalized_advantages, group_advantages, whiten
from kernelbraid.rl.config import GaeSection, Old
from kernelbraid.rl.losses import kl_estimate, token_rewards
from kernelbraid.rl.packed import spread
from kernelbraid.rl.policy import recompute
from kernelbraid.rl.records import Completion, RolloutBatch
from kernelbraid.rl.requests import group as requests_of
from kernelbraid.rl.spot_check import Recomputed
from kernelbraid.rl.tasks.feed import Prompt
from kernelbraid.rl.update import Prepared

if TYPE_CHECKING:
    from kernelbraid.rl.trainer import Trainer

PHASES = ("rollout", "reward", "old", "update")


@dataclass(slots=True)
class Clock:
    """Seconds of each phase, and the tokens that passed through."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tokens: dict[str, int] = field(default_factory=lambda: {"rollout": 0, "update": 0})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # what a GPU has left to do is this phase's
            self.seconds[name] += time.perf_counter() - start

    def add(self, other: "Clock") -> None:
        for name, value in other.seconds.items():
            self.seconds[name] += value
        for name, count in other.tokens.items():
            self.tokens[name] += count

    def speeds(self) -> dict[str, float]:
        """Tokens a second: drawn in `rollout`, prompts and completions of all epochs in `update`."""
        return {
            name: round(count / self.seconds[name], 3) if self.seconds[name] else 0.0
            for name, count in self.tokens.items()
        }


@dataclass(frozen=True, slots=True)
class Scored:
    """Rewards of a batch."""

    rewards: Tensor
    """float64 [N]; NaN where a reward could not be told."""

    @property
    def mean(self) -> float | None:
        """Over those that are known; None where none is."""
        known = [each for each in self.rewards.tolist() if not math.isnan(each)]
        return math.fsum(known) / len(known) if known else None


def rollout(trainer: "Trainer", number: int) -> tuple[RolloutBatch, list[Prompt]]:
    """Draw completions of the next prompts: every process its share, and all get the whole batch."""
    config, group = trainer.config, trainer.group
    prompts = trainer.feed.take(config.rollout.prompts)
    requests = [
        request
        for each in group.mine(prompts)
        for request in requests_of(
            each.tokens,
            config.sampling,
            prompt_index=each.position,
            samples=config.rollout.group_size,
        )
    ]
    found = trainer.engine.generate(requests, number=number)
    return RolloutBatch(number, tuple(group.gather(found.completions))), prompts


def score(trainer: "Trainer", batch: RolloutBatch, prompts: Sequence[Prompt]) -> Scored:
    """Rewards of all completions; each process computes those of its share."""
    examples = {each.position: each.example for each in prompts}
    found = [
        trainer.task.reward(examples[each.prompt_index], trainer.encoder.decode(each.tokens.tolist()))
        for each in trainer.group.mine(batch.completions)
    ]
    return Scored(torch.tensor(trainer.group.gather(found), dtype=torch.float64))


def prepare(trainer: "Trainer", batch: RolloutBatch, scored: Scored) -> Prepared:
    """Old log-probabilities, the reference's, and advantages of a batch, before its first step."""
    config = trainer.config
    old, values = old_numbers(trainer, batch)
    packed = batch.packed()
    mask = batch.counted(mask_truncated=config.update.mask_truncated)
    known = ~scored.rewards.isnan()
    mask &= spread(known, packed.cu_seqlens, len(mask))
    reference = None
    if trainer.reference is not None:
        model, most = trainer.reference, config.update.micro_batch_tokens
        reference = shared(
            trainer,
            batch.completions,
            lambda some: recompute(model, some, config.sampling.temperature, most),
        ).logprobs
    in_loss = reference if config.kl.placed == "loss" else None
    if config.algorithm == "grpo":
        advantages = group_advantages(scored.rewards, batch.group_offsets(), config.scale or "group")
        return Prepared(batch, packed.cu_seqlens, mask, old, advantages, reference=in_loss)
    assert values is not None
    kl = None
    if reference is not None and config.kl.placed == "reward":
        drawn = old if old is not None else recorded(batch.completions, values=False)
        kl = kl_estimate(config.kl.estimator, drawn, reference)
    rewards = token_rewards(
        torch.where(known, scored.rewards, 0.0).float(),
        packed.cu_seqlens,
        mask,
        kl=kl,
        kl_weight=config.kl.weight,
    )
    gae = config.gae or GaeSection()
    advantages, returns = generalized_advantages(
        rewards, values, packed.cu_seqlens, gamma=gae.gamma, lam=gae.lam
    )
    return Prepared(
        batch, packed.cu_seqlens, mask, old, whiten(advantages, mask), values, returns, reference=in_loss
    )


def old_numbers(trainer: "Trainer", batch: RolloutBatch) -> tuple[Tensor | None, Tensor | None]:
    """The snapshot's log-probabilities and values by the configured arm."""
    config = trainer.config
    needs_values = config.algorithm == "ppo"
    if config.reuse.old in (Old.BYPASS, Old.DETACH):
        values = recorded(batch.completions, values=True) if needs_values else None
        if config.reuse.old == Old.DETACH:
            return None, values
        return recorded(batch.completions, values=False), values

    def again(completions: Sequence[Completion]) -> Recomputed:
        temperature, most = config.sampling.temperature, config.update.micro_batch_tokens
        return shared(trainer, completions, lambda some: trainer.policy.recompute(some, temperature, most))

    found = trainer.old.resolve(batch, trainer.snapshot, again)
    return found.logprobs, found.values


def shared(trainer: "Trainer", completions: Sequence[Completion], compute: object) -> Recomputed:
    """What a function computes for completions: every process its share, and all get the whole."""
    group = trainer.group
    found: Recomputed = compute(group.mine(completions))  # type: ignore[operator]
    if group.world == 1:
        return found
    parts = group.gather([found])
    values = [each.values for each in parts if each.values is not None]
    return Recomputed(torch.cat([each.logprobs for each in parts]), torch.cat(values) if values else None)


def recorded(completions: Sequence[Completion], *, values: bool) -> Tensor:
    """Log-probabilities, or values, as the rollout recorded them."""
    found = [each.values if values else each.logprobs for each in completions]
    return torch.cat([torch.empty(0), *(each for each in found if each is not None)])
