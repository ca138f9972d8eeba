"""Reinforcement learning on unified operators: records, objectives, reuse, tasks, training."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelbraid.rl.config import parse_config, read_config
    from kernelbraid.rl.trainer import Trainer, train

__all__ = ["Trainer", "parse_config", "read_config", "train"]

_HOMES = {
    "Trainer": "kernelbraid.rl.trainer",
    "parse_config": "kernelbraid.rl.config",
    "read_config": "kernelbraid.rl.config",
    "train": "kernelbraid.rl.trainer",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
