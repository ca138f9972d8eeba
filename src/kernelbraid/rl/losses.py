"""Losses of PPO and GRPO on packed tokens: pure functions of log-probabilities, advantages and values.

    log-ratio   l[t] = logprobs[t] - old[t], at least -20 and at most 20
    ratio       r[t] = exp(l[t])
    policy      p[t] = max(-r[t] * A[t], -min(max(r[t], 1 - clip_low), 1 + clip_high) * A[t])
    term        w[t] * (p[t] + kl_weight * kl[t] + ...), 0 where the mask is False
    loss        terms added in token order, in float64

A token's weight w follows from counts of the whole optimizer step (`StepCounts`), so that its term and its
gradient have the same bits however the step is cut, between completions, into micro-batches: call the loss
for each piece with the step's counts. Given the value of the pieces before as `start`, the last value has the
bits of the whole step's. Where old log-probabilities are the update's own bits, every ratio is exactly 1, and
the gradient of each log-probability is exactly -w[t] * A[t], that of the policy gradient.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from kernelbraid.rl.choices import choose
from kernelbraid.rl.packed import check_offsets, owners, spread, sum_in_token_order

MOST_LOG_RATIO = 20.0
"""Beyond it a log-ratio is cut off and has no gradient: exp stays finite."""


class Aggregation(StrEnum):
    """How tokens are averaged."""

    SEQUENCE = "sequence"
    """Mean over each completion's counted tokens, then over all completions: GRPO. w = 1 / (counted * N)."""
    TOKEN = "token"
    """Mean over all counted tokens of the step: DAPO. w = 1 / tokens. With the counts of each micro-batch in
    the place of the step's it is TRL's `bnpo`, which depends on the cut."""
    FIXED = "fixed"
    """Sum over `fixed_length` * N whatever the lengths: Dr. GRPO. w = 1 / (fixed_length * N)."""


class KlEstimator(StrEnum):
    """Estimates of KL(policy || reference) from d = logprobs - reference (Schulman, 2020)."""

    K1 = "k1"
    """d. As a loss its gradient is 0 in expectation: use it as a reward."""
    K2 = "k2"
    """d * d / 2."""
    K3 = "k3"
    """exp(-d) + d - 1, with -d at least -20 and at most 20 in the exponent; never negative."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What one optimizer step averages over, over all of its micro-batches.

    Completions that are empty or masked count among `completions`, as in TRL.
    """

    completions: int
    tokens: int
    """Counted ones: where the mask is True."""

    def __post_init__(self) -> None:
        if self.completions < 0 or self.tokens < 0:
            raise ValueError(f"counts must not be negative, got {self.completions} and {self.tokens}")

    @classmethod
    def of(cls, cu_seqlens: Tensor, mask: Tensor) -> "StepCounts":
        """Those of a step of one piece. On a GPU this waits for the device."""
        return cls(len(cu_seqlens) - 1, int(mask.sum()))


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Counts over the tokens of a call, without gradient: 0-d tensors, on the device."""

    tokens: Tensor
    """int64: counted ones."""
    clipped_low: Tensor
    """int64: ratio below 1 - clip_low where the advantage is negative: no gradient."""
    clipped_high: Tensor
    """int64: ratio above 1 + clip_high where the advantage is positive: no gradient."""
    largest_log_ratio: Tensor
    """The largest absolute log-ratio, 0 of no tokens; exactly 0 where the old ones are the update's bits."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss to call `backward` on."""

    value: Tensor
    """0-d float64: `start` and the terms, in token order."""
    terms: Tensor
    """[T], dtype of the log-probabilities: what each token adds."""
    stats: PolicyStats


