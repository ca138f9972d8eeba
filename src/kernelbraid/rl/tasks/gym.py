"""Procedural tasks of reasoning-gym: any of its datasets, with its own scores (extra `tasks`)."""

import difflib
import json
import math
import re
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from kernelbraid.rl.tasks.examples import Example, Message, as_reward

INSTRUCTION = (
    "Solve the problem step by step. Give the final answer alone, without explanation, between <answer> and "
    "</answer>."
)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LARGEST_SEED = 2**32 - 1


class Gym:
    """A reasoning-gym dataset.

    The answer is what stands between the last <answer> and </answer> of a completion, without spaces around.
    A dataset's `score_answer` gives it 0 to 1, and many give part of the score to wrong answers.

    Args:
        name: of the dataset, such as `chain_sum`.
        seed: of its examples, 0 to 2^32 - 1.
        size: how many examples.
        config: other options of the dataset.
        threshold: None takes scores as they are; else the reward is 1 for scores of at least this, and 0.
        instruction: the system message that asks for the tags; None for no system message.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
        ValueError: there is no such dataset, or it refuses an option.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        size: int,
        config: Mapping[str, Any] | None = None,
        threshold: float | None = None,
        instruction: str | None = INSTRUCTION,
    ) -> None:
        if not 0 <= seed <= LARGEST_SEED:
            raise ValueError(f"seed must be from 0 to {LARGEST_SEED}, got {seed}")
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, got {threshold}")
        self.name, self.threshold, self.instruction = name, threshold, instruction
        self.dataset = _dataset(name, {**(config or {}), "seed": seed, "size": size})
        self.unscored = 0
        """Answers that the dataset's own scoring failed on; their reward is NaN."""
        options = json.dumps(dict(config or {}), sort_keys=True, default=str)
        self._identity = f"reasoning-gym {version('reasoning-gym')} {name} {options}, seed {seed}"

    @property
    def identity(self) -> str:
        return self._identity

    def __len__(self) -> int:
        return len(self.dataset)

    def example(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise ValueError(f"index must be from 0 to {len(self) - 1}, got {index}")
        entry = self.dataset[index]
        system = [Message("system", self.instruction)] if self.instruction is not None else []
        return Example(index, (*system, Message("user", str(entry["question"]))), entry)

    def reward(self, example: Example, completion: str) -> float:
        """The dataset's score of the answer, 0 without one; NaN, and counted, where scoring it failed."""
        answer = answer_of(completion)
        if answer is None:
            return 0.0
        try:
            score = float(self.dataset.score_answer(answer, example.record))
        except Exception as error:  # a grader's failure on what a model wrote must not end a run
            self.unscored += 1
            warnings.warn(
                f"{self.name} could not score an answer to example {example.index}: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return math.nan
        if self.threshold is not None:
            return float(score >= self.threshold)
        return as_reward(score, f"score_answer of {self.name}")


def answer_of(completion: str) -> str | None:
    """What stands between the last pair of answer tags, or None."""
    found = ANSWER.findall(completion)
    return found[-1].strip() if found else None


def _dataset(name: str, options: Mapping[str, Any]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise ValueError(f"reasoning-gym has no dataset {name!r}{hint}")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym dataset {name} refuses its options: {error}") from None
