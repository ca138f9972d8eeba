"""Old log-probabilities of rollout batches: reused where valid, tested on a sample, otherwise recomputed.

Before the first optimizer step on a batch `OldLogprobs.resolve` decides, recomputes a sample under the
snapshot's weights, and compares bits as integers. What it returns serves all minibatches and epochs.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelbraid.rl.choices import choose
from kernelbraid.rl.records import Completion, RolloutBatch, Snapshot, pack
from kernelbraid.rl.reuse import (
    Decision,
    Finding,
    Mode,
    Objective,
    Reason,
    decide,
    recorded_logprobs,
)


class OnMismatch(StrEnum):
    """What a spot check that finds other bits leads to."""

    STOP = "stop"
    """An error: something breaks the contract, and training on would hide it."""
    FALL_BACK = "fall_back"
    """A warning, and the batch is recomputed."""


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """How much of a batch is recomputed to test its records."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    completions: int = 2
    """That hold at least one token; 0 turns the check off."""
    seed: int = 0
    on_mismatch: OnMismatch = OnMismatch.STOP

    def __post_init__(self) -> None:
        if self.completions < 0:
            raise ValueError(f"completions must not be negative, got {self.completions}")
        object.__setattr__(self, "on_mismatch", choose(OnMismatch, "on_mismatch", self.on_mismatch))


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What the snapshot's weights give the tokens of some completions, packed in their order."""

    logprobs: Tensor
    """float32 [T]: those that the objective names."""
    values: Tensor | None = None
    """float32 [T], where the objective needs them."""


Recompute = Callable[[Sequence[Completion]], Recomputed]
"""Computes completions under the snapshot's weights, which must not have moved on."""


@dataclass(slots=True)
class Counters:
    """What happened to the batches of a run."""

    reused_batches: int = 0
    recomputed_batches: int = 0
    recomputed_for: Counter[str] = field(default_factory=Counter)
    """Batches by code of `Reason`; one with several reasons counts for each."""
    checked_tokens: int = 0
    unequal_tokens: int = 0
    """Numbers of checked tokens, log-probabilities or values, with other bits than recorded."""
    logprob_mismatch_max: float = 0.0
    """The largest absolute difference of a checked log-probability; infinite where one was NaN."""

    def document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "reused_batches": self.reused_batches,
            "recomputed_batches": self.recomputed_batches,
            "recomputed_for": dict(sorted(self.recomputed_for.items())),
            "checked_tokens": self.checked_tokens,
            "unequal_tokens": self.unequal_tokens,
            "logprob_mismatch_max": self.logprob_mismatch_max,
        }