@dataclass(frozen=True, slots=True)
class Grpo:
    """Options of the GRPO loss.

    Raises:
        ValueError: a number lies outside its limits, or `fixed_length` does not go with the aggregation.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    clip_low: float = 0.2
    clip_high: float = 0.2
    """Above clip_low: clip-higher (DAPO, Yu et al. 2025)."""
    aggregation: Aggregation = Aggregation.TOKEN
    fixed_length: int | None = None
    """The largest length of a completion, for `fixed`."""
    kl_weight: float = 0.0
    """Of the penalty to the reference policy in the loss; 0: no reference is needed."""
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_weight: float = 0.0
    """Of the entropies' mean over all counted tokens, which is subtracted whatever the aggregation."""

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        object.__setattr__(self, "aggregation", choose(Aggregation, "aggregation", self.aggregation))
        object.__setattr__(self, "kl_estimator", choose(KlEstimator, "kl_estimator", self.kl_estimator))
        _check_fixed(self.aggregation, self.fixed_length)
        _check_not_negative(kl_weight=self.kl_weight, entropy_weight=self.entropy_weight)


@dataclass(frozen=True, slots=True)
class Ppo:
    """Options of the PPO loss; value and entropy are means over all counted tokens whatever the aggregation.

    Raises:
        ValueError: as `Grpo`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = Aggregation.TOKEN
    fixed_length: int | None = None
    value_weight: float = 0.1
    value_clip: float | None = 0.2
    """A value may move this far from the recorded one before its loss is that of the cut value; None: any."""
    kl_weight: float = 0.0
    """Of the penalty in the loss; a penalty in the rewards goes into `token_rewards` instead."""
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        object.__setattr__(self, "aggregation", choose(Aggregation, "aggregation", self.aggregation))
        object.__setattr__(self, "kl_estimator", choose(KlEstimator, "kl_estimator", self.kl_estimator))
        _check_fixed(self.aggregation, self.fixed_length)
        weights = {"kl_weight": self.kl_weight, "entropy_weight": self.entropy_weight}
        _check_not_negative(value_weight=self.value_weight, value_clip=self.value_clip or 0.0, **weights)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    step: StepCounts,
    options: Grpo,
    *,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    start: float = 0.0,
) -> Loss:
    """Loss of group-relative policy optimization (Shao et al. 2024) of packed completions.

    Args:
        logprobs: [T] float32 (or float64), of the policy that is updated; carries the gradient.
        old_logprobs: [T], of the snapshot that drew the tokens.
        advantages: [N], one a completion, without gradient; see `group_advantages`.
        cu_seqlens: [N + 1] int32 or int64: where each completion's tokens start, and the end.
        mask: [T] bool, True where a token counts. What the others hold, NaN too, changes nothing.
        step: counts of the whole optimizer step.
        options: see `Grpo`.
        reference: [T], log-probabilities of the reference policy, where `kl_weight` is not 0.
        entropy: [T], entropies of the policy, where `entropy_weight` is not 0.
        start: value of the step's micro-batches before this one.

    Returns:
        The loss of this piece.

    Raises:
        ValueError: shapes, dtypes or devices disagree, or something is missing that the options need.
    """
    _check_tokens(cu_seqlens, mask, logprobs=logprobs, old_logprobs=old_logprobs)
    if advantages.shape != (len(cu_seqlens) - 1,):
        raise ValueError(f"advantages must be [{len(cu_seqlens) - 1}], got {list(advantages.shape)}")
    advantages = spread(advantages, cu_seqlens, len(mask))
    terms, stats = _policy(logprobs, old_logprobs, advantages, mask, options)
    weights = token_weights(options.aggregation, cu_seqlens, mask, step, options.fixed_length)
    terms = _with_penalty(terms, logprobs, reference, mask, options) * weights.to(terms.dtype)
    terms = _with_entropy(terms, entropy, cu_seqlens, mask, step, options)
    return Loss(sum_in_token_order(terms, start), terms, stats)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    step: StepCounts,
    options: Ppo,
    *,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    start: float = 0.0,
) -> Loss:
    """Loss of proximal policy optimization (Schulman et al. 2017) of packed completions.

    Args:
        advantages: [T], without gradient; see `generalized_advantages`.
        values: [T], of the value model that is updated; carries its gradient.
        old_values: [T], the snapshot's, recorded at rollout.
        returns: [T], see `generalized_advantages`.
        options: see `Ppo`.
        logprobs, old_logprobs, cu_seqlens, mask, step, reference, entropy, start: as `grpo_loss`.

    Returns:
        The loss of this piece.

    Raises:
        ValueError: as `grpo_loss`.
    """
    _check_tokens(cu_seqlens, mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    _check_tokens(cu_seqlens, mask, values=values, old_values=old_values, returns=returns)
    terms, stats = _policy(logprobs, old_logprobs, advantages, mask, options)
    weights = token_weights(options.aggregation, cu_seqlens, mask, step, options.fixed_length)
    terms = _with_penalty(terms, logprobs, reference, mask, options) * weights.to(terms.dtype)
    mean = token_weights(Aggregation.TOKEN, cu_seqlens, mask, step).to(terms.dtype)
    found = value_terms(values, old_values, returns, mask, options.value_clip)
    terms = terms + options.value_weight * mean * found
    terms = _with_entropy(terms, entropy, cu_seqlens, mask, step, options)
    return Loss(sum_in_token_order(terms, start), terms, stats)


def token_weights(
    aggregation: Aggregation | str,
    cu_seqlens: Tensor,
    mask: Tensor,
    step: StepCounts,
    fixed_length: int | None = None,
) -> Tensor:
    """What each token's number is multiplied by, float64 [T], 0 where the mask is False.

    Raises:
        ValueError: `fixed_length` does not go with the aggregation, or the step has fewer completions or
            tokens than its piece.
    """
    aggregation = choose(Aggregation, "aggregation", aggregation)
    _check_fixed(aggregation, fixed_length)
    count = len(cu_seqlens) - 1
    if step.completions < count:
        raise ValueError(f"step has {step.completions} completions, fewer than the {count} of this piece")
    if mask.is_cpu and int(mask.sum()) > step.tokens:  # elsewhere this would wait for the device
        raise ValueError(f"step has {step.tokens} tokens, fewer than the {int(mask.sum())} of this piece")
    if aggregation == Aggregation.SEQUENCE:
        belongs = owners(cu_seqlens, len(mask))
        counted = torch.zeros(count, dtype=torch.int64, device=mask.device)
        counted.index_add_(0, belongs, mask.long())
        each = 1.0 / (counted.clamp(min=1).double() * max(step.completions, 1))
        weights = each[belongs]
    else:
        over = step.tokens if aggregation == Aggregation.TOKEN else (fixed_length or 1) * step.completions
        weights = torch.full((len(mask),), 1.0 / max(over, 1), dtype=torch.float64, device=mask.device)
    return torch.where(mask, weights, 0.0)


def kl_estimate(estimator: KlEstimator | str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each token; differentiable in logprobs.

    Args:
        estimator: see `KlEstimator`.
        logprobs, reference: [T], of the tokens that the policy drew.
    """
    estimator = choose(KlEstimator, "estimator", estimator)
    difference = logprobs - reference
    if estimator == KlEstimator.K1:
        return difference
    if estimator == KlEstimator.K2:
        return 0.5 * difference * difference
    return torch.exp((-difference).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)) + difference - 1


