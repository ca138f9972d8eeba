"""Several processes that train one model, started by torchrun: each draws and computes a share.

Parameters are the same in all of them, or divided among them (`sharded`). Completions are gathered, so that
every process sees the whole batch; gradients are added in the order of ranks, so that the result has one
order.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


class Group:
    """The processes of a run; one of one process needs nothing of torch.distributed.

    Args:
        device: `cpu` or `cuda`, of the model.

    Raises:
        RuntimeError: the processes cannot reach one another.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self._opened = False
        if self.world > 1:
            # Imported before there is a group: their functions take the group of that moment as a default
            # argument, and a group that is referred to keeps its threads beyond `close`, into the exit.
            import torch.distributed as dist
            import torch.distributed.fsdp
            import torch.distributed.nn.functional

            if device == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            if not dist.is_initialized():
                dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
                self._opened = True

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        return self.rank, self.world

    def mine(self, items: Sequence[T]) -> list[T]:
        """This process's share: a run of neighbours, all runs in the order of ranks."""
        return [items[int(i)] for i in np.array_split(np.arange(len(items)), self.world)[self.rank]]

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of all processes, in the order of ranks."""
        if self.world == 1:
            return list(items)
        import torch.distributed as dist

        found: list[list[T] | None] = [None] * self.world
        dist.all_gather_object(found, list(items))
        return [item for each in found for item in each or ()]

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients of all processes in place, in the order of ranks."""
        if self.world == 1:
            return
        import torch.distributed as dist

        for each in gradients.values():
            parts = [torch.empty_like(each) for _ in range(self.world)]
            dist.all_gather(parts, each.contiguous())
            each.copy_(parts[0])
            for part in parts[1:]:
                each.add_(part)

    def scatter(self, full: Tensor) -> Tensor:
        """This process's part, along the first axis, of a sum over processes in the order of ranks.

        Args:
            full: the same shape everywhere. It is not changed.

        Bits: those of `add`.
        """
        import torch.distributed as dist

        mine = full[:0].clone()
        for rank, chunk in enumerate(torch.chunk(full, self.world)):
            given = chunk.contiguous()
            if rank != self.rank:
                dist.gather(given, dst=rank)
                continue
            parts = [torch.empty_like(given) for _ in range(self.world)]
            dist.gather(given, parts, dst=rank)
            mine = parts[0]
            for part in parts[1:]:
                mine.add_(part)
        return mine

    def whole(self, shard: Tensor, shape: Sequence[int]) -> Tensor:
        """A tensor of which every process holds a part along the first axis.

        Args:
            shard: this process's rows, perhaps none.
            shape: of the whole.
        """
        import torch.distributed as dist

        rows = -(-shape[0] // self.world)
        given = shard.new_zeros(rows, *shape[1:])
        given[: len(shard)] = shard
        parts = [torch.empty_like(given) for _ in range(self.world)]
        dist.all_gather(parts, given)
        return torch.cat(parts)[: shape[0]]

    def total(self, number: float) -> float:
        """The sum of a number of each process, in the order of ranks."""
        return float(sum(self.gather([number])))

    def close(self) -> None:
        if self._opened:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._opened = False
