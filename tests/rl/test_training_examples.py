"""The examples that train on a CPU, from the command line, and its errors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("ruamel.yaml")

from kernelbraid.cli import app
from kernelbraid.rl import train

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-m", "kernelbraid", "train", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def here(*arguments: object) -> int:
    """The exit code of the verb in this process."""
    with pytest.raises(SystemExit) as ended:
        app(["train", *map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    place = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", place, ignore=shutil.ignore_patterns("runs"))
    return place


def learned(found: dict[str, Any]) -> None:
    assert found["steps"] == 20 and found["reused_batches"] == 20 and found["recomputed_batches"] == {}
    assert found["logprob_mismatch_max"] == 0 and found["unequal_tokens"] == 0
    assert found["reward_first"] < 0.2 and found["reward_last"] > 0.8


def test_grpo(examples: Path) -> None:
    done = command(examples / "grpo_cpu.yaml", "--json")
    assert done.returncode == 0, done.stderr
    learned(json.loads(done.stdout))
    more = command(examples / "grpo_cpu.yaml", "--rollouts", 21)
    assert more.returncode == 0, more.stderr
    assert "21/21  reward" in more.stderr and "reused 100%  mismatch 0" in more.stderr
    assert "20/21" not in more.stderr and "reward_last" in more.stdout


def test_ppo(examples: Path) -> None:
    learned(train(examples / "ppo_cpu.yaml"))


def test_errors_name_every_mistake(examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = examples / "grpo_cpu.yaml"
    file.write_text(file.read_text().replace("group_size: 8", "group_size: 1").replace("seed: 1", "sed: 1"))
    assert here(file, "--json") == 2
    assert "sed: there is no such key; near it is seed" in capsys.readouterr().err
    assert here(examples / "nowhere.yaml") == 2
    assert "there is no file" in capsys.readouterr().err


def test_a_mismatch_is_a_failed_check(examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = examples / "grpo_cpu.yaml"
    file.write_text(file.read_text().replace("model:\n", "model:\n  kernels: vendor\n"))
    assert here(file, "--json") == 1
    assert "Rollout and update must run the same contracts" in capsys.readouterr().err
    assert not list((examples / "runs" / "grpo" / "checkpoints").glob("rollout-*"))
