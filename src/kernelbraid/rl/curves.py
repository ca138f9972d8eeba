"""The same training run in several arms and seeds: whether reuse changes a bit, and what rewards become.

Every run has a folder `<arm>-<seed>`, trains in a process of its own and goes on from its checkpoints, so
that an interrupted experiment goes on where it was. With unified kernels the arms `reuse` and `recompute`
must have equal rewards, losses, gradient norms and weights, bit for bit; the vendor's run is another one.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelbraid.rl.comparison import OURS, THEIRS, parts_of
from kernelbraid.rl.config import Old, parse_config
from kernelbraid.rl.progress import ROWS

SAME = "unified+recompute"
ARMS = (OURS, SAME, THEIRS)
COMPARED = ("reward", "loss", "grad_norm", "tokens")
SUMMARY = "summary.json"
Run = Callable[[Path], dict[str, Any]]
"""Trains the configuration of a file to its end, or goes on; returns the run's summary."""


def curves(
    document: Mapping[str, Any],
    folder: Path,
    *,
    seeds: Sequence[int],
    arms: Sequence[str] = ARMS,
    base: Path = Path("."),
    run: Run | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train every arm with every seed, and compare.

    Args:
        document: a run's configuration, as YAML gives it; kernels, old and seed are those of the arm.
        folder: gets a folder a run.
        seeds: at least one.
        arms: `kernels+old` each.
        base: what the configuration's paths are relative to.
        run: trains; a process of `kernelbraid train` by default.
        progress: told of every run.

    Returns:
        JSON-able: `rewards` (arm -> seed -> rollouts), `mean_reward` by arm, `compared` and `unequal`
        numbers of reuse beside recompute, `weights_equal` by seed, `reward_ratio` of ours over the vendor's
        by seed and of all.

    Raises:
        ValueError: an arm or the configuration is wrong; nothing was trained.
        RuntimeError: a run failed.
    """
    made = {(arm, seed): _configured(document, arm, seed, base.resolve()) for arm in arms for seed in seeds}
    if not made:
        raise ValueError("seeds and arms must not be empty")
    for (arm, seed), each in made.items():
        parse_config(each, f"arm {arm}, seed {seed}")
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for number, ((arm, seed), each) in enumerate(made.items(), 1):
        place = folder / f"{arm}-{seed}"
        progress(f"{arm}, seed {seed} ({number} of {len(made)})")
        found[arm, seed] = _trained(place, each, run or _process)
    return summary(found)


def summary(found: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    """Compare runs: (arm, seed) -> `rows` and `weights`."""
    rewards: dict[str, dict[str, list[float | None]]] = {}
    for (arm, seed), each in found.items():
        rewards.setdefault(arm, {})[str(seed)] = [row["reward"] for row in each["rows"]]
    seeds = list(dict.fromkeys(seed for _, seed in found))
    pairs = {
        seed: (found[OURS, seed], found[SAME, seed])
        for seed in seeds
        if {(OURS, seed), (SAME, seed)} <= set(found)
    }
    compared = unequal = 0
    for one, other in pairs.values():
        numbers = [_numbers(each["rows"]) for each in (one, other)]
        compared += max(map(len, numbers))
        unequal += abs(len(numbers[0]) - len(numbers[1]))
        unequal += sum(a != b for a, b in zip(*numbers, strict=False))
    ratios: dict[str, float | None] = {}
    for seed in seeds:
        if (OURS, seed) in found and (THEIRS, seed) in found:
            ratios[str(seed)] = _ratio(*(_mean(rewards[arm][str(seed)]) for arm in (OURS, THEIRS)))
    means = {arm: _mean([each for run in runs.values() for each in run]) for arm, runs in rewards.items()}
    return {
        "rewards": rewards,
        "mean_reward": means,
        "compared": compared,
        "unequal": unequal,
        "weights_equal": {
            str(seed): one["weights"] == other["weights"] for seed, (one, other) in pairs.items()
        },
        "reward_ratio": {**ratios, "all": _ratio(means.get(OURS), means.get(THEIRS))},
        "phase_seconds": {f"{arm}-{seed}": each.get("phase_seconds") for (arm, seed), each in found.items()},
    }


def held(document: Mapping[str, Any]) -> bool:
    """Whether reuse changed nothing, as far as it was compared."""
    return document["unequal"] == 0 and all(document["weights_equal"].values())


def _configured(document: Mapping[str, Any], arm: str, seed: int, base: Path) -> dict[str, Any]:
    kernels, old = parts_of(arm)
    found = {**document, "seed": seed}
    found["model"] = {**found.get("model", {}), "kernels": kernels}
    found["reuse"] = {**found.get("reuse", {}), "old": old}
    if old != Old.REUSE:
        found["reuse"].pop("mode", None)
    if found["model"].get("path") is not None:
        found["model"]["path"] = str(base / found["model"]["path"])
    task = dict(found.get("task", {}))
    for name in ("path", "reward"):
        if name in task and (name == "path" or task[name].rpartition(":")[0].endswith(".py")):
            task[name] = str(base / task[name])
    found["task"] = task
    every = found.get("checkpoints", {})
    found["checkpoints"] = {**every, "folder": "checkpoints"}
    found["logging"] = {**found.get("logging", {}), "folder": "logs", "every": 1}
    return found


def _trained(place: Path, config: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Rows and weights of a run, trained now or before."""
    place.mkdir(parents=True, exist_ok=True)
    file, kept = place / "config.yaml", place / SUMMARY
    text = json.dumps(config, indent=1) + "\n"
    if not (file.is_file() and file.read_text() == text and kept.is_file()):
        kept.unlink(missing_ok=True)
        file.write_text(text)  # JSON is YAML
        found = run(file)
        new = kept.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(kept)
    ended = json.loads(kept.read_text())
    lines = (place / "logs" / ROWS).read_text(encoding="utf-8").splitlines()
    names = {name: ended.get(name) for name in ("weights", "phase_seconds")}
    return {**names, "rows": [json.loads(line) for line in lines]}


def _process(file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "kernelbraid", "train", str(file), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"training {file} ended with code {done.returncode}: its messages are above")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _numbers(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All numbers of a run that a bit could change; JSON holds floats exactly."""
    found: list[Any] = []
    for row in rows:
        for name in COMPARED:
            value = row[name]
            found += value if isinstance(value, list) else [value]
    return found


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [each for each in rewards if each is not None]
    return statistics.fmean(known) if known else None


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
