"""Checkpoints: a run that was stopped anywhere goes on with the bits of one that was not."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

from tests.rl.runs import config, folder

from kernelbraid.rl.checkpoint import Checkpoints
from kernelbraid.rl.trainer import Trainer, train

ROOT = Path(__file__).resolve().parents[2]


def whole(place: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Summary and last checkpoint of a run that nothing interrupts."""
    summary = train(config(**changes), folder=folder(place))
    return summary, last(place)


def last(place: Path) -> dict[str, Any]:
    checkpoints = Checkpoints(place / "checkpoints", 2)
    try:
        found = checkpoints.load()
    finally:
        checkpoints.close()
    assert found is not None
    return found[1]


def equal(one: Any, two: Any) -> bool:
    """All bits of tensors, and everything else."""
    if isinstance(one, torch.Tensor):
        same = one.dtype == two.dtype and one.shape == two.shape
        return same and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, two)))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[name], two[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(equal, one, two))
    return bool(one == two)


TRAINED = ("masters", "optimizer", "steps", "feed", "rewards", "tokens", "counters")


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return all(equal(one[name], two[name]) for name in TRAINED)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, algorithm: str) -> None:
    changes: dict[str, Any] = {"algorithm": algorithm, "update": {"warmup_steps": 6}}
    summary, state = whole(tmp_path / "whole", rollouts=4, **changes)
    train(config(rollouts=2, **changes), folder=folder(tmp_path / "parts"))
    with Trainer(config(rollouts=4, **changes), tmp_path / "parts") as trainer:
        assert trainer.done == 2
        again = trainer.run()
    assert same(last(tmp_path / "parts"), state)
    assert again["weights"] == summary["weights"] and again["reward_first"] == summary["reward_first"]
    rows = (tmp_path / "parts" / "logs" / "rollouts.jsonl").read_text().splitlines()
    assert len(rows) == 4


def test_the_comparison_sees_one_bit(tmp_path: Path) -> None:
    _, state = whole(tmp_path, rollouts=1)
    other = {**state, "masters": {name: each.clone() for name, each in state["masters"].items()}}
    assert same(state, other)
    other["masters"]["norm"].view(torch.int32)[0] ^= 1
    assert not same(state, other)


CHILD = """
import os, signal, sys
from pathlib import Path
from kernelbraid.rl import checkpoint
from kernelbraid.rl.trainer import train
from tests.rl.runs import config
place, where = Path(sys.argv[1]), int(sys.argv[2])
seen = 0
for module, name in ((os, "fsync"), (checkpoint.torch, "save"), (checkpoint.shutil, "rmtree")):
    def counted(*arguments, original=getattr(module, name), **named):
        global seen
        seen += 1
        if seen == where:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)
    setattr(module, name, counted)
train(config(rollouts=3), folder=place)
"""


def killed(place: Path, where: int) -> int:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-c", CHILD, str(place), str(where)]
    return subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False).returncode


@pytest.mark.parametrize(
    "where", [14, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5, 8, 11, 17, 20))]
)
def test_a_run_that_is_killed_while_it_writes_goes_on(tmp_path: Path, where: int) -> None:
    _, state = whole(tmp_path / "whole", rollouts=3)
    place = folder(tmp_path / "killed")
    assert killed(place, where) == -signal.SIGKILL
    train(config(rollouts=3), folder=place)
    assert same(last(place), state)
    left = {each.name for each in (place / "checkpoints").iterdir() if each.is_dir()}
    assert left == {"rollout-000002", "rollout-000003"}


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    train(config(rollouts=1), folder=folder(tmp_path))
    file = tmp_path / "checkpoints" / "rollout-000001" / "state.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="rollout-000001 is damaged"):
        train(config(rollouts=2), folder=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update": {"learning_rate": 0.5}}, "update.learning_rate was 0.01 and is 0.5"),
        ({"seed": 9}, "seed was 3 and is 9"),
        (
            {"model": {"random": {"layers": 1, "hidden": 64, "intermediate": 48}}},
            "model.random.hidden was 32",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    train(config(rollouts=1), folder=folder(tmp_path))
    with pytest.raises(ValueError, match=message):
        train(config(**{"rollouts": 2, **changes}), folder=tmp_path)


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    train(config(rollouts=1), folder=folder(tmp_path))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("count", "number"))
    with pytest.raises(ValueError, match="task of the prompts was"):
        train(config(rollouts=2), folder=tmp_path)


def test_what_changes_no_bit_may_change(tmp_path: Path) -> None:
    _, state = whole(tmp_path / "whole", rollouts=2)
    train(config(rollouts=1), folder=folder(tmp_path / "parts"))
    train(config(rollouts=2, update={"micro_batch_tokens": 64}), folder=tmp_path / "parts")
    assert same(last(tmp_path / "parts"), state)


def test_one_process_a_folder_and_no_resume(tmp_path: Path) -> None:
    with Trainer(config(rollouts=1), folder(tmp_path)) as trainer:
        trainer.run()
    with pytest.raises(ValueError, match="holds checkpoints"):
        train(config(rollouts=2), folder=tmp_path, resume=False)
    made = Checkpoints(tmp_path / "checkpoints", 2)
    try:
        code = "import pathlib, sys; from kernelbraid.rl.checkpoint import Checkpoints; "
        code += "Checkpoints(pathlib.Path(sys.argv[1]), 1)"
        command = [sys.executable, "-c", code, str(tmp_path / "checkpoints")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "another process trains in" in found.stderr
    finally:
        made.close()
