"""What is trained: a decoder's parameters, for PPO a value head, and their gradients."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernelbraid.models.accumulating import Accumulating
from kernelbraid.models.model import Decoder, ModelWeights
from kernelbraid.models.operators import UNIFIED, Operators
from kernelbraid.models.vendor import vendor
from kernelbraid.rl import pieces
from kernelbraid.rl.choices import choose
from kernelbraid.rl.config import Kernels
from kernelbraid.rl.recording import Calls, Recording
from kernelbraid.rl.records import Completion
from kernelbraid.rl.spot_check import Recomputed


@dataclass(frozen=True, slots=True)
class ValueHead:
    """A linear layer from the last hidden state to the value of a state."""

    weight: Tensor
    """[1, hidden], dtype of the model."""
    bias: Tensor
    """[1]."""

    @classmethod
    def zero(cls, decoder: Decoder) -> "ValueHead":
        """One that gives every state the value 0."""
        like = decoder.weights.norm
        return cls(like.new_zeros(1, len(like)), like.new_zeros(1))

    def tensors(self) -> dict[str, Tensor]:
        return {"value.weight": self.weight, "value.bias": self.bias}

    def __call__(self, hidden: Tensor, operators: Operators = UNIFIED) -> Tensor:
        """Values of states, float32 [T].

        Args:
            hidden: [T, hidden], last hidden states, normed.
            operators: what multiplies.

        Bits: contract `linear` 1, so that rollout and update give a state the same value.
        """
        return operators.linear(hidden, self.weight, self.bias)[:, 0].float()


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What the update computes for the tokens of completions, packed in their order."""

    logprobs: Tensor
    """float32 [T]; carries a gradient where one is recorded."""
    values: Tensor | None
    entropy: Tensor | None


class Policy:
    """A decoder that is trained, on one device.

    Parameters of 16 bits have float32 masters, unless told otherwise, which the optimizer moves and which are
    rounded after each of its steps; float32 parameters are their own masters.

    Args:
        decoder: the model; its operators are replaced by those of `kernels`.
        kernels: `unified`, or `vendor` for torch's own.
        value: whether a value head is trained too.
        checkpoint: compute activations again in the backward pass instead of keeping them.
        masters: whether parameters of 16 bits have float32 masters; without, the optimizer moves them
            themselves, and its state has their dtype.

    Raises:
        ValueError: kernels has another value.
    """

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels | str = Kernels.UNIFIED,
        *,
        value: bool = False,
        checkpoint: bool = False,
        masters: bool = True,
    ) -> None:
        self._arrange(decoder, kernels, value=value)
        more = self.value.tensors() if self.value is not None else {}
        for each in self.parameters.values():
            each.requires_grad_(True)
        self.masters = mastered(self.parameters, masters)
        theirs = self.kernels == Kernels.VENDOR
        self._adds: Accumulating | None = None if theirs else Accumulating(decoder.weights, more)
        self._trained = replace(self.decoder, operators=self._adds or self.operators, checkpoint=checkpoint)

    def _arrange(self, decoder: Decoder, kernels: Kernels | str, *, value: bool) -> None:
        """The rollout's decoder, the value head, and all parameters by name."""
        self.kernels = choose(Kernels, "kernels", kernels)
        theirs = self.kernels == Kernels.VENDOR
        self.operators: Operators = vendor(decoder.weights.norm.device) if theirs else UNIFIED
        positions = pieces.filled(decoder.positions)  # the update fills sequences up
        self.decoder = replace(decoder, operators=self.operators, positions=positions)
        self.value = ValueHead.zero(decoder) if value else None
        more = self.value.tensors() if self.value is not None else {}
        self.parameters: dict[str, Tensor] = {**dict(decoder.weights.tensors()), **more}

    @property
    def device(self) -> torch.device:
        return self.decoder.weights.norm.device

    def zero_grad(self) -> None:
        """Begin an optimizer step."""
        if self._adds is not None:
            self._adds.zero()
        for each in self.parameters.values():
            each.grad = None

    def gradients(self) -> Mapping[str, Tensor]:
        """Of each parameter by name, float32, once a step is through all of its pieces."""
        if self._adds is not None:
            return self._adds.gradients()
        return {
            name: torch.zeros_like(each, dtype=torch.float32) if each.grad is None else each.grad.float()
            for name, each in self.parameters.items()
        }

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Of gradients as `gradients` gives them."""
        return norm_of(gradients.values())

    def whole(self, name: str, shard: Tensor) -> Tensor:
        """The whole of what the optimizer keeps for a parameter in this process."""
        return shard

    def part(self, name: str, full: Tensor) -> Tensor:
        """The opposite: what this process keeps."""
        return full

    def begin(self, passes: int) -> None:
        """Told how many passes a step will have, before them."""

    def finish(self) -> None:
        """Told that a step's passes are made, before its gradients are asked for."""

    def publish(self) -> None:
        """Round the masters to the parameters, in place."""
        with torch.no_grad():
            for name, each in self.parameters.items():
                if self.masters[name] is not each:
                    each.copy_(self.masters[name])

    def evaluate(
        self, completions: Sequence[Completion], temperature: float, *, entropy: bool = False
    ) -> Evaluated:
        """As the function of that name, by what is trained. Differentiable."""
        return evaluate(self._trained, completions, temperature, value=self.value, entropy=entropy)

    def recompute(self, completions: Sequence[Completion], temperature: float, most: int) -> Recomputed:
        """As the function of that name, under the present weights."""
        return recompute(self.decoder, completions, temperature, most, value=self.value)

    def record(self, calls: Calls) -> None:
        """Count what rollout and update ask of their operators from now on; bits stay as they are.

        Call it before an engine is made of `decoder`, and turn CUDA graphs off.
        """
        self.operators = Recording(self.decoder.operators, calls)
        self.decoder = replace(self.decoder, operators=self.operators)
        self._trained = replace(self._trained, operators=Recording(self._trained.operators, calls))

    def digest(self) -> str:
        """SHA-256 of the parameters' bits, by name."""
        whole = hashlib.sha256()
        for name, each in self.parameters.items():
            whole.update(name.encode())
            whole.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()


