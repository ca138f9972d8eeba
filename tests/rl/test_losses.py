"""Losses of PPO and GRPO: TRL's values, finite differences, the edges of their domain, their bits."""

import importlib.util
import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.rl import trl_values
from torch import Tensor

from kernelbraid.rl.advantages import generalized_advantages, whiten
from kernelbraid.rl.losses import (
    Aggregation,
    Grpo,
    Ppo,
    StepCounts,
    grpo_loss,
    kl_estimate,
    ppo_loss,
    token_rewards,
    token_weights,
    value_terms,
)
from kernelbraid.rl.packed import spread, sum_in_token_order

RECORDED = json.loads(trl_values.FILE.read_text())
ROWS = trl_values.mask()
OFFSETS = torch.tensor([0, *np.cumsum(trl_values.LENGTHS)], dtype=torch.int32)
TOKENS = int(OFFSETS[-1])
AGGREGATIONS = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "fixed"}


def recorded(name: str) -> Tensor:
    """An input of the recorded values, tokens packed."""
    found = torch.tensor(RECORDED["inputs"][name])
    return found[ROWS] if found.dim() == 2 else found


def bits(tensor: Tensor) -> np.ndarray:
    assert tensor.dtype in (torch.float32, torch.float64)
    return tensor.detach().numpy().view(np.int32 if tensor.dtype == torch.float32 else np.int64)


def grpo_of(case: dict[str, Any]) -> tuple[float, Tensor]:
    """Our loss and gradient of a case of TRL."""
    kind = case["loss_type"]
    options = Grpo(
        clip_high=case.get("epsilon_high", 0.2),
        aggregation=Aggregation(AGGREGATIONS[kind]),
        fixed_length=trl_values.WIDTH if kind == "dr_grpo" else None,
        kl_weight=case.get("beta", 0.0),
        entropy_weight=case.get("entropy_coef", 0.0),
    )
    mask = trl_values.mask(case.get("masked", False))[ROWS]
    leaf = recorded("logprobs").requires_grad_()
    loss = grpo_loss(
        leaf, recorded("old_logprobs"), recorded("advantages"), OFFSETS, mask, StepCounts.of(OFFSETS, mask),
        options, reference=recorded("reference"), entropy=recorded("entropy"),
    )  # fmt: skip
    loss.value.backward()
    assert leaf.grad is not None
    return loss.value.item(), leaf.grad


@pytest.mark.parametrize("name", trl_values.GRPO_CASES)
def test_grpo_is_trls(name: str) -> None:
    loss, gradient = grpo_of(trl_values.GRPO_CASES[name])
    theirs = RECORDED["grpo"][name]
    assert loss == pytest.approx(theirs["loss"], rel=2e-6, abs=1e-7)
    torch.testing.assert_close(gradient, torch.tensor(theirs["dlogprobs"])[ROWS], rtol=2e-6, atol=1e-8)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("name", trl_values.GRPO_CASES)
def test_grpo_is_that_of_the_installed_trl(name: str) -> None:
    loss, gradient = grpo_of(trl_values.GRPO_CASES[name])
    theirs, their_gradient = trl_values.grpo_values(trl_values.GRPO_CASES[name])
    assert loss == pytest.approx(theirs, rel=2e-6, abs=1e-7)
    torch.testing.assert_close(gradient, their_gradient[ROWS], rtol=2e-6, atol=1e-8)


def test_recorded_inputs_are_those_of_the_script() -> None:
    assert RECORDED["trl"] == "1.16.0"
    for name, each in trl_values.inputs().items():
        assert torch.equal(each, torch.tensor(RECORDED["inputs"][name])), name


def test_ppo_is_trls() -> None:
    theirs = RECORDED["ppo"]
    everything = torch.ones(TOKENS, dtype=torch.bool)
    advantages, returns = generalized_advantages(
        recorded("rewards"), recorded("old_values"), OFFSETS, gamma=0.99, lam=0.9
    )
    torch.testing.assert_close(returns, torch.tensor(theirs["returns"])[ROWS], rtol=2e-6, atol=1e-6)
    advantages = whiten(advantages, everything)
    torch.testing.assert_close(advantages, torch.tensor(theirs["advantages"])[ROWS], rtol=2e-6, atol=1e-6)
    leaves = [recorded(name).requires_grad_() for name in ("logprobs", "values")]
    step = StepCounts.of(OFFSETS, everything)
    loss = ppo_loss(
        leaves[0], recorded("old_logprobs"), advantages, leaves[1], recorded("old_values"), returns, OFFSETS,
        everything, step, Ppo(),
    )  # fmt: skip
    assert loss.value.item() == pytest.approx(theirs["policy"] + theirs["value"], rel=2e-6)
    loss.value.backward()
    for leaf, name in zip(leaves, ("dlogprobs", "dvalues"), strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, torch.tensor(theirs[name])[ROWS], rtol=1e-5, atol=1e-8)


