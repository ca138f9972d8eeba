"""A grid of training steps, unified kernels beside the vendor's, each where old log-probabilities come from.

An arm is `kernels+old`, such as `unified+reuse` or `vendor+recompute`. Rows are written as they are measured;
an interrupted grid goes on after the last arm, and an arm that fails, for want of memory for instance, is
recorded with its reason.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from kernelbraid.models import evidence
from kernelbraid.rl.arm import Job
from kernelbraid.rl.config import Config, Kernels, Old, Positive, Section, parse_config

OURS, THEIRS = "unified+reuse", "vendor+recompute"
ARMS = (OURS, "unified+recompute", THEIRS, "vendor+bypass")
REWARD = """
def reward(completion, record):
    return sum(each < "a" for each in completion) / max(1, len(completion))
"""
Told = Callable[[str], None]


class GridRow(Section):
    """One configuration, in all of its arms."""

    name: str
    config: dict[str, Any] = Field(default_factory=dict)
    """Merged into the grid's own."""
    prompt_tokens: Positive | None = None
    """Make prompts of so many characters, in the place of a task: for random models."""
    arms: tuple[str, ...] | None = None
    steps: Positive | None = None
    warmup: Annotated[int, Field(ge=0)] | None = None
    warmup_tokens: Positive | None = None
    together: bool | None = None


class Grid(Section):
    """What is compared."""

    rows: tuple[GridRow, ...]
    config: dict[str, Any] = Field(default_factory=dict)
    """What all rows share of a training run's configuration."""
    arms: tuple[str, ...] = ARMS
    steps: Positive = 2
    """Timed rollouts of each arm."""
    warmup: Annotated[int, Field(ge=0)] = 1
    """Rollouts before these, which compile; their log-probabilities are all compared."""
    warmup_tokens: Positive | None = None
    """Of a completion of those, where fewer do."""
    together: bool = True
    """Measure arms of the same kernels in one process, in turns: faster. Where rewards are to be compared,
    each arm needs a run of its own."""

    @field_validator("rows")
    @classmethod
    def _names(cls, rows: tuple[GridRow, ...]) -> tuple[GridRow, ...]:
        names = [row.name for row in rows]
        if not rows or len(set(names)) != len(names):
            raise ValueError("rows must be there, each with a name of its own")
        return rows