def mastered(parameters: Mapping[str, Tensor], masters: bool) -> dict[str, Tensor]:
    """What the optimizer moves, by name: float32 copies of parameters of 16 bits, or themselves."""
    return {
        name: each.detach().float().clone() if masters and each.dtype != torch.float32 else each
        for name, each in parameters.items()
    }


class Evaluates(Protocol):
    """What `evaluate` asks of a decoder."""

    @property
    def weights(self) -> ModelWeights: ...

    @property
    def operators(self) -> Operators: ...

    def hidden(self, ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor: ...


def evaluate(
    model: Evaluates,
    completions: Sequence[Completion],
    temperature: float,
    *,
    value: ValueHead | None = None,
    entropy: bool = False,
) -> Evaluated:
    """Log-probabilities of completions' tokens by the packed forward, in one piece.

    Args:
        model: computes them.
        completions: at least one.
        temperature: of the log-probabilities.
        value: a head whose values are computed too.
        entropy: whether the entropies of the distributions are.
    """
    batch = pieces.piece(completions, model.weights.norm.device)
    hidden = pieces.take(model.hidden(batch.ids, batch.cu_seqlens, batch.max_seqlen), batch.rows)
    found, entropies = model.operators.logprob(
        hidden, model.weights.head, batch.targets, temperature, entropy=entropy
    )
    return Evaluated(
        pieces.take(found, batch.counted),
        None if value is None else pieces.take(value(hidden, model.operators), batch.counted),
        None if entropies is None else pieces.take(entropies, batch.counted),
    )


def recompute(
    model: Decoder,
    completions: Sequence[Completion],
    temperature: float,
    most: int,
    *,
    value: ValueHead | None = None,
) -> Recomputed:
    """Log-probabilities and values without gradients, on the host.

    Args:
        model, temperature, value: as in `evaluate`.
        completions: any number.
        most: tokens of a pass.
    """
    logprobs, values = [torch.empty(0)], [torch.empty(0)]
    with torch.no_grad():
        for run in pieces.cut(completions, most):
            found = evaluate(model, [completions[i] for i in run], temperature, value=value)
            logprobs.append(found.logprobs.cpu())
            if found.values is not None:
                values.append(found.values.cpu())
    return Recomputed(torch.cat(logprobs), None if value is None else torch.cat(values))


def frozen(decoder: Decoder) -> Decoder:
    """The same model on parameters of its own, which nothing trains: a reference."""
    weights = decoder.weights
    held: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        return held.setdefault(id(tensor), tensor.detach().clone())

    layers = tuple(
        replace(each, **{name: copy(tensor) for name, tensor in each.tensors().items()})
        for each in weights.layers
    )
    return replace(
        decoder,
        weights=replace(
            weights,
            embedding=copy(weights.embedding),
            layers=layers,
            norm=copy(weights.norm),
            head=copy(weights.head),
        ),
    )


SQUARES = 1 << 16
"""Numbers whose squares are added at once, in numpy's pairwise order; sums of these follow one another."""


def norm_of(gradients: Iterable[Tensor]) -> float:
    """Root of the sum of all squares, float64: on the host, in one order whatever the number of threads."""
    parts: list[float | Tensor] = []
    for each in gradients:
        numbers = each.detach().flatten()
        if numbers.is_cuda:
            parts.append(numbers.double().square().sum())
            continue
        array = numbers.float().numpy()
        for start in range(0, len(array), SQUARES):
            parts.append(float(np.square(array[start : start + SQUARES], dtype=np.float64).sum()))
    waiting = [each for each in parts if isinstance(each, Tensor)]
    arrived = iter(torch.stack(waiting).tolist() if waiting else [])  # one wait for the device, not one each
    total = 0.0
    for part in parts:
        total += next(arrived) if isinstance(part, Tensor) else part
    return float(np.sqrt(total))
