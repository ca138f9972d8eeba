"""Advantages: TRL's values, definitions in float64, groups of equal rewards, packing."""

import json
import math

import numpy as np
import pytest
import torch
from tests.rl import trl_values
from torch import Tensor

from kernelbraid.rl.advantages import generalized_advantages, group_advantages, whiten

RECORDED = json.loads(trl_values.FILE.read_text())


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_trls(scale: str) -> None:
    found = group_advantages(torch.tensor(RECORDED["inputs"]["scores"]), torch.tensor([0, 3, 6]), scale)
    torch.testing.assert_close(found, torch.tensor(RECORDED["groups"][scale]), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("reward", [0.1, 0.0, 1 / 3, -7.3, 1e30])
def test_equal_rewards_give_exactly_nothing(scale: str, reward: float) -> None:
    for count in (1, 2, 3, 7, 64):
        found = group_advantages(torch.full((count,), reward), torch.tensor([0, count]), scale)
        assert found.dtype == torch.float32 and not found.any()


def test_groups_of_any_size_and_rewards_that_are_missing() -> None:
    rewards = torch.tensor([1.0, math.nan, 3.0, 5.0, math.nan, 2.0])
    found = group_advantages(rewards, torch.tensor([0, 3, 4, 4, 5, 6]), "none")
    assert found.tolist() == [-1, 0, 1, 0, 0, 0]
    assert not group_advantages(torch.zeros(0), torch.tensor([0]), "batch").any()
    with pytest.raises(ValueError, match="rewards must be finite or NaN, got inf"):
        group_advantages(torch.tensor([math.inf]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="scale must be one of group, batch, none, got 'std'"):
        group_advantages(rewards, torch.tensor([0, 6]), "std")
    with pytest.raises(ValueError, match="cu_seqlens must go up from 0 to 6"):
        group_advantages(rewards, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="rewards must be floating-point"):
        group_advantages(torch.ones(2, dtype=torch.int32), torch.tensor([0, 2]))


def by_definition(rewards: Tensor, values: Tensor, gamma: float, lam: float, last: float) -> list[float]:
    """A[t] = sum over k of (gamma lam)^k delta[t + k], in float64."""
    after = [*values.tolist(), last][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards.tolist(), after, values.tolist(), strict=True)]
    return [
        math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_generalized_advantages(gamma: float, lam: float) -> None:
    lengths = (5, 0, 1, 12, 3)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    draw = torch.Generator().manual_seed(4)
    rewards, values = (torch.randn(21, generator=draw) for _ in range(2))
    bootstrap = torch.randn(5, generator=draw)
    advantages, returns = generalized_advantages(
        rewards, values, offsets, gamma=gamma, lam=lam, bootstrap=bootstrap
    )
    assert np.array_equal(returns.numpy().view(np.int32), (advantages + values).numpy().view(np.int32))
    for i, length in enumerate(lengths):
        piece = slice(int(offsets[i]), int(offsets[i + 1]))
        wanted = by_definition(rewards[piece], values[piece], gamma, lam, bootstrap[i].item())
        torch.testing.assert_close(advantages[piece], torch.tensor(wanted, dtype=torch.float32))
        alone, _ = generalized_advantages(
            rewards[piece], values[piece], torch.tensor([0, length]), gamma=gamma, lam=lam,
            bootstrap=bootstrap[i : i + 1],
        )  # fmt: skip
        assert np.array_equal(alone.numpy().view(np.int32), advantages[piece].numpy().view(np.int32))


def test_generalized_advantages_check_their_arguments() -> None:
    numbers, offsets = torch.zeros(3), torch.tensor([0, 3])
    with pytest.raises(ValueError, match=r"gamma must be from 0 to 1, got 1\.5"):
        generalized_advantages(numbers, numbers, offsets, gamma=1.5)
    with pytest.raises(ValueError, match="rewards and values must be"):
        generalized_advantages(numbers, numbers[:2], offsets)
    with pytest.raises(ValueError, match=r"bootstrap must be torch.float32 \[1\], got \[3\]"):
        generalized_advantages(numbers, numbers, offsets, bootstrap=numbers)
    found, returns = generalized_advantages(torch.zeros(0), torch.zeros(0), torch.tensor([0, 0]))
    assert len(found) == len(returns) == 0


def test_whitening() -> None:
    numbers = torch.tensor([1.0, 2.0, 3.0, math.nan])
    mask = torch.tensor([True, True, True, False])
    assert whiten(numbers, mask).tolist() == [-1, 0, 1, 0]
    assert whiten(numbers, mask, keep_mean=True).tolist() == [1, 2, 3, 0]
    assert whiten(torch.full((3,), 0.1), mask[:3]).tolist() == [0, 0, 0]
    assert whiten(numbers, torch.tensor([True, False, False, False])).tolist() == [1, 0, 0, 0]
