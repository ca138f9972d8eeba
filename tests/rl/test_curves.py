"""Several arms and seeds of a run: comparison of bits, ratio of rewards, the picture, and going on."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")

from tests.rl.runs import document, folder

from kernelbraid.report import curves as picture
from kernelbraid.rl.curves import ARMS, curves, held, summary
from kernelbraid.rl.trainer import train


def run(file: Path) -> dict[str, Any]:
    """In this process: importing would be most of the time."""
    return train(file)


SMALL = document(rollouts=2, sampling={"max_tokens": 12}, rollout={"cache_tokens": 32})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    place = folder(tmp_path_factory.mktemp("curves"))
    return place, curves(SMALL, place / "runs", seeds=(1, 2), base=place, run=run)


def test_reuse_changes_no_bit(found: tuple[Path, dict[str, Any]]) -> None:
    _, result = found
    assert result["unequal"] == 0 and result["weights_equal"] == {"1": True, "2": True} and held(result)
    assert result["compared"] == 2 * 2 * (1 + 4 + 4 + 1)  # seeds, rollouts; reward, losses, norms, tokens
    assert list(result["rewards"]) == list(ARMS)
    assert all(len(each) == 2 for runs in result["rewards"].values() for each in runs.values())
    assert result["rewards"]["unified+reuse"] == result["rewards"]["unified+recompute"]
    assert set(result["reward_ratio"]) == {"1", "2", "all"}
    mean = {arm: sum(sum(each) for each in runs.values()) / 4 for arm, runs in result["rewards"].items()}
    ours, theirs = mean["unified+reuse"], mean["vendor+recompute"]
    assert result["reward_ratio"]["all"] == pytest.approx(ours / theirs)


@pytest.mark.parametrize("name", ["reward", "loss", "grad_norm"])
def test_another_bit_is_found(name: str) -> None:
    row = {"reward": 0.5, "loss": [0.25, 1.0], "grad_norm": [1.0, 2.0], "tokens": 3}
    runs = {(arm, 1): {"rows": [row, row], "weights": "w"} for arm in ("unified+reuse", "unified+recompute")}
    assert held(summary(runs)) and summary(runs)["compared"] == 12
    value = row[name]
    changed = [value[0], value[1] * (1 + 2**-52)] if isinstance(value, list) else value * (1 + 2**-52)  # type: ignore[operator]
    other = {**runs, ("unified+recompute", 1): {"rows": [row, {**row, name: changed}], "weights": "w"}}
    assert summary(other)["unequal"] == 1 and not held(summary(other))
    short = {**runs, ("unified+recompute", 1): {"rows": [row], "weights": "w"}}
    assert summary(short)["unequal"] == 6
    weights = {**runs, ("unified+recompute", 1): {"rows": [row, row], "weights": "v"}}
    assert summary(weights)["unequal"] == 0 and not held(summary(weights))


def test_what_was_trained_is_not_trained_again(found: tuple[Path, dict[str, Any]]) -> None:
    place, result = found

    def never(file: Path) -> dict[str, Any]:
        raise AssertionError(f"{file} was trained before")

    assert curves(SMALL, place / "runs", seeds=(1, 2), base=place, run=never) == result
    with pytest.raises(AssertionError):
        curves(SMALL, place / "runs", seeds=(3,), base=place, run=never)


def test_the_picture(found: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, result = found
    picture.write(result, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert text.startswith("<svg") and text.count("<polyline") == 3 and "vendor+recompute" in text
    with pytest.raises(ValueError, match="nothing to draw"):
        picture.drawn({"rewards": {"unified+reuse": {"1": [None]}}})


def test_wrong_arms_and_configurations_train_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arms must be unified or vendor"):
        curves(SMALL, tmp_path, seeds=(1,), arms=("unified",), run=run)
    with pytest.raises(ValueError, match="algorithm"):
        curves({**SMALL, "algorithm": "x"}, tmp_path, seeds=(1,), run=run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_script(tmp_path: Path) -> None:
    import subprocess
    import sys

    root = Path(__file__).resolve().parents[2]
    (folder(tmp_path) / "run.yaml").write_text(json.dumps(SMALL))
    command = [sys.executable, str(root / "scripts" / "reward_curves.py"), str(tmp_path / "run.yaml")]
    words = [str(tmp_path / "runs"), "--seed", "4", "--rollouts", "1"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights_equal"] == {"4": True}
    assert (tmp_path / "runs" / "curves.svg").is_file() and (tmp_path / "runs" / "curves.json").is_file()


def test_the_example_is_a_configuration() -> None:
    from kernelbraid.rl.config import read_config

    found = read_config(Path(__file__).resolve().parents[2] / "examples" / "smollm2_h200.yaml")
    assert found.model.device == "cuda" and found.update.minibatches >= 2
