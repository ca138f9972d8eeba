"""Completions as a rollout would record them, in plain numbers."""

from dataclasses import replace
from typing import Any

import torch

from kernelbraid.rl.records import Completion, Finish, RolloutBatch, Sampling, Snapshot

SNAPSHOT = Snapshot(version=3, bits_id="a" * 12, dtype="float32", device="cpu", run="first")


def completion(prompt_index: int = 0, sample_index: int = 0, length: int = 4, **changes: Any) -> Completion:
    """One with all numbers recorded; `changes` replaces fields."""
    draw = torch.Generator().manual_seed(100 * prompt_index + sample_index)
    numbers = torch.randn(length, generator=draw)
    made = Completion(
        prompt=torch.arange(1, 4, dtype=torch.int32),
        tokens=torch.randint(0, 50, (length,), generator=draw, dtype=torch.int32),
        sampling=Sampling(temperature=0.8),
        finish=Finish.END,
        snapshot=SNAPSHOT,
        prompt_index=prompt_index,
        sample_index=sample_index,
        logprobs=-numbers.abs(),
        values=numbers,
    )
    return replace(made, **changes)


def batch(number: int = 0, prompts: int = 3, samples: int = 2, **changes: Any) -> RolloutBatch:
    """Groups of completions, of other lengths each."""
    return RolloutBatch(
        number,
        tuple(completion(p, s, length=2 + p + s, **changes) for p in range(prompts) for s in range(samples)),
    )