def read_grid(path: str | Path) -> Grid:
    """Read and check a grid, and every configuration in it.

    Args:
        path: YAML.

    Raises:
        ValueError: no such file, or something in it is wrong; the message says what.
        ModuleNotFoundError: ruamel.yaml is not installed (extra `rl`).
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    place = Path(path)
    if not place.is_file():
        raise ValueError(f"there is no file {place}")
    try:
        grid = Grid.model_validate(YAML(typ="safe", pure=True).load(place.read_text(encoding="utf-8")))
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{place} is not YAML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {where}: {first['msg']}") from None
    for row in grid.rows:
        for arm in row.arms or grid.arms:
            _parsed(configured(grid, row, arm, {}), f"{place}, row {row.name}, arm {arm}")
    return grid


def compare(
    grid: Grid,
    folder: Path,
    *,
    write: Path,
    models: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    steps: int | None = None,
    retry: bool = False,
    progress: Told = lambda text: None,
) -> dict[str, Any]:
    """Measure a grid, or the part of it that a folder does not have yet.

    Args:
        grid: what to measure.
        folder: what its paths are relative to.
        write: the document goes to `<write>/<architecture>/train.bench.json`, anew after every process.
        models: folders or files of models, by the `path` that stands in the grid for them.
        only: names of the rows to measure; all by default. The others stay as they are in the folder.
        steps: replaces all rows' number.
        retry: measure arms again that failed.
        progress: told of each step in a few words.

    Returns:
        The document: `environment`, `commit`, hashes of sources, and `rows`.

    Raises:
        ValueError: no such row or device.
    """
    names = [row.name for row in grid.rows]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise ValueError(f"there is no row {unknown[0]}; rows are {', '.join(names)}")
    wanted = [row for row in grid.rows if not only or row.name in only]
    devices = {configured(grid, row, OURS, {})["model"].get("device", "cpu") for row in grid.rows}
    if len(devices) != 1:
        raise ValueError(f"all rows must be on one device, got {', '.join(sorted(devices))}")
    document = evidence.stamp("train", devices.pop())
    before = {row["name"]: row for row in evidence.kept(document, write)}
    document["rows"] = rows = list(before.values())
    for number, row in enumerate(wanted, 1):
        settings = _settings(grid, row, steps, models or {})
        found = before.get(row.name)
        if found is None or found["settings"] != settings:
            found = {"name": row.name, "settings": settings, "arms": {}, "failed": {}}
            rows[:] = [each for each in rows if each["name"] != row.name] + [found]
        if retry:
            found["failed"] = {}
        missing = [a for a in settings["arms"] if a not in found["arms"] and a not in found["failed"]]
        if not missing:
            progress(f"{row.name} ({number} of {len(wanted)}): measured before")
        for arms in _processes(missing, settings["together"]):
            told = _prefixed(progress, f"{row.name} ({number} of {len(wanted)}), {arms[0].split('+')[0]}: ")
            _measured(grid, row, arms, found, folder, models or {}, told)
            _summarize(found)
            evidence.write(document, write)
    evidence.write(document, write)
    return document


def parts_of(arm: str) -> tuple[str, str]:
    """Kernels and old of an arm.

    Raises:
        ValueError: the arm is none.
    """
    kernels, _, old = arm.partition("+")
    if kernels not in set(Kernels) or old not in set(Old):
        known = f"{' or '.join(Kernels)}, + and one of {', '.join(Old)}"
        raise ValueError(f"arms must be {known}, got {arm!r}")
    return kernels, old


def configured(grid: Grid, row: GridRow, arm: str, models: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of an arm, as YAML would give it.

    Raises:
        ValueError: the arm is none.
    """
    kernels, old = parts_of(arm)
    found = _merged({"rollouts": 1}, _merged(grid.config, row.config))
    model = dict(found.get("model", {}))
    if model.get("path") in models:
        model["path"] = str(Path(models[model["path"]]).resolve())
    found["model"] = {**model, "kernels": kernels}
    found["reuse"] = {**found.get("reuse", {}), "old": old}
    if row.prompt_tokens is not None:
        prompts = {"kind": "jsonl", "path": "prompts.jsonl", "reward": "reward.py:reward"}
        limits = {"template": "plain", "max_prompt_tokens": row.prompt_tokens}
        found["task"] = {**prompts, **limits}
    return found


def _settings(grid: Grid, row: GridRow, steps: int | None, models: Mapping[str, str]) -> dict[str, Any]:
    """Everything that a row's numbers depend on, as JSON holds it; a model's folder counts by its name."""

    def of(name: str) -> Any:
        own = getattr(row, name)
        return getattr(grid, name) if own is None else own

    found = {
        "config": configured(grid, row, OURS, {}),
        **{name: of(name) for name in ("warmup", "warmup_tokens", "together")},
        "arms": list(of("arms")),
        "steps": steps or of("steps"),
        "prompt_tokens": row.prompt_tokens,
    }
    result: dict[str, Any] = json.loads(json.dumps(found))
    return result


def _processes(arms: Sequence[str], together: bool) -> list[list[str]]:
    """Arms that are measured in one process."""
    if not together:
        return [[arm] for arm in arms]
    kernels = dict.fromkeys(arm.split("+")[0] for arm in arms)
    return [[arm for arm in arms if arm.startswith(f"{each}+")] for each in kernels]


def _measured(
    grid: Grid,
    row: GridRow,
    arms: Sequence[str],
    found: dict[str, Any],
    folder: Path,
    models: Mapping[str, str],
    told: Told,
) -> None:
    """Measure some arms in a process, and write down what they gave or why they did not."""
    settings = found["settings"]
    with tempfile.TemporaryDirectory(prefix="kernelbraid-compare-") as scratch:
        config = configured(grid, row, arms[0], models)
        where = folder.resolve()
        if row.prompt_tokens is not None:
            where = Path(scratch)
            _write_task(where, row.prompt_tokens, parse_config(config).rollout.prompts)
        for section in ("checkpoints", "logging"):
            config[section] = {**config.get(section, {}), "folder": str(Path(scratch, section))}
        olds = tuple(arm.split("+")[1] for arm in arms)
        job = Job(config, str(where), olds, settings["steps"], settings["warmup"], settings["warmup_tokens"])
        result, failed = run(job, told)
    for arm, old in zip(arms, olds, strict=True):
        if result is None:
            found["failed"][arm] = failed
            told(f"{arm} failed: {failed}")
            continue
        shared = {name: value for name, value in result.items() if name != "arms"}
        found["arms"][arm] = {**_steps(result["arms"][old]), **shared}