def everything_of(seed: int, lengths: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(count: int = tokens) -> Tensor:
        return torch.randn(count, generator=draw, dtype=torch.float64)

    old = -2 + 0.5 * normal()
    found = {
        "logprobs": old + 0.3 * normal(),
        "old": old,
        "reference": old + 0.3 * normal(),
        "entropy": normal().abs(),
        "advantages": normal(len(lengths)),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
    }
    return {name: each.to(dtype) for name, each in found.items()}


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_by_finite_differences(aggregation: Aggregation, estimator: str) -> None:
    lengths = (4, 0, 1, 6)
    given = everything_of(3, lengths, torch.float64)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    mask[2] = False
    step = StepCounts.of(offsets, mask)
    shared = {
        "aggregation": aggregation, "fixed_length": 8 if aggregation == Aggregation.FIXED else None,
        "clip_high": 0.3, "kl_weight": 0.1, "kl_estimator": estimator, "entropy_weight": 0.02,
    }  # fmt: skip
    per_token = spread(given["advantages"], offsets, len(mask))

    def grpo(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return grpo_loss(
            logprobs, given["old"], given["advantages"], offsets, mask, step, Grpo(**shared),  # type: ignore[arg-type]
            reference=given["reference"], entropy=entropy,
        ).value  # fmt: skip

    def ppo(logprobs: Tensor, values: Tensor, entropy: Tensor) -> Tensor:
        return ppo_loss(
            logprobs, given["old"], per_token, values, given["old_values"], given["returns"], offsets, mask,
            step, Ppo(**shared), reference=given["reference"], entropy=entropy,  # type: ignore[arg-type]
        ).value  # fmt: skip

    leaves = [given[name].requires_grad_() for name in ("logprobs", "values", "entropy")]
    assert torch.autograd.gradcheck(grpo, (leaves[0], leaves[2]), eps=1e-6, atol=1e-7)
    assert torch.autograd.gradcheck(ppo, tuple(leaves), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_at_ratio_one_the_gradient_is_the_policy_gradient(aggregation: Aggregation) -> None:
    given = everything_of(5, (9, 3, 17), torch.float32)
    offsets = torch.tensor([0, 9, 12, 29])
    mask = torch.ones(29, dtype=torch.bool)
    mask[10] = False
    step = StepCounts.of(offsets, mask)
    fixed = 32 if aggregation == Aggregation.FIXED else None
    leaf = given["old"].clone().requires_grad_()
    options = Grpo(aggregation=aggregation, fixed_length=fixed)
    loss = grpo_loss(leaf, given["old"], given["advantages"], offsets, mask, step, options)
    loss.value.backward()
    assert leaf.grad is not None
    weights = token_weights(aggregation, offsets, mask, step, fixed).float()
    wanted = -(weights * spread(given["advantages"], offsets, 29))
    wanted[10] = 0
    # + 0 gives zeros one sign
    assert np.array_equal(bits(leaf.grad + 0), bits(wanted + 0))
    assert np.array_equal(bits(loss.terms + 0), bits(wanted + 0))
    assert loss.stats.largest_log_ratio == 0


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_micro_batches_have_the_bits_of_the_step(aggregation: Aggregation) -> None:
    lengths = (9, 3, 0, 17, 40, 1, 22, 5)
    given = everything_of(7, lengths, torch.float32)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    mask = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(1)) < 0.9
    step = StepCounts.of(offsets, mask)
    options = Ppo(
        aggregation=aggregation, fixed_length=64 if aggregation == Aggregation.FIXED else None,
        kl_weight=0.1, entropy_weight=0.01,
    )  # fmt: skip
    per_token = spread(given["advantages"], offsets, len(mask))

    def gradients(cuts: tuple[int, ...]) -> list[Tensor]:
        leaves = [given[name].clone().requires_grad_() for name in ("logprobs", "values", "entropy")]
        total = 0.0
        for first, last in pairwise(cuts):
            piece = slice(int(offsets[first]), int(offsets[last]))
            inside = offsets[first : last + 1] - offsets[first]
            loss = ppo_loss(
                leaves[0][piece], given["old"][piece], per_token[piece], leaves[1][piece],
                given["old_values"][piece], given["returns"][piece], inside, mask[piece], step, options,
                reference=given["reference"][piece], entropy=leaves[2][piece], start=total,
            )  # fmt: skip
            loss.value.backward()
            total = loss.value.item()
        return [torch.tensor(total, dtype=torch.float64), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    whole = gradients((0, 8))
    for cuts in ((0, 1, 8), (0, 4, 8), (0, 2, 3, 5, 6, 7, 8)):
        for one, other in zip(whole, gradients(cuts), strict=True):
            assert np.array_equal(bits(one), bits(other))


def test_what_is_masked_changes_nothing() -> None:
    given = everything_of(9, (4, 4), torch.float32)
    offsets, mask = torch.tensor([0, 4, 8]), torch.tensor([True, False, True, True] * 2)
    step, options = StepCounts.of(offsets, mask), Ppo(kl_weight=0.1, entropy_weight=0.1)
    per_token = spread(given["advantages"], offsets, 8)

    def found(poison: float) -> list[Tensor]:
        at = {name: torch.where(mask, each, poison) for name, each in given.items() if name != "advantages"}
        leaves = [at[name].requires_grad_() for name in ("logprobs", "values")]
        loss = ppo_loss(
            leaves[0], at["old"], torch.where(mask, per_token, poison), leaves[1], at["old_values"],
            at["returns"], offsets, mask, step, options, reference=at["reference"], entropy=at["entropy"],
        )  # fmt: skip
        loss.value.backward()
        return [loss.value, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    for one, other in zip(found(0.0), found(math.nan), strict=True):
        assert np.array_equal(bits(one), bits(other))
        assert torch.isfinite(one).all()


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (1,), (3,)])
def test_nothing_to_count(lengths: tuple[int, ...]) -> None:
    given = everything_of(1, lengths, torch.float32)
    offsets = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)])
    mask = torch.zeros(sum(lengths), dtype=torch.bool)
    for aggregation in ("sequence", "token"):
        leaf = given["logprobs"].clone().requires_grad_()
        loss = grpo_loss(
            leaf, given["old"], given["advantages"], offsets, mask, StepCounts.of(offsets, mask),
            Grpo(aggregation=Aggregation(aggregation)),
        )  # fmt: skip
        loss.value.backward()
        assert loss.value.item() == 0
        assert leaf.grad is not None and not leaf.grad.any()
        assert loss.stats.tokens == 0 and loss.stats.largest_log_ratio == 0