@dataclass(frozen=True, slots=True)
class OldNumbers:
    """The snapshot's numbers of a batch, packed in the order of its completions."""

    logprobs: Tensor
    """float32 [T] on the CPU."""
    values: Tensor | None
    cu_seqlens: Tensor
    """int32 [N + 1]."""
    decision: Decision

    def of(self, completions: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and values of a minibatch: completions by position, in the order given."""
        offsets = self.cu_seqlens.tolist()
        pieces = [slice(offsets[i], offsets[i + 1]) for i in completions]

        def chosen(numbers: Tensor) -> Tensor:
            return torch.cat([numbers[:0], *(numbers[piece] for piece in pieces)])

        return chosen(self.logprobs), None if self.values is None else chosen(self.values)


class MismatchError(RuntimeError):
    """Numbers that must have equal bits have not."""


class OldLogprobs:
    """Gives every rollout batch of a run its old log-probabilities, and counts how.

    Args:
        objective: what the loss names.
        mode: `auto`, `require` or `never`.
        check: how much is tested, and what a mismatch leads to.

    Raises:
        ValueError: mode has another value.
    """

    def __init__(
        self, objective: Objective, mode: Mode | str = Mode.AUTO, check: SpotCheck | None = None
    ) -> None:
        self.objective = objective
        self.mode = choose(Mode, "reuse", mode)
        self.check = check or SpotCheck()
        self.counters = Counters()
        self._resolved: set[int] = set()

    def resolve(self, batch: RolloutBatch, snapshot: Snapshot, recompute: Recompute) -> OldNumbers:
        """Reuse a batch's recorded numbers or recompute them, before the first optimizer step on it.

        Args:
            batch: what the rollout recorded.
            snapshot: the policy that the loss divides by.
            recompute: computes under that policy's weights.

        Returns:
            Numbers for all minibatches and epochs of the batch.

        Raises:
            ReuseError: mode is `require` and reuse is not valid.
            MismatchError: the sample has other bits than recorded, and `on_mismatch` is `stop` or mode is
                `require`.
            RuntimeError: the batch was resolved before.
            ValueError: `recompute` gave something else than one float32 number a token.
        """
        if batch.number in self._resolved:
            raise RuntimeError(
                f"batch {batch.number} was resolved before: use those numbers for all minibatches and epochs"
            )
        decision = decide(batch, self.objective, snapshot, self.mode)
        if decision.reuse:
            difference = self._difference(batch, recompute)
            if difference:
                decision = self._mismatch(batch, difference)
        self._resolved.add(batch.number)
        offsets = batch.packed().cu_seqlens
        if decision.reuse:
            self.counters.reused_batches += 1
            logprobs, values = self._recorded(batch.completions)
        else:
            self.counters.recomputed_batches += 1
            self.counters.recomputed_for.update(each.code for each in decision.reasons)
            found = self._computed(batch.completions, recompute)
            logprobs, values = found.logprobs, found.values
        return OldNumbers(logprobs, values, offsets, decision)

    def _difference(self, batch: RolloutBatch, recompute: Recompute) -> str:
        """What a sample's first number with other bits is, or nothing."""
        chosen = sample(batch, self.check.completions, self.check.seed)
        if not chosen:
            return ""
        completions = [batch.completions[i] for i in chosen]
        found = self._computed(completions, recompute)
        logprobs, values = self._recorded(completions)
        self.counters.checked_tokens += len(logprobs)
        first = self._compare("log-probability", logprobs, found.logprobs, chosen, completions)
        gaps = (logprobs.double() - found.logprobs.double()).abs().nan_to_num(nan=float("inf"))
        largest = float(gaps.max()) if len(gaps) else 0.0
        self.counters.logprob_mismatch_max = max(self.counters.logprob_mismatch_max, largest)
        if values is not None and found.values is not None:
            first = self._compare("value", values, found.values, chosen, completions) or first
        return first

    def _compare(
        self,
        what: str,
        recorded: Tensor,
        computed: Tensor,
        chosen: Sequence[int],
        completions: Sequence[Completion],
    ) -> str:
        places = unequal(recorded, computed)
        self.counters.unequal_tokens += len(places)
        if not len(places):
            return ""
        place = int(places[0])
        offsets = pack(completions).cu_seqlens
        at = int(torch.searchsorted(offsets, place, right=True)) - 1
        token = place - int(offsets[at])
        values = f"recorded {float(recorded[place])!r}, recomputed {float(computed[place])!r}"
        return (
            f"{len(places)} of {len(recorded)} numbers, first the {what} of token {token} of completion "
            f"{chosen[at]}: {values}"
        )

    def _mismatch(self, batch: RolloutBatch, difference: str) -> Decision:
        decision = Decision(False, (Finding(Reason.SPOT_CHECK, None, difference),))
        message = f"batch {batch.number}: {decision.explain()}"
        if self.mode == Mode.REQUIRE or self.check.on_mismatch == OnMismatch.STOP:
            raise MismatchError(
                f"{message} Rollout and update must run the same contracts on the same weights."
            )
        warnings.warn(f"{message} The batch is recomputed.", RuntimeWarning, stacklevel=3)
        return decision

    def _recorded(self, completions: Sequence[Completion]) -> tuple[Tensor, Tensor | None]:
        pieces, values = [torch.empty(0)], [torch.empty(0)]
        for each in completions:
            if not len(each.tokens):
                continue
            found = recorded_logprobs(each, self.objective)
            assert found is not None, "decided before"
            pieces.append(found)
            if self.objective.values:
                assert each.values is not None, "decided before"
                values.append(each.values)
        return torch.cat(pieces), torch.cat(values) if self.objective.values else None

    def _computed(self, completions: Sequence[Completion], recompute: Recompute) -> Recomputed:
        tokens = sum(len(each.tokens) for each in completions)
        found = recompute(completions)
        logprobs = _on_host("logprobs", found.logprobs, tokens)
        if not self.objective.values:
            return Recomputed(logprobs)
        if found.values is None:
            raise ValueError("recompute must give values: the objective needs them")
        return Recomputed(logprobs, _on_host("values", found.values, tokens))


def sample(batch: RolloutBatch, count: int, seed: int) -> list[int]:
    """Positions of completions with tokens, drawn without replacement; the same wherever it is called.

    Args:
        batch: to draw from.
        count: how many, at most.
        seed: with the batch's number and the requests' names it decides.
    """

    def key(position: int) -> bytes:
        each = batch.completions[position]
        name = f"{seed}/{batch.number}/{each.prompt_index}/{each.sample_index}"
        return hashlib.sha256(name.encode()).digest()

    filled = [i for i, each in enumerate(batch.completions) if len(each.tokens)]
    return sorted(sorted(filled, key=key)[:count])


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Positions where two float32 tensors differ in bits, compared as integers."""
    return torch.nonzero(one.view(torch.int32) != other.view(torch.int32)).flatten()


def check_first_minibatch(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> None:
    """Check that the update computes the old log-probabilities' bits: every ratio is exactly 1.

    It holds in the first minibatch alone: after an optimizer step the policy is another one. On a GPU this
    waits for the device.

    Args:
        logprobs: [T] float32, of the update before its first step.
        old_logprobs: [T] float32.
        mask: [T] bool: where tokens count.

    Raises:
        MismatchError: a counted token's bits differ.
    """
    one, other = logprobs.detach()[mask], old_logprobs[mask]
    places = unequal(one, other)
    if len(places):
        first = int(torch.nonzero(mask)[places[0]])
        place = int(places[0])
        raise MismatchError(
            f"the first minibatch must have ratio 1: {len(places)} of {len(one)} log-probabilities differ in "
            f"bits, first that of token {first}: {float(one[place])!r} against {float(other[place])!r}"
        )


def _on_host(name: str, numbers: Tensor, tokens: int) -> Tensor:
    if numbers.dtype != torch.float32 or numbers.shape != (tokens,):
        found = f"{numbers.dtype} {list(numbers.shape)}"
        raise ValueError(f"recompute must give {name} as float32 [{tokens}], got {found}")
    return numbers.detach().cpu()
