"""Workloads of a real run, from the file that `kernelbraid train --record-workloads FILE` writes."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelbraid.contract import REGIMES, Workload
from kernelbraid.ops.problem import Operator

FORMAT = "kernelbraid-workloads/1"
EACH = 3
"""Workloads kept of each phase and shape of a model."""
LEAST = 0.001
"""Share of an operator's least time, by the costs of its calls, below which workloads are left out."""
BYTES_A_FLOP = 0.01
"""What moving a byte costs beside an operation: only to rank calls, any machine's ratio is near it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One operator's part of a file."""

    workloads: tuple[Workload, ...]
    """Of different names; weights are calls a step."""
    dtype: str
    shapes: int
    """That the file holds, all calls of them counted in the workloads' weights but for `left_out`."""
    left_out: float
    """Share of the least time in calls that weigh too little to be measured."""


def read_recorded(path: str | Path, operator: Operator, device: str = "cpu", *, each: int = EACH) -> Recorded:
    """Choose the workloads that stand for a run.

    Calls of one phase and one shape of a model are cut, in the order of their cost, into at most `each` parts
    of about equal cost; the call whose cost is nearest to the part's mean stands for all of the part.

    Args:
        path: the file.
        operator: whose calls.
        device: `cpu` or `cuda`, which must be that of the run.
        each: workloads of each phase and shape.

    Raises:
        ValueError: no such file, another format or device, no calls of the operator, or a shape outside its
            contract.
    """
    document = _document(path)
    if document["device"] != device:
        raise ValueError(f"{path} was recorded on {document['device']}, the search is for {device}")
    counted = document["operators"].get(operator.name)
    if not counted:
        known = ", ".join(sorted(document["operators"])) or "nothing"
        raise ValueError(f"{path} holds no calls of {operator.name}; it holds those of {known}")
    dtype = str(document["dtype"])
    if dtype not in operator.contract.dtypes:
        known = ", ".join(operator.contract.dtypes)
        raise ValueError(f"{path} was recorded in {dtype}, which is none of {operator.name}'s: {known}")
    steps = document["steps"]
    calls = [_workload(path, operator, item, steps, number) for number, item in enumerate(counted)]
    costs = {call: _cost(operator, call) for call in calls}
    total = math.fsum(call.weight * costs[call] for call in calls)
    kinds: dict[tuple[object, ...], list[Workload]] = defaultdict(list)
    for call in calls:
        kinds[call.phase, *operator.constant_axes(call).items(), call.shape.get("page_size")].append(call)
    chosen: dict[str, Workload] = {}
    left_out = 0.0
    for kind in kinds.values():
        for part in _parts(sorted(kind, key=lambda call: (costs[call], call.name)), costs, each):
            share = math.fsum(call.weight * costs[call] for call in part) / total
            if share < LEAST:
                left_out += share
            else:
                made = _stands_for(part, costs)
                same = chosen.get(made.name)
                weight = made.weight + (same.weight if same is not None else 0.0)
                chosen[made.name] = Workload(made.phase, made.axes, weight)
    order = {phase: i for i, phase in enumerate(REGIMES)}
    found = tuple(sorted(chosen.values(), key=lambda call: order[call.phase]))
    return Recorded(found, dtype, len(calls), left_out)


def _document(path: str | Path) -> Mapping[str, Any]:
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read the workloads {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a file of workloads: {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} is not a file of workloads: its format is {found!r}, wanted {FORMAT!r}")
    known = {"operators": dict, "steps": int, "dtype": str, "device": str}
    for name, kind in known.items():
        if not isinstance(document.get(name), kind):
            raise ValueError(f"{path}: {name} must be a {kind.__name__}, got {document.get(name)!r}")
    if document["steps"] < 1:
        raise ValueError(f"{path}: steps must be at least 1, got {document['steps']}")
    return dict(document)


def _workload(
    path: str | Path, operator: Operator, item: Mapping[str, Any], steps: int, number: int
) -> Workload:
    where = f"{path}, {operator.name}, entry {number}"
    try:
        axes = tuple(
            (str(name), tuple(int(each) for each in value) if isinstance(value, list) else int(value))
            for name, value in item["axes"].items()
        )
        call = Workload(item["phase"], axes, item["calls"] / steps)
        constant = operator.constant_axes(call)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{where} is no workload: {error}") from None
    if call.phase not in operator.regimes:
        raise ValueError(f"{where}: {operator.name} has no regime {call.phase}")
    for name, value in constant.items():
        operator.contract.axis(name).check(value)
    return call


def _cost(operator: Operator, call: Workload) -> float:
    cost = operator.cost(call)
    return max(cost.flops * BYTES_A_FLOP, cost.bytes, 1.0)


def _parts(calls: Sequence[Workload], costs: Mapping[Workload, float], most: int) -> Iterator[list[Workload]]:
    """Cut a sorted list into at most `most` parts of about equal cost."""
    whole = math.fsum(call.weight * costs[call] for call in calls)
    part: list[Workload] = []
    done, number = 0.0, 1
    for call in calls:
        spent = call.weight * costs[call]
        if part and number < most and done + spent / 2 > whole * number / most:
            yield part
            part, number = [], number + 1
        part.append(call)
        done += spent
    if part:
        yield part


def _stands_for(part: Sequence[Workload], costs: Mapping[Workload, float]) -> Workload:
    """The call nearest to the mean cost, with the weight of all."""
    weight = math.fsum(call.weight for call in part)
    mean = math.fsum(call.weight * costs[call] for call in part) / weight
    nearest = min(part, key=lambda call: (abs(costs[call] - mean), call.name))
    return Workload(nearest.phase, nearest.axes, weight)
