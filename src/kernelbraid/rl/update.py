"""The policy update: optimizer steps on the completions of a rollout, in packed micro-batches.

With unified operators a step's gradients have the same bits however it is cut into micro-batches: weights of
tokens follow from counts of the whole step, sums over tokens go on in token order from what is there, and the
norm that gradients are clipped by is added on the host in one order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernelbraid.rl import pieces
from kernelbraid.rl.config import Config, Old
from kernelbraid.rl.losses import Grpo, Loss, StepCounts, grpo_loss, ppo_loss
from kernelbraid.rl.policy import Policy
from kernelbraid.rl.records import RolloutBatch, pack
from kernelbraid.rl.spot_check import check_first_minibatch
from kernelbraid.rl.tasks.feed import order


@dataclass(frozen=True, slots=True)
class Prepared:
    """All numbers of a rollout batch that its steps read, packed in the order of its completions."""

    batch: RolloutBatch
    cu_seqlens: Tensor
    mask: Tensor
    """bool [T]: tokens that count."""
    old: Tensor | None
    """float32 [T]: the snapshot's log-probabilities; None where each step takes its own."""
    advantages: Tensor
    """float32 [N] for GRPO, [T] for PPO."""
    old_values: Tensor | None = None
    returns: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What an optimizer step was."""

    loss: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    clipped: int
    """Tokens whose ratio was cut."""
    largest_log_ratio: float


Reduce = Callable[[Mapping[str, Tensor]], None]
"""Adds gradients over processes, in place."""


class Updater:
    """Moves a policy's parameters.

    Args:
        policy: what is trained.
        config: of the run.
        reduce: adds gradients over processes; None for one process.
        total: adds a number over processes.
        share: which part of a minibatch this process computes, of how many.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        *,
        reduce: Reduce | None = None,
        total: Callable[[float], float] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.policy, self.config, self.options = policy, config, config.loss
        self.steps = 0
        """Optimizer steps so far: the version of the weights."""
        self._reduce, self._total, self._share = reduce, total, share
        update = config.update
        self.optimizer = torch.optim.AdamW(
            [policy.masters[name] for name in policy.parameters],
            lr=update.learning_rate,
            betas=update.betas,
            weight_decay=update.weight_decay,
            foreach=False,
            fused=policy.device.type == "cuda",
        )

    def state(self) -> dict[str, Any]:
        """The optimizer's state, whole: the same in all processes, which all must ask."""
        return self._state(self.optimizer.state_dict(), self.policy.whole)

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a state over, of which this process may keep a part."""
        self.optimizer.load_state_dict(self._state(state, self.policy.part))

    def _state(self, state: Mapping[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
        names = list(self.policy.parameters)
        found = {
            i: {
                key: change(names[i], each) if isinstance(each, Tensor) and each.dim() else each
                for key, each in numbers.items()
            }
            for i, numbers in state["state"].items()
        }
        return {**state, "state": found}

    def run(self, prepared: Prepared) -> list[Step]:
        """All epochs and minibatches of a rollout batch.

        Raises:
            MismatchError: with unified operators and old log-probabilities of the snapshot, the first
                minibatch's ratios are not exactly 1.
            FloatingPointError: a loss or a gradient is not finite; parameters are those before that step.
        """
        found: list[Step] = []
        count, update = len(prepared.batch), self.config.update
        for epoch in range(update.epochs):
            places = order(count, self.config.seed, prepared.batch.number * update.epochs + epoch)
            for part in np.array_split(np.asarray(places), update.minibatches):
                first = not found and self.config.reuse.old in (Old.REUSE, Old.RECOMPUTE)
                found.append(self._step(prepared, sorted(int(i) for i in part), first))
        return found

    def _step(self, prepared: Prepared, chosen: Sequence[int], first: bool) -> Step:
        lengths = prepared.cu_seqlens.diff().tolist()
        offsets = prepared.cu_seqlens.tolist()
        counted = sum(int(prepared.mask[offsets[i] : offsets[i + 1]].sum()) for i in chosen)
        step = StepCounts(len(chosen), counted)
        rank, world = self._share
        mine = [int(i) for i in np.array_split(np.asarray(chosen), world)[rank]]
        completions = [prepared.batch.completions[i] for i in mine]
        self.policy.zero_grad()
        value, clipped, largest = 0.0, 0, 0.0
        runs = [
            [mine[i] for i in run] for run in pieces.cut(completions, self.config.update.micro_batch_tokens)
        ]
        runs = [places for places in runs if any(lengths[i] for i in places)]
        self.policy.begin(len(runs))
        for places in runs:
            loss = self._piece(prepared, places, step, value, first)
            value = float(loss.value.detach())
            loss.value.backward()  # type: ignore[no-untyped-call]
            clipped += int(loss.stats.clipped_low) + int(loss.stats.clipped_high)
            largest = max(largest, float(loss.stats.largest_log_ratio))
        self.policy.finish()
        gradients = self.policy.gradients()
        if self._reduce is not None:
            self._reduce(gradients)
        if self._total is not None:
            value, clipped = self._total(value), int(self._total(clipped))
        norm = self._clip(gradients)
        if not np.isfinite(value) or not np.isfinite(norm):
            raise FloatingPointError(
                f"step {self.steps}: loss {value} and gradient norm {norm} must be finite; the weights were "
                "not changed"
            )
        self._apply(gradients)
        return Step(value, norm, counted, clipped, largest)

    def _piece(
        self, prepared: Prepared, places: Sequence[int], step: StepCounts, start: float, first: bool
    ) -> Loss:
        completions = [prepared.batch.completions[i] for i in places]
        device, offsets = self.policy.device, prepared.cu_seqlens.tolist()

        def of(numbers: Tensor) -> Tensor:
            return torch.cat([numbers[offsets[i] : offsets[i + 1]] for i in places]).to(device)

        found = self.policy.evaluate(
            completions, self.config.sampling.temperature, entropy=self.options.entropy_weight != 0
        )
        cu_seqlens, mask = pack(completions).cu_seqlens.to(device), of(prepared.mask)
        old = found.logprobs.detach() if prepared.old is None else of(prepared.old)
        if first and self.config.model.kernels == "unified":
            check_first_minibatch(found.logprobs, old, mask)
        reference = None if prepared.reference is None else of(prepared.reference)
        if isinstance(self.options, Grpo):
            return grpo_loss(
                found.logprobs,
                old,
                prepared.advantages[list(places)].to(device),
                cu_seqlens,
                mask,
                step,
                self.options,
                reference=reference,
                entropy=found.entropy,
                start=start,
            )
        assert found.values is not None and prepared.old_values is not None and prepared.returns is not None
        return ppo_loss(
            found.logprobs,
            old,
            of(prepared.advantages),
            found.values,
            of(prepared.old_values),
            of(prepared.returns),
            cu_seqlens,
            mask,
            step,
            self.options,
            reference=reference,
            entropy=found.entropy,
            start=start,
        )

    def _clip(self, gradients: Mapping[str, Tensor]) -> float:
        """Scale gradients to the largest norm allowed; returns the norm before."""
        norm = self.policy.norm(gradients)
        most = self.config.update.max_grad_norm
        if most is not None and norm > most:
            for each in gradients.values():
                each.mul_(most / norm)
        return norm

    def _apply(self, gradients: Mapping[str, Tensor]) -> None:
        update = self.config.update
        warm = min(1.0, (self.steps + 1) / update.warmup_steps) if update.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = update.learning_rate * warm
        for name in self.policy.parameters:
            master = self.policy.masters[name]
            master.grad = gradients[name].to(master.dtype)
        self.optimizer.step()
        for name in self.policy.parameters:
            self.policy.masters[name].grad = None
        self.policy.publish()
        self.steps += 1