def test_one_token_and_clipping() -> None:
    offsets, mask = torch.tensor([0, 1]), torch.tensor([True])
    step = StepCounts(1, 1)

    def run(ratio: float, advantage: float) -> tuple[float, float, int, int]:
        leaf = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        old, gain = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
        loss = grpo_loss(leaf, old, gain, offsets, mask, step, Grpo(clip_low=0.2, clip_high=0.4))
        loss.value.backward()
        assert leaf.grad is not None
        stats = loss.stats
        return loss.value.item(), leaf.grad.item(), int(stats.clipped_low), int(stats.clipped_high)

    assert run(1.3, 2.0) == (pytest.approx(-2.6), pytest.approx(-2.6), 0, 0)
    assert run(1.5, 2.0) == (pytest.approx(-2.8), 0.0, 0, 1)
    assert run(1.5, -2.0) == (pytest.approx(3.0), pytest.approx(3.0), 0, 0)
    assert run(0.7, -2.0) == (pytest.approx(1.6), 0.0, 1, 0)
    assert run(0.7, 2.0) == (pytest.approx(-1.4), pytest.approx(-1.4), 0, 0)


def test_log_ratios_that_overflow_have_no_gradient() -> None:
    leaf = torch.tensor([300.0, -300.0, -math.inf], requires_grad=True)
    loss = grpo_loss(
        leaf, torch.zeros(3), torch.tensor([-1.0]), torch.tensor([0, 3]), torch.ones(3, dtype=torch.bool),
        StepCounts(1, 3), Grpo(kl_weight=0.0),
    )  # fmt: skip
    loss.value.backward()
    assert math.isfinite(loss.value.item())
    assert leaf.grad is not None and not leaf.grad.any()


def test_estimates_of_kl() -> None:
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    assert kl_estimate("k1", policy, reference).tolist() == [0.5, 0]
    assert kl_estimate("k2", policy, reference).tolist() == [0.125, 0]
    assert kl_estimate("k3", policy, reference).tolist() == [pytest.approx(math.exp(-0.5) - 0.5), 0]
    with pytest.raises(ValueError, match="estimator must be one of k1, k2, k3, got 'k4'"):
        kl_estimate("k4", policy, reference)


def test_rewards_of_tokens() -> None:
    offsets, mask = torch.tensor([0, 3, 3, 4]), torch.tensor([True, False, True, False])
    kl = torch.tensor([0.5, math.nan, 0.25, math.nan])
    found = token_rewards(torch.tensor([1.0, 5.0, 2.0]), offsets, mask, kl=kl, kl_weight=0.5)
    assert found.tolist() == [-0.25, 0, 0.875, 2]
    assert token_rewards(torch.tensor([1.0, 5.0, 2.0]), offsets, mask).tolist() == [0, 0, 1, 2]
    with pytest.raises(ValueError, match=r"scores must be \[3\], got \[2\]"):
        token_rewards(torch.ones(2), offsets, mask)


