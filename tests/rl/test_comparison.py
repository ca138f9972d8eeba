"""The grid of training steps: its document, resumption, failures, and the evidence that it becomes."""

import io
import json
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("pydantic")

from tests.rl.runs import document, folder

from kernelbraid.cli import app
from kernelbraid.models import evidence
from kernelbraid.report import listing
from kernelbraid.rl import arm, comparison
from kernelbraid.rl.arm import Job, measure
from kernelbraid.rl.comparison import Grid, GridRow, compare, configured, read_grid

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "algorithm": "grpo",
    "model": {"random": {"layers": 1, "hidden": 32, "intermediate": 48}},
    "sampling": {"max_tokens": 9},
    "rollout": {"prompts": 2, "group_size": 2, "cache_tokens": 32, "ignore_end": True},
    "update": {"learning_rate": 0.01, "minibatches": 2},
}


def grid(**changes: Any) -> Grid:
    ppo = {"name": "b", "prompt_tokens": 7, "config": {"algorithm": "ppo"}}
    arms = ("unified+reuse", "vendor+recompute")
    made = {"rows": ({"name": "a", "prompt_tokens": 5}, ppo), "config": SMALL, "steps": 1, "arms": arms}
    return Grid.model_validate({**made, **changes})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes: importing and compiling would be most of the time."""
    monkeypatch.setattr(comparison, "run", in_this_process)


def in_this_process(job: Job, told: Any) -> tuple[dict[str, Any], str]:
    return json.loads(json.dumps(measure(Job.loads(job.dumps()), told))), ""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    place = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "run", in_this_process)
        return place, compare(grid(), place, write=place)


def test_rows_tell_what_was_measured(measured: tuple[Path, dict[str, Any]]) -> None:
    place, found = measured
    assert json.loads((place / "cpu" / "train.bench.json").read_text()) == json.loads(json.dumps(found))
    assert [row["name"] for row in found["rows"]] == ["a", "b"]
    for row in found["rows"]:
        ours, theirs = (row["arms"][name] for name in ("unified+reuse", "vendor+recompute"))
        assert ours["tokens"] == theirs["tokens"] == 2 * 2 * 9
        assert row["unequal"] == 0 and row["compared"] >= 2 * 2 * 9
        assert row["peers"] == {"vendor+recompute": theirs["ms"]} and row["ours_ms"] == ours["ms"]
        assert row["speedup"] == pytest.approx(theirs["ms"] / ours["ms"])
        phases = theirs["phase_seconds"]
        assert row["recompute_share"] == pytest.approx(phases["old"] / sum(phases.values()))
        assert 0 < row["recompute_share"] < 1 and row["failed"] == {} and row["curves_equal"] is None
        assert all(len(each["steps"]) == 1 for each in row["arms"].values())
        assert ours["steps"][0]["optimizer_steps"] == 2 * 2  # two a rollout, the one before included


@pytest.mark.usefixtures("here")
def test_only_what_is_missing_is_measured(measured: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, found = measured
    kept = json.loads(json.dumps(found))
    lost = kept["rows"][0]["arms"].pop("vendor+recompute")
    evidence.write(kept, tmp_path)
    told: list[str] = []
    again = compare(grid(), tmp_path, write=tmp_path, progress=told.append)
    assert not [each for each in told if "reuse" in each] and [each for each in told if "recompute 1" in each]
    rows = {row["name"]: row for row in again["rows"]}
    assert rows["b"] == found["rows"][1]
    assert rows["a"]["arms"]["unified+reuse"] == found["rows"][0]["arms"]["unified+reuse"]
    assert rows["a"]["arms"]["vendor+recompute"]["ms"] != lost["ms"]


def test_other_settings_and_other_sources_are_measured_anew(
    measured: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, found = measured
    evidence.write(found, tmp_path)
    told: list[str] = []
    compare(grid(), tmp_path, write=tmp_path, only=["b"], progress=told.append)
    assert told == ["b (1 of 1): measured before"]
    other = json.loads(json.dumps(found))
    other["sources"]["rl/update.py"] = "0" * 64
    evidence.write(other, tmp_path)
    assert evidence.kept(found, tmp_path) == []


def test_committed_evidence_is_checked(measured: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, found = measured
    path = evidence.write(found, tmp_path)
    assert listing.committed(tmp_path)["mismatched"] == 0

    def problem(**changes: Any) -> str:
        path.write_text(json.dumps(json.loads(json.dumps(found)) | changes))
        problems = listing.committed(tmp_path)["problems"]
        return str(problems[0]["reason"]) if problems else ""

    rows = [{**found["rows"][0], "unequal": 1}]
    assert problem() == ""
    assert "rl/policy.py changed" in problem(sources={**found["sources"], "rl/policy.py": "0"})
    assert "linear is no longer the source" in problem(
        implementations={**found["implementations"], "linear": "0" * 64}
    )
    assert "contract of rope" in problem(contracts={**found["contracts"], "rope": "0"})
    assert "not equal" in problem(rows=rows)
    assert "no rows" in problem(rows=[]) and "rows of profile" in problem(kind="profile")
    path.write_text("{}")
    assert "unreadable" in str(listing.committed(tmp_path)["problems"][0]["reason"])


def test_sources_that_evidence_names_exist() -> None:
    for kind, names in evidence.SOURCES.items():
        assert set(evidence.sources(kind)) == set(names)


def job(place: Path, kernels: str, *olds: str) -> Job:
    made = document(model={"kernels": kernels}, sampling={"max_tokens": 20}, rollout={"group_size": 2})
    return Job(made, str(folder(place)), olds, steps=1)


def test_other_bits_are_counted(tmp_path: Path) -> None:
    """The vendor's kernels are the broken arm: what they record is not what their update computes."""
    theirs = measure(job(tmp_path / "vendor", "vendor", "recompute", "detach"), lambda text: None)
    assert theirs["unequal"] > 0 and theirs["mismatch"] > 0 and set(theirs["arms"]) == {"recompute", "detach"}
    given = replace(job(tmp_path / "unified", "unified", "reuse"), warmup=2, warmup_tokens=3)
    ours = measure(given, lambda text: None)
    assert ours["unequal"] == 0 == ours["mismatch"] and 0 < ours["compared"] <= 2 * 2 * 2 * 3
    [step] = ours["arms"]["reuse"]
    assert step["tokens"] > 2 * 2 * 3, "timed completions are as long as configured"


