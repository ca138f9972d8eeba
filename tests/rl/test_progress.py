"""What a run tells."""

import json
from pathlib import Path
from typing import Any

import pytest

from kernelbraid.rl.progress import Log, flat, line

ROW: dict[str, Any] = {
    "rollout": 0,
    "reward": 0.25,
    "loss": [1.0, 2.0],
    "reused_batches": 3,
    "recomputed_batches": 1,
    "logprob_mismatch_max": 0.0,
    "tokens_per_second": {"rollout": 12.4, "update": 99.0},
    "memory_bytes": 3 * 2**29,
}


def rows(path: Path) -> list[int]:
    return [json.loads(each)["rollout"] for each in path.read_text().splitlines()]


def test_a_line_says_what_matters() -> None:
    told = line(ROW, 20)
    for part in ("1/20", "reward 0.2500", "rollout 12", "update 99", "reused 75%", "mismatch 0", "1.50 GiB"):
        assert part in told
    assert "reward -" in line(ROW | {"reward": None}, 20)


def test_rows_after_the_checkpoint_are_written_again(tmp_path: Path) -> None:
    log = Log(tmp_path, done=0)
    for i in range(4):
        log.write(ROW | {"rollout": i})
    with log.path.open("a") as file:
        file.write('{"rollout": 4, "rew')  # killed while it wrote
    again = Log(tmp_path, done=3)
    again.write(ROW | {"rollout": 3})
    assert rows(log.path) == [0, 1, 2, 3]


def test_every_few_rollouts(tmp_path: Path) -> None:
    log = Log(tmp_path, done=0, every=3)
    for i in range(7):
        log.write(ROW | {"rollout": i})
    assert rows(log.path) == [0, 3, 6]


def test_numbers_by_path() -> None:
    assert flat({"a": 1, "b": {"c": 2.5, "d": "x"}, "e": [1], "f": True}) == {"a": 1.0, "b/c": 2.5}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    log = Log(tmp_path, done=0, tensorboard=True)
    log.write(ROW)
    log.close()
    written = list((tmp_path / "tensorboard").glob("events.*"))
    assert len(written) == 1 and b"tokens_per_second/rollout" in written[0].read_bytes()