def token_rewards(
    scores: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_weight: float = 0.0,
) -> Tensor:
    """Rewards of single tokens for PPO: the score at a completion's last token, less a KL penalty at each.

    Args:
        scores: [N] float32 or float64. That of an empty completion goes nowhere.
        cu_seqlens: [N + 1] int32 or int64.
        mask: [T] bool: other tokens get no penalty; a last token keeps its score.
        kl: [T], from `kl_estimate`; its gradient is left out.
        kl_weight: what it is multiplied by.

    Returns:
        [T], dtype of scores.
    """
    check_offsets(cu_seqlens, len(mask))
    if scores.shape != (len(cu_seqlens) - 1,):
        raise ValueError(f"scores must be [{len(cu_seqlens) - 1}], got {list(scores.shape)}")
    out = scores.new_zeros(len(mask))
    if kl is not None:
        _check_tokens(cu_seqlens, mask, kl=kl)
        out = torch.where(mask, -kl_weight * kl.detach(), 0.0).to(scores.dtype)
    ends = cu_seqlens[1:].long()
    filled = ends > cu_seqlens[:-1]
    last = ends[filled] - 1
    out[last] += scores.detach()[filled]
    return out


def value_terms(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> Tensor:
    """Half the squared error of each value, or of the value kept within `clip` of the recorded one if larger.

    Args:
        values, old_values, returns: [T].
        mask: [T] bool.
        clip: None for the plain squared error.

    Returns:
        [T], 0 where the mask is False.
    """
    values, old_values, returns = (torch.where(mask, each, 0.0) for each in (values, old_values, returns))
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain
    near = old_values + (values - old_values).clamp(-clip, clip)
    cut = (near - returns) ** 2
    return 0.5 * torch.where(plain >= cut, plain, cut)


def _policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    options: Grpo | Ppo,
) -> tuple[Tensor, PolicyStats]:
    """Clipped policy terms without weights, [T], 0 where the mask is False."""
    if advantages.requires_grad or old_logprobs.requires_grad:
        raise ValueError("advantages and old_logprobs must have no gradient: detach them")
    advantages = torch.where(mask, advantages.to(logprobs.dtype), 0.0)
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, old_logprobs, 0.0)
    ratio = torch.exp(difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO))
    low, high = 1 - options.clip_low, 1 + options.clip_high
    plain, cut = -ratio * advantages, -ratio.clamp(low, high) * advantages
    with torch.no_grad():
        stats = PolicyStats(
            mask.sum(),
            ((ratio < low) & (advantages < 0)).sum(),
            ((ratio > high) & (advantages > 0)).sum(),
            torch.cat([difference.new_zeros(1), difference.abs()]).max(),
        )
    return torch.where(plain >= cut, plain, cut), stats


