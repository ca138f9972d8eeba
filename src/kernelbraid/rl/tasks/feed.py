"""Prompts of a task in an order that a seed decides, from any position on."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from kernelbraid.rl.choices import choose
from kernelbraid.rl.tasks.examples import Example, Task

Encode = Callable[[Example], Sequence[int]]
"""Token ids of an example's prompt."""


class LongPrompt(StrEnum):
    """What happens to a prompt of more tokens than the limit."""

    REFUSE = "refuse"
    """An error that names the example."""
    DROP = "drop"
    """It is passed over and counted; a prompt is never cut."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt to answer."""

    position: int
    """In the order of all epochs: what `Completion.prompt_index` holds."""
    epoch: int
    example: Example
    tokens: Tensor
    """int32 [P]."""


def order(size: int, seed: int, epoch: int) -> list[int]:
    """The numbers below `size`, sorted by SHA-256 of (seed, epoch, number): the same on every machine."""

    def key(index: int) -> bytes:
        return hashlib.sha256(f"{seed}/{epoch}/{index}".encode()).digest()

    return sorted(range(size), key=key)


class Feed:
    """Reads a task's prompts epoch after epoch.

    Args:
        task: where examples come from; at least one.
        encode: turns an example into token ids.
        seed: decides the order of each epoch.
        limit: the most tokens of a prompt.
        on_long: what happens to longer ones, see `LongPrompt`.
        shuffle: False takes examples in the task's own order.

    Raises:
        ValueError: the task is empty, or a number lies outside its limits.
    """

    def __init__(
        self,
        task: Task,
        encode: Encode,
        *,
        seed: int,
        limit: int,
        on_long: LongPrompt | str = LongPrompt.REFUSE,
        shuffle: bool = True,
    ) -> None:
        if len(task) < 1:
            raise ValueError(f"task {task.identity} has no examples")
        if limit < 1:
            raise ValueError(f"limit must be at least 1 token, got {limit}")
        self.task, self.encode, self.seed, self.limit, self.shuffle = task, encode, seed, limit, shuffle
        self.on_long = choose(LongPrompt, "on_long", on_long)
        self.position = 0
        """Of the next example; those that were dropped have positions too."""
        self.dropped = 0
        """Prompts longer than the limit that were passed over so far."""
        self._epoch, self._order = -1, list[int]()

    def take(self, count: int) -> list[Prompt]:
        """The next prompts.

        Raises:
            ValueError: a prompt is empty, or longer than the limit where those are refused, or all of the
                task's are longer.
        """
        found: list[Prompt] = []
        passed = 0
        while len(found) < count:
            prompt = self._next()
            if prompt is not None:
                found.append(prompt)
                passed = 0
                continue
            passed += 1
            if passed > len(self.task):
                raise ValueError(f"every prompt of {self.task.identity} is longer than {self.limit} tokens")
        return found

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON can hold it."""
        return {**self._names(), "position": self.position, "dropped": self.dropped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where another feed of the same task, seed and rules stood.

        Raises:
            ValueError: the task, the seed or a rule is another; the message names what differs.
        """
        for name, mine in self._names().items():
            if state.get(name) != mine:
                raise ValueError(f"{name} of the prompts was {state.get(name)!r} and is {mine!r}")
        self.position, self.dropped = int(state["position"]), int(state["dropped"])

    def _names(self) -> dict[str, Any]:
        return {
            "task": self.task.identity,
            "size": len(self.task),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "limit": self.limit,
            "on_long": self.on_long.value,
        }

    def _next(self) -> Prompt | None:
        """The prompt at the position, or None where it is dropped."""
        position, (epoch, place) = self.position, divmod(self.position, len(self.task))
        if epoch != self._epoch:
            size = len(self.task)
            self._epoch = epoch
            self._order = order(size, self.seed, epoch) if self.shuffle else list(range(size))
        example = self.task.example(self._order[place])
        ids = list(self.encode(example))
        if not ids:
            raise ValueError(f"prompt {example.index} of {self.task.identity} has no tokens")
        if len(ids) > self.limit:
            if self.on_long == LongPrompt.REFUSE:
                raise ValueError(
                    f"prompt {example.index} of {self.task.identity} has {len(ids)} tokens, the limit is "
                    f"{self.limit}: raise it, or drop long prompts"
                )
            self.position += 1
            self.dropped += 1
            return None
        self.position += 1
        return Prompt(position, epoch, example, torch.tensor(ids, dtype=torch.int32))
