"""A task in a file: one JSON object a line, with a prompt, and a reward function."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelbraid.rl.tasks.examples import Example, Message, as_reward
from kernelbraid.rl.tasks.rewards import load_reward, reward_identity


class JsonLines:
    """Prompts from a JSONL file, rewarded by a function.

    Each line is an object. Under `prompt` it holds a text, or a conversation: a list of objects with the
    texts `role` and `content`. The function gets the completion's text and the whole object. Empty lines are
    left out.

    Args:
        path: the file, UTF-8.
        reward: `module:function` or `file.py:function`; see `load_reward`.
        prompt_key: where the prompt is.

    Raises:
        ValueError: no such file or function, or a line that is not such an object, named by its number.
    """

    def __init__(self, path: str | Path, reward: str, *, prompt_key: str = "prompt") -> None:
        place = Path(path)
        if not place.is_file():
            raise ValueError(f"there is no file {place}")
        content = place.read_bytes()
        self.function_name, self.function = reward, load_reward(reward)
        self._examples = tuple(_read(content, place, prompt_key))
        if not self._examples:
            raise ValueError(f"{place} holds no examples")
        digest = hashlib.sha256(content).hexdigest()[:12]
        self._identity = f"{place.name}@{digest}, reward {reward_identity(reward)}"

    @property
    def identity(self) -> str:
        return self._identity

    def __len__(self) -> int:
        return len(self._examples)

    def example(self, index: int) -> Example:
        return self._examples[index]

    def reward(self, example: Example, completion: str) -> float:
        """What the function says; its exceptions name the example.

        Raises:
            ValueError: it returned something else than a finite number or None.
        """
        try:
            value = self.function(completion, example.record)
        except Exception as error:
            error.add_note(f"in reward {self.function_name} of example {example.index}")
            raise
        return as_reward(value, f"reward {self.function_name} of example {example.index}")


def _read(content: bytes, path: Path, prompt_key: str) -> Iterator[Example]:
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start}") from None
    index = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error.msg}, column {error.colno}") from None
        if not isinstance(record, dict) or prompt_key not in record:
            raise ValueError(f"{where} must be an object with {prompt_key!r}")
        yield Example(index, _prompt(record[prompt_key], where), record)
        index += 1


def _prompt(value: Any, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_turn(turn) for turn in value):
        return tuple(Message(turn["role"], turn["content"]) for turn in value)
    wanted = 'a text, or a list of {"role": text, "content": text}'
    raise ValueError(f"{where}: the prompt must be {wanted}, and not empty")


def _is_turn(turn: object) -> bool:
    return (
        isinstance(turn, Mapping)
        and set(turn) == {"role", "content"}
        and all(isinstance(each, str) for each in turn.values())
    )
