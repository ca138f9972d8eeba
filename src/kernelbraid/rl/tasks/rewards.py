"""Reward functions by name: `module:function`, or `file.py:function`."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

RewardFunction = Callable[[str, Mapping[str, Any]], float | None]
"""Gets the completion's text and the example's record; None where it cannot tell."""


def load_reward(path: str) -> RewardFunction:
    """Import a reward function.

    Args:
        path: `module:function`, or `file.py:function` with a path to the file. The file's code runs.

    Raises:
        ValueError: the path has another form, or there is no such module, file or function; an error that the
            code itself raises stays as it is.
    """
    source, _, name = path.rpartition(":")
    if not source or not name.isidentifier():
        raise ValueError(f"reward must be module:function or file.py:function, got {path!r}")
    module = _file(Path(source)) if source.endswith(".py") else _module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward {path}: {source} has no function {name}")
    return cast(RewardFunction, function)


def reward_identity(path: str) -> str:
    """The path, with the start of the file's SHA-256 where it is a file."""
    source, _, name = path.rpartition(":")
    if not source.endswith(".py"):
        return path
    return f"{Path(source).name}@{hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]}:{name}"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # found, but something that it imports is missing
        raise ValueError(f"reward: there is no module {name}") from None


def _file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"reward: there is no file {path}")
    name = f"kernelbraid_reward_{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