def _with_penalty(
    terms: Tensor, logprobs: Tensor, reference: Tensor | None, mask: Tensor, options: Grpo | Ppo
) -> Tensor:
    if options.kl_weight == 0:
        return terms
    if reference is None or reference.shape != logprobs.shape or reference.dtype != logprobs.dtype:
        raise ValueError(f"reference must be {logprobs.dtype} [{len(mask)}] where kl_weight is not 0")
    policy, fixed = torch.where(mask, logprobs, 0.0), torch.where(mask, reference.detach(), 0.0)
    return terms + options.kl_weight * kl_estimate(options.kl_estimator, policy, fixed)


def _with_entropy(
    terms: Tensor,
    entropy: Tensor | None,
    cu_seqlens: Tensor,
    mask: Tensor,
    step: StepCounts,
    options: Grpo | Ppo,
) -> Tensor:
    if options.entropy_weight == 0:
        return terms
    if entropy is None or entropy.shape != mask.shape or entropy.dtype != terms.dtype:
        raise ValueError(f"entropy must be {terms.dtype} [{len(mask)}] where entropy_weight is not 0")
    mean = token_weights(Aggregation.TOKEN, cu_seqlens, mask, step).to(terms.dtype)
    return terms - options.entropy_weight * mean * torch.where(mask, entropy, 0.0)


def _check_tokens(cu_seqlens: Tensor, mask: Tensor, **tensors: Tensor) -> None:
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise ValueError(f"mask must be bool [tokens], got {mask.dtype} {list(mask.shape)}")
    check_offsets(cu_seqlens, len(mask))
    first = next(iter(tensors.values()))
    allowed = (first.dtype,) if first.dtype in (torch.float32, torch.float64) else (torch.float32,)
    for name, each in tensors.items():
        if each.dtype not in allowed or each.shape != mask.shape:
            wanted = f"{allowed[0]} [{len(mask)}]"
            raise ValueError(f"{name} must be {wanted}, got {each.dtype} {list(each.shape)}")
        if each.device != mask.device:
            raise ValueError(f"{name} is on {each.device}, mask on {mask.device}")


def _check_clip(low: float, high: float) -> None:
    if not 0 <= low < 1:
        raise ValueError(f"clip_low must be at least 0 and below 1, got {low}")
    if not 0 <= high < float("inf"):
        raise ValueError(f"clip_high must be finite and not negative, got {high}")


def _check_fixed(aggregation: Aggregation, fixed_length: int | None) -> None:
    if (aggregation == Aggregation.FIXED) != (fixed_length is not None):
        raise ValueError("fixed_length must be given for aggregation `fixed`, and for no other")
    if fixed_length is not None and fixed_length < 1:
        raise ValueError(f"fixed_length must be at least 1, got {fixed_length}")


def _check_not_negative(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, got {number}")
