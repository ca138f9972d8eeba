"""Short training runs of a tiny model."""

import json
from pathlib import Path
from typing import Any

from kernelbraid.rl.config import Config, parse_config
from kernelbraid.rl.trainer import Trainer

REWARD = """
def reward(completion, record):
    return sum(each.isdigit() for each in completion) / max(1, len(completion))
"""


def folder(place: Path) -> Path:
    """A folder with prompts and a reward."""
    place.mkdir(parents=True, exist_ok=True)
    prompts = ("count: ", "a = ", "the year is ", "x", "room number ")
    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    (place / "digits.py").write_text(REWARD)
    return place


def document(**changes: Any) -> dict[str, Any]:
    """A configuration; a dictionary among the changes is merged into its section."""
    made: dict[str, Any] = {
        "algorithm": "grpo",
        "rollouts": 5,
        "seed": 3,
        "model": {"random": {"layers": 1, "hidden": 32, "intermediate": 48}},
        "task": {
            "kind": "jsonl",
            "path": "prompts.jsonl",
            "reward": "digits.py:reward",
            "template": "plain",
            "max_prompt_tokens": 16,
        },
        "sampling": {"temperature": 0.9, "max_tokens": 70},
        "rollout": {"prompts": 2, "group_size": 3, "cache_tokens": 96},
        "update": {"learning_rate": 0.01, "minibatches": 2, "epochs": 2},
        "checkpoints": {"every": 1},
    }
    for name, value in changes.items():
        made[name] = {**made.get(name, {}), **value} if isinstance(value, dict) else value
    return made


def config(**changes: Any) -> Config:
    return parse_config(document(**changes))


def curve(made: Config, place: Path) -> list[tuple[Any, ...]]:
    """After each rollout: reward, losses, gradient norms, and the digest of all parameters."""
    found = []
    with Trainer(made, folder(place)) as trainer:
        while trainer.done < made.rollouts:
            row = trainer.step()
            found.append((row["reward"], row["loss"], row["grad_norm"], trainer.policy.digest()))
    return found
