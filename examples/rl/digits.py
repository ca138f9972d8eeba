"""A reward that a small random model learns within a few steps: how much of an answer is digits."""

from collections.abc import Mapping
from typing import Any


def reward(completion: str, record: Mapping[str, Any]) -> float:
    """Share of digits among the characters of an answer, 0 of an empty one."""
    return sum(each.isdigit() for each in completion) / max(1, len(completion))
