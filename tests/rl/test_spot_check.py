"""Reused numbers are tested on a sample; what differs stops the run or is recomputed, and is counted."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from tests.rl.rollouts import SNAPSHOT, batch, completion

from kernelbraid.models.config import named
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Decoder
from kernelbraid.models.relations import generate
from kernelbraid.rl.losses import Grpo, StepCounts, grpo_loss
from kernelbraid.rl.records import Completion, Finish, RolloutBatch, Sampling, Snapshot
from kernelbraid.rl.reuse import Objective, Reason, ReuseError
from kernelbraid.rl.spot_check import (
    MismatchError,
    OldLogprobs,
    Recomputed,
    SpotCheck,
    check_first_minibatch,
    sample,
)

OBJECTIVE = Objective(Sampling(temperature=0.8))


def faithful(completions: Sequence[Completion]) -> Recomputed:
    """What was recorded."""
    logprobs = torch.cat(
        [torch.empty(0), *(each.logprobs for each in completions if each.logprobs is not None)]
    )
    return Recomputed(logprobs, logprobs + 1)


def one_bit_off(completions: Sequence[Completion]) -> Recomputed:
    found = faithful(completions).logprobs.clone()
    found.view(torch.int32)[-1] += 1
    return Recomputed(found)


def counted(
    recompute: Callable[[Sequence[Completion]], Recomputed],
) -> tuple[Callable[[Sequence[Completion]], Recomputed], list[int]]:
    calls: list[int] = []

    def wrapped(completions: Sequence[Completion]) -> Recomputed:
        calls.append(len(completions))
        return recompute(completions)

    return wrapped, calls


def test_reuse_computes_a_sample_alone() -> None:
    old = OldLogprobs(OBJECTIVE, "require", SpotCheck(completions=2))
    recompute, calls = counted(faithful)
    given = batch()
    found = old.resolve(given, SNAPSHOT, recompute)
    assert calls == [2] and found.decision.reuse
    assert torch.equal(found.logprobs, faithful(given.completions).logprobs)
    minibatch, values = found.of([4, 1])
    assert (
        torch.equal(minibatch, faithful([given.completions[i] for i in (4, 1)]).logprobs) and values is None
    )
    assert found.of([])[0].shape == (0,)
    counters = old.counters.document()
    assert counters["reused_batches"] == 1 and counters["recomputed_batches"] == 0
    assert counters["checked_tokens"] > 0 and counters["unequal_tokens"] == 0
    assert counters["logprob_mismatch_max"] == 0
    with pytest.raises(
        RuntimeError, match="batch 0 was resolved before: use those numbers for all minibatches"
    ):
        old.resolve(given, SNAPSHOT, recompute)


def test_minibatches_of_all_epochs_get_the_snapshots_numbers() -> None:
    given = batch(prompts=4)
    found = OldLogprobs(OBJECTIVE).resolve(given, SNAPSHOT, faithful)
    for epoch in range(3):
        order = [(5 * i + epoch) % 8 for i in range(8)]
        for minibatch in (order[:3], order[3:4], order[4:]):
            logprobs, _ = found.of(minibatch)
            assert torch.equal(logprobs, faithful([given.completions[i] for i in minibatch]).logprobs)
    moved = replace(SNAPSHOT, version=4)
    late = OldLogprobs(OBJECTIVE).resolve(given, moved, faithful)
    assert late.decision.reasons == (Reason.STALE_VERSION,), "asked after an optimizer step"


def test_no_check_and_batches_without_tokens() -> None:
    recompute, calls = counted(faithful)
    assert OldLogprobs(OBJECTIVE, check=SpotCheck(0)).resolve(batch(), SNAPSHOT, recompute).decision.reuse
    nothing = torch.empty(0, dtype=torch.int32)
    empty = RolloutBatch(1, (completion(tokens=nothing, logprobs=None, values=None),))
    found = OldLogprobs(OBJECTIVE).resolve(empty, SNAPSHOT, recompute)
    assert found.decision.reuse and found.logprobs.shape == (0,) and found.cu_seqlens.tolist() == [0, 0]
    assert calls == []


def test_the_sample_is_decided_by_its_names() -> None:
    given = batch(prompts=20, samples=4)
    chosen = sample(given, 5, seed=1)
    assert (
        chosen == sample(batch(prompts=20, samples=4), 5, seed=1) == sorted(set(chosen)) and len(chosen) == 5
    )
    assert chosen != sample(given, 5, seed=2)
    assert chosen != sample(batch(number=1, prompts=20, samples=4), 5, seed=1)
    assert set(sample(given, 3, seed=1)) <= set(chosen)
    assert sample(given, 1000, seed=1) == list(range(80))


def test_other_bits_stop() -> None:
    old = OldLogprobs(OBJECTIVE)
    with pytest.raises(
        MismatchError, match=r"batch 0: A recomputed sample had other bits .* 1 of \d+ numbers"
    ):
        old.resolve(batch(), SNAPSHOT, one_bit_off)
    assert old.counters.unequal_tokens == 1 and 0 < old.counters.logprob_mismatch_max < 1e-6
    assert old.counters.reused_batches == 0


def test_other_bits_fall_back_loudly() -> None:
    old = OldLogprobs(OBJECTIVE, check=SpotCheck(on_mismatch="fall_back"))  # type: ignore[arg-type]
    recompute, calls = counted(one_bit_off)
    with pytest.warns(RuntimeWarning, match="The batch is recomputed"):
        found = old.resolve(batch(), SNAPSHOT, recompute)
    assert calls == [2, 6] and found.decision.reasons == (Reason.SPOT_CHECK,)
    assert torch.equal(found.logprobs, one_bit_off(batch().completions).logprobs)
    assert old.counters.document()["recomputed_for"] == {"spot_check": 1}
    required = OldLogprobs(OBJECTIVE, "require", SpotCheck(on_mismatch="fall_back"))  # type: ignore[arg-type]
    with pytest.raises(MismatchError):
        required.resolve(batch(), SNAPSHOT, one_bit_off)


def test_signs_of_zero_and_nan_are_bits() -> None:
    zero = batch(prompts=1, samples=1, logprobs=torch.zeros(2))
    for other in (-0.0, float("nan")):
        old = OldLogprobs(OBJECTIVE)
        with pytest.raises(MismatchError):
            old.resolve(zero, SNAPSHOT, lambda given, other=other: Recomputed(torch.full((2,), other)))
    assert old.counters.logprob_mismatch_max == float("inf")


def test_what_is_not_valid_is_recomputed_and_counted() -> None:
    old = OldLogprobs(OBJECTIVE)
    recompute, calls = counted(faithful)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stale = batch(0, snapshot=replace(SNAPSHOT, version=2, dtype="bfloat16"))
        assert not old.resolve(stale, SNAPSHOT, recompute).decision.reuse
        assert old.resolve(batch(1), SNAPSHOT, recompute).decision.reuse
    assert calls == [6, 2]
    assert old.counters.document()["recomputed_for"] == {"dtype": 1, "stale_version": 1}
    assert old.counters.recomputed_batches == old.counters.reused_batches == 1
    with pytest.raises(ReuseError, match="in another dtype"):
        OldLogprobs(OBJECTIVE, "require").resolve(stale, SNAPSHOT, recompute)
    never = OldLogprobs(OBJECTIVE, "never")
    never.resolve(batch(), SNAPSHOT, recompute)
    assert never.counters.document()["recomputed_for"] == {"asked": 1}


def test_values_are_checked_too() -> None:
    objective = replace(OBJECTIVE, values=True)
    given = RolloutBatch(0, tuple(replace(each, values=each.logprobs + 1) for each in batch().completions))
    found = OldLogprobs(objective).resolve(given, SNAPSHOT, faithful)
    assert found.values is not None and torch.equal(found.values, found.logprobs + 1)
    assert found.of([0])[1] is not None

    def other_values(completions: Sequence[Completion]) -> Recomputed:
        right = faithful(completions)
        return replace(right, values=right.logprobs)

    with pytest.raises(MismatchError, match="first the value of token 0 of completion"):
        OldLogprobs(objective).resolve(given, SNAPSHOT, other_values)
    with pytest.raises(ValueError, match="recompute must give values"):
        OldLogprobs(objective).resolve(given, SNAPSHOT, lambda each: Recomputed(faithful(each).logprobs))
    with pytest.raises(
        ValueError, match=r"recompute must give logprobs as float32 \[\d+\], got torch.float64"
    ):
        OldLogprobs(OBJECTIVE).resolve(
            given, SNAPSHOT, lambda each: Recomputed(faithful(each).logprobs.double())
        )


def test_first_minibatch() -> None:
    old, mask = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([True, False, True])
    check_first_minibatch(torch.tensor([-1.0, 9.0, -3.0]), old, mask)
    with pytest.raises(
        MismatchError, match=r"ratio 1: 1 of 2 log-probabilities .* first that of token 2: -3.5"
    ):
        check_first_minibatch(torch.tensor([-1.0, 9.0, -3.5]), old, mask)


def forward(model: Decoder, completions: Sequence[Completion]) -> torch.Tensor:
    """The update's packed forward: log-probabilities of the completions' tokens."""
    rows = [torch.cat([each.prompt, each.tokens]) for each in completions]
    lengths = [len(row) - 1 for row in rows]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    hidden = model.hidden(torch.cat([row[:-1] for row in rows]), offsets, max(lengths))
    scores = model.logprobs(hidden, torch.cat([row[1:] for row in rows]), 0.8)
    return torch.cat(
        [each[-len(of.tokens) :] for each, of in zip(torch.split(scores, lengths), completions, strict=True)]
    )


def test_rollout_of_a_model_is_reused_and_its_first_ratio_is_one() -> None:
    config = named("SmolLM2-135M").small(vocab=200)
    model = Decoder(config, drawn(config, dtype=torch.float32, seed=1), positions=64)
    snapshot = Snapshot(0, "bits", "float32", "cpu", run="here")
    prompts = [torch.arange(n, n + 5 + n, dtype=torch.int32) for n in (1, 4, 9)]
    with torch.no_grad():
        rolled = generate(model, prompts, 6, seed=3, temperature=0.8)
    given = RolloutBatch(0, tuple(
        Completion(
            prompts[i], rolled.sequences[i][len(prompts[i]) :], Sampling(temperature=0.8, max_tokens=6),
            Finish.LENGTH, snapshot, i, 0, rolled.logprobs[i],
        )
        for i in range(3)
    ))  # fmt: skip
    old = OldLogprobs(OBJECTIVE, "require", SpotCheck(3))
    with torch.no_grad():
        found = old.resolve(given, snapshot, lambda each: Recomputed(forward(model, each)))
    assert old.counters.checked_tokens == 18 and old.counters.unequal_tokens == 0

    head = model.weights.head.requires_grad_()
    logprobs = forward(model, given.completions)
    mask = torch.ones(18, dtype=torch.bool)
    check_first_minibatch(logprobs, found.logprobs, mask)
    loss = grpo_loss(
        logprobs, found.logprobs, torch.tensor([1.0, -0.5, -0.5]), found.cu_seqlens, mask,
        StepCounts.of(found.cu_seqlens, mask), Grpo(),
    )  # fmt: skip
    assert loss.stats.largest_log_ratio == 0
    loss.value.backward()
    assert head.grad is not None
    with torch.no_grad():
        head -= 0.1 * head.grad
        with pytest.raises(MismatchError):
            OldLogprobs(OBJECTIVE).resolve(given, snapshot, lambda each: Recomputed(forward(model, each)))
