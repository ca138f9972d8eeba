"""Workloads that a training run recorded: what a search optimizes for instead of the operator's own grid."""

import json
from pathlib import Path
from typing import Any, get_args

from kernelbraid.contract import Regime, Workload

FORMAT = 1


def read_workloads(path: Path, operator: str, device: str) -> tuple[Workload, ...]:
    """Read the workloads of an operator.

    Args:
        path: what `kernelbraid train --record-workloads` wrote.
        operator: its name.
        device: `cpu` or `cuda`, which must be that of the run.

    Returns:
        Workloads with different names, weights in calls per rollout.

    Raises:
        ValueError: there is no such file, it is no such file, or it has nothing of the operator.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} holds no recorded workloads of format {FORMAT}")
    if document["device"] != device:
        raise ValueError(f"{path} was recorded on {document['device']}, the search is for {device}")
    rows = document["operators"].get(operator) or []
    if not rows:
        known = ", ".join(name for name, each in document["operators"].items() if each)
        raise ValueError(f"{path} has no calls of {operator}; it has {known}")
    found: dict[str, Workload] = {}
    for row in rows:
        made = _workload(row, path)
        same = found.get(made.name)
        if same is not None:
            made = Workload(made.phase, same.axes, made.weight + same.weight)
        found[made.name] = made
    return tuple(found.values())


def _workload(row: dict[str, Any], path: Path) -> Workload:
    try:
        phase, axes, weight = row["phase"], row["axes"], float(row["weight"])
        if phase not in get_args(Regime):
            raise ValueError(f"phase {phase!r}")
        fixed = tuple(
            (str(name), tuple(map(int, value)) if isinstance(value, list) else int(value))
            for name, value in axes.items()
        )
        return Workload(phase, fixed, weight)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} has a workload that is none: {error}") from None
