"""A policy whose parameters, masters and optimizer state are divided among processes: FSDP2.

`torch.distributed.fsdp.fully_shard` keeps of each parameter, along its first axis, a part a process. A
layer's whole weights are there while it computes, forward or backward. The rollout has weights of its own,
whole, in the model's dtype, which are written anew after every step: it decodes without a collective.

Sums have the order of the replicated run: a process adds gradients of its tokens in token order to float32
tensors, once a step the parts are added in the order of ranks, each process keeping its own part, and the
norm is that of whole tensors, gathered one at a time. So a run has the bits of the replicated one with as
many processes, however a step is cut into passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from kernelbraid.models.accumulating import Accumulating
from kernelbraid.models.config import ModelConfig
from kernelbraid.models.layer import (
    LayerWeights,
    Packed,
    RopeTables,
    attend_packed,
    layer,
    packed_positions,
)
from kernelbraid.models.model import Decoder, ModelWeights
from kernelbraid.models.operators import Operators
from kernelbraid.rl.config import Kernels
from kernelbraid.rl.parallel import Group
from kernelbraid.rl.policy import Evaluated, Policy, ValueHead, evaluate, mastered, norm_of
from kernelbraid.rl.recording import Calls
from kernelbraid.rl.records import Completion, Finish, Sampling

Seen = Callable[[str, Tensor], None]
"""Told of each parameter as a computation gets it."""


class Part(nn.Module):
    """Parameters that are gathered together, under names of the whole model.

    Args:
        prefix: of the names.
        tensors: the parameters; they are not copied.
        seen: told of each when it is used.
        copied: hand out copies. Unified operators on a CPU read tensors as arrays of numpy, and torch never
            frees memory that numpy has seen.
    """

    def __init__(self, prefix: str, tensors: Mapping[str, Tensor], seen: Seen, *, copied: bool) -> None:
        super().__init__()
        self.prefix, self.keys, self.seen, self.copied = prefix, list(tensors), seen, copied
        for name, each in tensors.items():
            self.register_parameter(_key(name), nn.Parameter(each.detach()))

    def tensors(self) -> dict[str, Tensor]:
        """The parameters as they are now: whole inside of a forward."""
        found: dict[str, Tensor] = {}
        for name in self.keys:
            each = getattr(self, _key(name))
            found[name] = each.detach().clone().requires_grad_() if self.copied else each
            self.seen(f"{self.prefix}{name}", found[name])
        return found

    def forward(self, compute: Callable[..., Any], *given: Any) -> Any:
        return compute(LayerWeights(**self.tensors()), *given)


class Whole(nn.Module):
    """A model's parts; its forward is any function that computes with them."""

    def __init__(self, ends: Part, layers: Sequence[Part]) -> None:
        super().__init__()
        self.ends, self.layers = ends, nn.ModuleList(layers)

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


