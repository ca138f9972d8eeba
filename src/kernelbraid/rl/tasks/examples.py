"""What every task offers: examples by number, and a reward for an answer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """`system`, `user` or `assistant`, as the tokenizer's template knows them."""
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt of a task, with what its reward needs."""

    index: int
    """Its number in the task, from 0."""
    prompt: str | tuple[Message, ...]
    record: Mapping[str, Any] = field(default_factory=dict)
    """Everything known about it, such as the right answer."""


class Task(Protocol):
    """Examples and their rewards. `identity` names the examples: resuming on others is refused."""

    @property
    def identity(self) -> str: ...

    def __len__(self) -> int: ...

    def example(self, index: int) -> Example:
        """The example of a number; the same at each call and in each process."""
        ...

    def reward(self, example: Example, completion: str) -> float:
        """How good an answer is; NaN where it cannot be told, which counts in no group's mean."""
        ...


def as_reward(value: object, source: str) -> float:
    """A number that a reward function returned, or NaN for None.

    Raises:
        ValueError: it is none, or not finite; the message names the source.
    """
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        number = float(value)
        if math.isfinite(number):
            return number
    raise ValueError(f"{source} must return a finite number, or None where it cannot tell, got {value!r}")