def _steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Timed steps of an arm, and their medians."""
    phases = steps[0]["phase_seconds"]
    rewards = [each["reward"] for each in steps if each["reward"] is not None]
    return {
        "steps": list(steps),
        "ms": statistics.median(each["ms"] for each in steps),
        "tokens": sum(each["tokens"] for each in steps),
        "ms_per_token": sum(each["ms"] for each in steps) / max(1, sum(each["tokens"] for each in steps)),
        "phase_seconds": {
            name: statistics.median(each["phase_seconds"][name] for each in steps) for name in phases
        },
        "reward": statistics.fmean(rewards) if rewards else None,
    }


def _summarize(row: dict[str, Any]) -> None:
    """What the arms of a row amount to."""
    arms = row["arms"]
    ours, theirs = arms.get(OURS), arms.get(THEIRS)
    unified = [found for arm, found in arms.items() if arm.startswith("unified+")]
    row["config"] = row["settings"]["config"]
    row["ours_ms"] = ours and ours["ms"]
    row["phase_seconds"] = ours and ours["phase_seconds"]
    row["peers"] = {arm: found["ms"] for arm, found in arms.items() if arm.startswith("vendor+")}
    row["compared"] = sum(found["compared"] for found in unified)
    row["unequal"] = sum(found["unequal"] for found in unified)
    row["curves_equal"] = _curves_equal(row)
    row["recompute_share"] = row["speedup"] = row["reward_ratio"] = None
    if theirs:
        row["recompute_share"] = theirs["phase_seconds"]["old"] / sum(theirs["phase_seconds"].values())
    if ours and theirs:
        row["speedup"] = theirs["ms_per_token"] / ours["ms_per_token"]
        if ours["reward"] is not None and theirs["reward"]:
            row["reward_ratio"] = ours["reward"] / theirs["reward"]


def _curves_equal(row: Mapping[str, Any]) -> bool | None:
    """Whether reuse and recompute, each in a run of its own, gave the same rewards, losses and norms."""
    pair = [row["arms"].get(f"unified+{old}") for old in ("reuse", "recompute")]
    if row["settings"]["together"] or not all(pair):
        return None
    curves = [
        [(each["reward"], each["loss"], each["grad_norm"]) for each in arm["steps"]] for arm in pair if arm
    ]
    return bool(curves[0] == curves[1])


def run(job: Job, told: Told) -> tuple[dict[str, Any] | None, str]:
    """Measure a job in a process of its own.

    Args:
        job: what to do.
        told: gets a few words a step.

    Returns:
        What `arm.measure` gives, or None and why.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "kernelbraid.rl.arm"]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        result, failed = None, ""
        try:
            assert child.stdin is not None and child.stdout is not None
            with suppress(BrokenPipeError):  # one that ended already says why below
                child.stdin.write(job.dumps())
                child.stdin.close()
            for line in child.stdout:
                said = json.loads(line) if line.startswith("{") else {}
                if "told" in said:
                    told(said["told"])
                result, failed = said.get("result", result), said.get("failed", failed)
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if result is None and not failed:
            errors.seek(0)
            last = [line.strip() for line in errors.read().splitlines() if line.strip()][-1:]
            failed = f"the process ended with code {code}" + "".join(f": {line}" for line in last)
    return result, failed


def _write_task(folder: Path, tokens: int, count: int) -> None:
    """Prompts of so many characters, and a reward."""
    letters = "abcdefghijklmnopqrstuvwxyz 0123456789"
    lines = []
    for i in range(max(count, 64)):
        text = "".join(letters[(i * 7 + j * j + i * j) % len(letters)] for j in range(tokens))
        lines.append(json.dumps({"prompt": text}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(REWARD)


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The second over the first, section by section."""
    found = dict(one)
    for name, value in other.items():
        below = found.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[name] = _merged(below, value) if both and isinstance(below, Mapping) else value
    return found


def _prefixed(told: Told, words: str) -> Told:
    return lambda text: told(words + text)


def _parsed(document: dict[str, Any], where: str) -> Config:
    return parse_config(document, where)