@pytest.mark.usefixtures("here")
def test_reuse_and_recompute_in_runs_of_their_own(tmp_path: Path) -> None:
    arms = ("unified+reuse", "unified+recompute")
    made = grid(arms=arms, together=False, steps=2, rows=({"name": "a", "prompt_tokens": 5},))
    [row] = compare(made, tmp_path, write=tmp_path)["rows"]
    assert row["curves_equal"] is True and row["speedup"] is None and row["peers"] == {}
    row["arms"]["unified+reuse"]["steps"][1]["grad_norm"][0] += 1e-12
    assert comparison._curves_equal(row) is False


def test_an_arm_that_fails_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\necho no room left >&2\nkill -9 $$\n")
    killed.chmod(killed.stat().st_mode | stat.S_IEXEC)
    with monkeypatch.context() as patch:
        patch.setattr(comparison.sys, "executable", str(killed))
        [row] = compare(grid(), tmp_path, write=tmp_path, only=["a"])["rows"]
    assert row["arms"] == {} and row["speedup"] is None
    reason = "the process ended with code -9: no room left"
    assert row["failed"] == dict.fromkeys(("unified+reuse", "vendor+recompute"), reason)
    told: list[str] = []
    compare(grid(), tmp_path, write=tmp_path, only=["a"], progress=told.append)
    assert told == ["a (1 of 1): measured before"]
    monkeypatch.setattr(comparison, "run", in_this_process)
    [row] = compare(grid(), tmp_path, write=tmp_path, only=["a"], retry=True)["rows"]
    assert row["failed"] == {} and len(row["arms"]) == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("lower update.micro_batch_tokens"), "out of memory: lower"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: CUDA"),
        (ValueError("no model at x"), "ValueError: no model at x"),
    ],
)
def test_a_process_tells_why_it_stopped(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(job: Job, told: Any) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(arm, "measure", stopped)
    monkeypatch.setattr(sys, "stdin", io.StringIO(Job({}, ".", ("reuse",), 1).dumps()))
    assert arm._main() == 0
    assert json.loads(capsys.readouterr().out)["failed"].startswith(words)


def test_the_grids_of_the_examples_can_be_read() -> None:
    here = read_grid(ROOT / "examples" / "compare_cpu.yaml")
    assert {row.name for row in here.rows} == {"grpo", "ppo", "rewards"}
    there = read_grid(ROOT / "examples" / "compare_h200.yaml")
    made = {row.name: configured(there, row, "unified+reuse", {"SmolLM2-135M": "/x"}) for row in there.rows}
    assert len(made) == 13
    weights = [each["model"].get("path") or each["model"]["named"] for each in made.values()]
    assert weights.count("/x") == 4 and {"Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"} <= set(weights)
    assert {each["algorithm"] for each in made.values()} == {"grpo", "ppo"}
    lengths = {each["sampling"]["max_tokens"] for each in made.values()}
    assert min(lengths) == 512 and max(lengths) == 8192
    steps = {name: each["update"]["minibatches"] for name, each in made.items()}
    assert [name for name, count in steps.items() if count < 2] == ["qwen3-1.7b-grpo-2048-single"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: []", "rows"),
        ("rows: [{name: a}, {name: a}]", "a name of its own"),
        ("rows: [{name: a, arms: [unified]}]", "arms must be unified or vendor"),
        (
            "rows: [{name: a, prompt_tokens: 4}]\nconfig: {algorithm: grpo}",
            "one of path, random and named must be given",
        ),
        ("rows: [{name: a, stepz: 4}]", "stepz"),
    ],
)
def test_mistakes_in_a_grid_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_grid(tmp_path / "grid.yaml")


def test_a_path_stands_for_a_name() -> None:
    made = grid(rows=({"name": "a", "config": {"model": {"path": "Some", "random": None}}},))
    row = GridRow(name="a", config={"model": {"path": "Some"}})
    assert configured(made, row, "vendor+bypass", {"Some": "/tmp"})["model"]["path"] == "/tmp"
    with pytest.raises(ValueError, match="there is no row c"):
        compare(made, Path(), write=Path(), only=["c"])


def test_the_verb(tmp_path: Path) -> None:
    rows = {
        "rows": [{"name": "a", "prompt_tokens": 5}],
        "config": SMALL,
        "arms": ["unified+reuse"],
        "steps": 1,
    }
    (tmp_path / "grid.yaml").write_text(json.dumps(rows))
    words = ["compare", str(tmp_path / "grid.yaml"), "--write", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "unified+reuse" in done.stdout, done.output
    again = CliRunner().invoke(app, [*words, "--json"])
    assert json.loads(again.stdout)["rows"][0]["name"] == "a" and "measured before" in again.stderr
    broken = json.loads((tmp_path / "cpu" / "train.bench.json").read_text())
    broken["rows"][0]["unequal"] = 1
    evidence.write(broken, tmp_path)
    assert CliRunner().invoke(app, words).exit_code == 1