def test_values_are_clipped_around_the_recorded_ones() -> None:
    values = torch.tensor([1.0, 1.0, 0.1], requires_grad=True)
    found = value_terms(
        values, torch.zeros(3), torch.tensor([2.0, 0.0, 0.0]), torch.tensor([True] * 3), clip=0.2
    )
    assert found.tolist() == [pytest.approx(0.5 * 1.8**2), 0.5, pytest.approx(0.005)]
    found.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0, 1, pytest.approx(0.1)]


def test_sums_in_token_order_continue() -> None:
    draw = torch.Generator().manual_seed(2)
    # of sizes so far apart that float64 rounds their sums: other orders have other bits
    numbers = torch.randn(1000, generator=draw) * 10.0 ** torch.randint(-12, 13, (1000,), generator=draw)
    assert numbers.flip(0).double().cumsum(0)[-1] != numbers.double().cumsum(0)[-1]
    whole = sum_in_token_order(numbers)
    ordered = 0.0
    for number in numbers.tolist():
        ordered += number
    assert whole.item() == ordered
    for cut in (0, 1, 37, 999, 1000):
        first = sum_in_token_order(numbers[:cut])
        assert sum_in_token_order(numbers[cut:], start=first.item()).item() == ordered
    with pytest.raises(ValueError, match=r"terms must be \[tokens\], got \[2, 2\]"):
        sum_in_token_order(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_low": 1.0}, "clip_low must be at least 0 and below 1, got 1.0"),
        ({"clip_high": -0.1}, "clip_high must be finite and not negative, got -0.1"),
        ({"aggregation": "mean"}, "aggregation must be one of sequence, token, fixed, got 'mean'"),
        ({"aggregation": "fixed"}, "fixed_length must be given for aggregation `fixed`"),
        ({"fixed_length": 8}, "fixed_length must be given for aggregation `fixed`, and for no other"),
        ({"aggregation": "fixed", "fixed_length": 0}, "fixed_length must be at least 1, got 0"),
        ({"kl_weight": -1.0}, "kl_weight must be finite and not negative"),
        ({"kl_estimator": "k9"}, "kl_estimator must be one of k1, k2, k3"),
        ({"entropy_weight": math.nan}, "entropy_weight must be finite and not negative"),
    ],
)
def test_options_are_checked(changes: dict[str, Any], message: str) -> None:
    for kind in (Grpo, Ppo):
        with pytest.raises(ValueError, match=message):
            kind(**changes)


def test_arguments_are_checked() -> None:
    good: dict[str, Any] = {
        "logprobs": torch.zeros(3), "old_logprobs": torch.zeros(3), "advantages": torch.zeros(2),
        "cu_seqlens": torch.tensor([0, 1, 3]), "mask": torch.ones(3, dtype=torch.bool),
        "step": StepCounts(2, 3), "options": Grpo(),
    }  # fmt: skip
    grpo_loss(**good)
    for changes, message in (
        ({"old_logprobs": torch.zeros(4)}, r"old_logprobs must be torch.float32 \[3\], got .* \[4\]"),
        ({"logprobs": torch.zeros(3, dtype=torch.bfloat16)}, "logprobs must be torch.float32"),
        ({"old_logprobs": torch.zeros(3, dtype=torch.float64)}, "old_logprobs must be torch.float32"),
        ({"old_logprobs": torch.zeros(3, requires_grad=True)}, "must have no gradient: detach them"),
        ({"advantages": torch.zeros(3)}, r"advantages must be \[2\], got \[3\]"),
        ({"mask": torch.ones(3)}, "mask must be bool"),
        ({"cu_seqlens": torch.tensor([0, 2])}, r"cu_seqlens must go up from 0 to 3, .* got \[0, 2\]"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, "cu_seqlens must be int32 or int64"),
        ({"step": StepCounts(2, 2)}, "step has 2 tokens, fewer than the 3 of this piece"),
        ({"step": StepCounts(1, 3)}, "step has 1 completions, fewer than the 2 of this piece"),
        ({"options": Grpo(kl_weight=0.1)}, r"reference must be torch\.float32 \[3\] where kl_weight is"),
        ({"options": Grpo(entropy_weight=0.1)}, r"entropy must be .* \[3\] where entropy_weight is"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            grpo_loss(**{**good, **changes})
    with pytest.raises(ValueError, match="counts must not be negative"):
        StepCounts(-1, 0)