@dataclass(frozen=True)
class Gathered:
    """What `evaluate` asks of a decoder, inside of the forward of a `Whole`."""

    config: ModelConfig
    tables: RopeTables
    operators: Operators
    checkpoint: bool
    whole: Whole

    @property
    def weights(self) -> ModelWeights:
        """Weights outside of the layers."""
        held = self.whole.ends.tensors()
        head = held.get("head", held["embedding"])
        return ModelWeights(held["embedding"], (), held["norm"], head)

    def hidden(self, ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """As `Decoder.hidden`."""
        batch = Packed(packed_positions(cu_seqlens, len(ids)), cu_seqlens, max_seqlen)
        weights = self.weights
        x, residual = self.operators.embedding(ids, weights.embedding), None
        for part in self.whole.layers:
            x, residual = part(self._layer, batch, x, residual)
        assert residual is not None
        return self.operators.add_rms_norm(x, residual, weights.norm, self.config.eps)[0]

    def _layer(
        self, weights: LayerWeights, batch: Packed, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        attend = attend_packed(self.config, weights, self.tables, batch, self.operators)

        def run(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            return layer(self.config, weights, x, residual, attend, self.operators)

        if not self.checkpoint or not torch.is_grad_enabled():
            return run(x, residual)
        found: tuple[Tensor, Tensor] = recomputed(
            run, x, residual, use_reentrant=False, preserve_rng_state=False
        )
        return found


class _Adding(Accumulating):
    """Accumulates gradients of parameters that are other tensors than those it was made for."""

    def seen(self, name: str, tensor: Tensor) -> None:
        self._names[id(tensor)] = name


class ShardedPolicy(Policy):
    """A policy on several processes, of which each holds a part of what is trained.

    `parameters` are the rollout's: whole, in the model's dtype, the same in all processes. `masters` and the
    optimizer's state are this process's parts. Every process must make as many passes: `begin` and `finish`
    see to it.

    Args:
        decoder: the whole model, the same in all processes; its tensors become the rollout's.
        kernels, value, checkpoint, masters: as in `Policy`.
        group: the processes, at least two.

    Raises:
        ValueError: kernels has another value, or there is one process.
    """

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels | str = Kernels.UNIFIED,
        *,
        value: bool = False,
        checkpoint: bool = False,
        masters: bool = True,
        group: Group,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if group.world < 2:
            raise ValueError(
                "parallel: fsdp2 divides a model among processes: start it with torchrun, or leave it out"
            )
        self._arrange(decoder, kernels, value=value)
        self.group = group
        self._missing = self.idle_passes = 0
        """Made only to wait for other processes."""
        more = self.value.tensors() if self.value is not None else {}
        weights = self.decoder.weights
        self._adds = _Adding(weights, more) if self.kernels == Kernels.UNIFIED else None
        self._leaves: dict[str, Tensor] = {}
        ends = {name: each for name, each in weights.tensors() if not name.startswith("layers.")}
        copied = self.device.type == "cpu" and self._adds is not None
        parts = [
            Part(f"layers.{i}.", some.tensors(), self._seen, copied=copied)
            for i, some in enumerate(weights.layers)
        ]
        self._whole = Whole(Part("", {**ends, **more}, self._seen, copied=copied), parts)
        mesh = init_device_mesh(self.device.type, (group.world,))
        for part in self._whole.layers:
            fully_shard(part, mesh=mesh)
        fully_shard(self._whole, mesh=mesh)
        self._whole.set_requires_gradient_sync(False)  # type: ignore[operator]  # sums have an order: `gradients`
        self._shards = dict(self._named())
        self.masters = mastered(self._shards, masters)
        self._gathered = Gathered(
            self.decoder.config, self.decoder.tables, self._adds or self.operators, checkpoint, self._whole
        )

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """This process's part of each parameter, in the model's dtype."""
        found: dict[str, Tensor] = {}
        for part in (self._whole.ends, *self._whole.layers):
            assert isinstance(part, Part)
            for name in part.keys:
                found[f"{part.prefix}{name}"] = getattr(part, _key(name)).to_local().detach()
        for name in self.parameters:
            yield name, found[name]

    def _seen(self, name: str, tensor: Tensor) -> None:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return
        self._leaves[name] = tensor
        if isinstance(self._adds, _Adding):
            self._adds.seen(name, tensor)

    def zero_grad(self) -> None:
        if self._adds is not None:
            self._adds.zero()
        for each in self._leaves.values():
            each.grad = None

    def gradients(self) -> Mapping[str, Tensor]:
        """This process's part of each gradient, float32, added over processes in the order of ranks."""
        if self._adds is not None:
            mine: Mapping[str, Tensor] = self._adds.gradients()
            return {name: self.group.scatter(each) for name, each in mine.items()}
        found = {}
        for name, each in self.parameters.items():
            leaf = self._leaves.get(name)
            grad = leaf.grad if leaf is not None else None
            full = torch.zeros_like(each, dtype=torch.float32) if grad is None else grad.float()
            found[name] = self.group.scatter(full)
        return found

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        return norm_of(self.whole(name, each) for name, each in gradients.items())

    def publish(self) -> None:
        """Round the masters to the parts, and write the rollout's weights anew."""
        with torch.no_grad():
            for name, each in self.parameters.items():
                if self.masters[name] is not self._shards[name]:
                    self._shards[name].copy_(self.masters[name])
                each.copy_(self.whole(name, self._shards[name]))

    def whole(self, name: str, shard: Tensor) -> Tensor:
        return self.group.whole(shard, self.parameters[name].shape)

    def part(self, name: str, full: Tensor) -> Tensor:
        return part_of(full, self.group.world, self.group.rank)

    def evaluate(
        self, completions: Sequence[Completion], temperature: float, *, entropy: bool = False
    ) -> Evaluated:
        def compute() -> tuple[Tensor, Tensor | None, Tensor | None]:
            value = None
            if self.value is not None:
                held = self._whole.ends.tensors()
                value = ValueHead(held["value.weight"], held["value.bias"])
            found = evaluate(self._gathered, completions, temperature, value=value, entropy=entropy)
            return found.logprobs, found.values, found.entropy

        return Evaluated(*self._whole(compute))

    def begin(self, passes: int) -> None:
        """Agree on the number of passes: that of the process with most."""
        self._missing = max(self.group.gather([passes])) - passes

    def finish(self) -> None:
        """Make the passes that are missing: forward and backward of a token, times 0."""
        for _ in range(self._missing):
            self.idle_passes += 1
            found = self.evaluate([self._idle()], 1.0)
            total = found.logprobs.sum() + (0.0 if found.values is None else found.values.sum())
            (0.0 * total).backward()  # type: ignore[no-untyped-call]

    def _idle(self) -> Completion:
        """One token after another."""
        one = torch.zeros(1, dtype=torch.int32)
        return Completion(
            prompt=one, tokens=one, sampling=Sampling(max_tokens=1), finish=Finish.LENGTH,
            snapshot=None, prompt_index=0, sample_index=0,  # type: ignore[arg-type]
        )  # fmt: skip

    def record(self, calls: Calls) -> None:
        """Raise ValueError: calls are counted where a model is not divided."""
        raise ValueError("workloads are recorded with parallel: replicated")


def part_of(full: Tensor, world: int, rank: int) -> Tensor:
    """A process's part of a tensor along its first axis, as FSDP2 divides it; perhaps no rows."""
    chunks = torch.chunk(full, world)
    return chunks[rank] if rank < len(chunks) else full[:0]


def _key(name: str) -> str:
    """As a module can call a parameter."""
    return name.replace(".", "_")
