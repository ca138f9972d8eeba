"""Advantages: of a group of completions (GRPO), and by generalized advantage estimation (PPO).

They are computed once for a rollout batch, before it is cut into minibatches, and have no gradient.
"""

from enum import StrEnum
from itertools import pairwise

import torch
from torch import Tensor

from kernelbraid.rl.choices import choose
from kernelbraid.rl.packed import check_offsets, sum_in_token_order

GROUP_EPS = 1e-4
WHITEN_EPS = 1e-8


class Scale(StrEnum):
    """What differences to a group's mean reward are divided by."""

    GROUP = "group"
    """The group's standard deviation + 1e-4 (Shao et al. 2024)."""
    BATCH = "batch"
    """The standard deviation of all rewards of the batch + 1e-4."""
    NONE = "none"
    """Nothing (Dr. GRPO, Liu et al. 2025)."""


def group_advantages(rewards: Tensor, group_offsets: Tensor, scale: Scale | str = Scale.GROUP) -> Tensor:
    """How much better each completion is than those of the same prompt.

    Deviations divide by the count less one, as TRL's do; of a single number the deviation is 0. All sums are
    float64, in the order of completions. Where a group's rewards are all equal its advantages are exactly 0.
    A completion whose reward is NaN could not be scored: it counts in no mean, and its advantage is 0.

    Args:
        rewards: [N] float32 or float64, one a completion.
        group_offsets: [groups + 1] int32 or int64: where each prompt's completions start, and the end.
        scale: see `Scale`.

    Returns:
        [N] float32.

    Raises:
        ValueError: offsets do not fit the rewards, a reward is infinite, or scale has another value.
    """
    scale = choose(Scale, "scale", scale)
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must be floating-point [completions], got {rewards.dtype} {list(rewards.shape)}"
        )
    check_offsets(group_offsets, len(rewards))
    if rewards.isinf().any():
        raise ValueError(f"rewards must be finite or NaN, got {rewards[rewards.isinf()][0].item()}")
    values = rewards.detach().double().cpu()
    out = torch.zeros_like(values)
    offsets = group_offsets.tolist()
    for start, end in pairwise(offsets):
        group = values[start:end]
        scored = ~group.isnan()
        mean = _mean(group[scored])
        spread = _deviation(group[scored], mean) + GROUP_EPS if scale == Scale.GROUP else 1.0
        out[start:end] = torch.where(scored, (group - mean) / spread, 0.0)
    if scale == Scale.BATCH:
        scored = values[~values.isnan()]
        out /= _deviation(scored, _mean(scored)) + GROUP_EPS
    return out.to(torch.float32).to(rewards.device)


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016) over the tokens of each completion.

    Backwards from a completion's last token, with V[L] = bootstrap:

        delta[t] = (rewards[t] + gamma * V[t + 1]) - V[t]
        A[t]     = delta[t] + (gamma * lam) * A[t + 1]
        R[t]     = A[t] + V[t]

    Each product and sum is rounded in the dtype of rewards.

    Args:
        rewards: [T] float32 or float64, one a token: usually the score at the last one, less a penalty each.
        values: [T], dtype of rewards: the snapshot's values, recorded at rollout.
        cu_seqlens: [N + 1] int32 or int64.
        gamma: discount of later rewards, from 0 to 1.
        lam: weight of later differences, from 0 to 1.
        bootstrap: [N], the value after the last token; 0 by default. For a truncated completion it is what
            the value model gives the state it was cut at.

    Returns:
        Advantages and returns, [T] each, without gradient.

    Raises:
        ValueError: shapes or dtypes disagree, or a number lies outside its limits.

    Bits: a completion's depend on its own numbers alone, whatever it is packed with.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {number}")
    if rewards.dim() != 1 or values.shape != rewards.shape or values.dtype != rewards.dtype:
        found = f"{rewards.dtype} {list(rewards.shape)} and {values.dtype} {list(values.shape)}"
        raise ValueError(f"rewards and values must be [tokens] of one dtype, got {found}")
    check_offsets(cu_seqlens, len(rewards))
    count = len(cu_seqlens) - 1
    if bootstrap is not None and (bootstrap.shape != (count,) or bootstrap.dtype != rewards.dtype):
        raise ValueError(f"bootstrap must be {rewards.dtype} [{count}], got {list(bootstrap.shape)}")
    with torch.no_grad():
        return _backwards(rewards, values, cu_seqlens, gamma, lam, bootstrap)


def _backwards(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Step by step from the ends: all completions at once, those that are that long."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    order = torch.argsort(lengths, descending=True, stable=True)
    starts, lengths = starts[order], lengths[order]
    held = lengths.tolist()
    advantages = torch.zeros_like(rewards)
    after = rewards.new_zeros(len(held))
    value_after = after.clone() if bootstrap is None else bootstrap[order].clone()
    count = len(held)
    for step in range(1, max(held, default=0) + 1):
        while count and held[count - 1] < step:
            count -= 1
        place = starts[:count] + (lengths[:count] - step)
        value = values[place]
        delta = (rewards[place] + gamma * value_after[:count]) - value
        found = delta + (gamma * lam) * after[:count]
        advantages[place] = found
        after, value_after = found, value
    return advantages, advantages + values


def whiten(numbers: Tensor, mask: Tensor, *, keep_mean: bool = False) -> Tensor:
    """Scale the numbers of counted tokens to variance 1, and shift them to mean 0.

    The variance divides by the count less one, and 1e-8 is added to it; both sums are float64, in token
    order, over the whole batch: whiten before cutting it. Other tokens get 0.

    Args:
        numbers: [T] float32 or float64.
        mask: [T] bool.
        keep_mean: add the mean again.

    Returns:
        [T], dtype of numbers; of fewer than two counted tokens the numbers as they are.
    """
    chosen = numbers.detach()[mask].double()
    if len(chosen) < 2:
        return torch.where(mask, numbers.detach(), 0.0)
    mean = _mean(chosen)
    variance = _deviation(chosen, mean) ** 2
    scaled = (numbers.detach().double() - mean) / (variance + WHITEN_EPS) ** 0.5
    if keep_mean:
        scaled = scaled + mean
    return torch.where(mask, scaled, 0.0).to(numbers.dtype)


def _mean(numbers: Tensor) -> float:
    """0 of no numbers."""
    return float(sum_in_token_order(numbers)) / max(len(numbers), 1)


def _deviation(numbers: Tensor, mean: float) -> float:
    if len(numbers) < 2:
        return 0.0
    return float((float(sum_in_token_order((numbers - mean) ** 2)) / (len(numbers) - 1)) ** 0.5)
