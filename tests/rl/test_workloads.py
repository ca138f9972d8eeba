"""Calls of a run, recorded for a search."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")

from tests.rl.runs import config, folder

from kernelbraid import ops
from kernelbraid.rl.trainer import train
from kernelbraid.rl.workloads import MOST, Axes, typical
from kernelbraid.search.recorded import read_workloads
from kernelbraid.search.study import Study


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = folder(tmp_path_factory.mktemp("run"))
    plain = train(config(rollouts=2), folder=place)
    again = folder(tmp_path_factory.mktemp("recorded"))
    update = {"micro_batch_tokens": 128, "checkpoint_activations": True}
    found = train(config(rollouts=2, update=update), folder=again, workloads=again / "calls.json")
    assert found["weights"] == plain["weights"], "recording changes bits"
    return again / "calls.json"


def test_a_search_reads_what_a_run_wrote(recorded: Path, tmp_path: Path) -> None:
    attention = read_workloads(recorded, "attention", "cpu")
    phases = {each.phase for each in attention}
    assert {"prefill", "decode", "update", "backward"} <= phases
    assert len({each.name for each in attention}) == len(attention)
    assert all(each.shape["head_dim"] == 64 and each.shape["query_heads"] == 2 for each in attention)
    backward = sum(each.weight for each in attention if each.phase == "backward")
    update = sum(each.weight for each in attention if each.phase == "update")
    assert update > backward > 0, "activations were computed again, and the spot check has no backward"
    linear = read_workloads(recorded, "linear", "cpu")
    assert {each.shape["out_features"] for each in linear} == {256, 32, 96}
    with Study.create(tmp_path / "study", "attention", workloads=attention) as study:
        assert study.workloads == attention
    operator = ops.get("linear")
    assert all(operator.constant_axes(each)["bias"] == 0 for each in linear)


def test_few_shapes_stand_for_many() -> None:
    def axes(batch: int, length: int) -> Axes:
        return (("batch", batch), ("length", (length,) * batch), ("head_dim", 64))

    calls = {("decode", axes(4, n)): 10 for n in range(64, 128)}
    assert typical(calls) == {("decode", axes(4, 95)): 640}
    many = {("decode", axes(2, 2**n)): n + 1 for n in range(17)} | {("prefill", axes(1, 8)): 3}
    found = typical(many)
    decode = [count for (phase, _), count in found.items() if phase == "decode"]
    assert len(decode) == MOST and found["prefill", axes(1, 8)] == 3
    assert abs(sum(decode) - sum(range(1, 18))) <= MOST


SLEEP = {"attention": [{"phase": "sleep", "axes": {}, "weight": 1}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "no recorded workloads of format 1"),
        ({"device": "cuda"}, "was recorded on cuda, the search is for cpu"),
        ({"operators": {"linear": [1]}}, "no calls of attention; it has linear"),
        ({"operators": SLEEP}, "none: phase"),
    ],
)
def test_files_that_are_none(recorded: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "calls.json"
    file.write_text(json.dumps(json.loads(recorded.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        read_workloads(file, "attention", "cpu")


def test_no_folder_to_write_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        train(config(rollouts=1), folder=folder(tmp_path), workloads=tmp_path / "nowhere" / "calls.json")
