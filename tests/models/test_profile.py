"""The profile of one layer: phases, weights, and what they amount to."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kernelbraid.cli import app
from kernelbraid.models import profile as profiling
from kernelbraid.models.config import named
from kernelbraid.models.operators import Operators
from kernelbraid.models.profile import PHASES, Step, profile
from kernelbraid.models.vendor import Vendor
from kernelbraid.report import listing

STEP = Step(prompt=12, response=20, group=2, prompts=3, micro_tokens=70)


def test_calls_of_a_step() -> None:
    assert STEP.completions == 6 and STEP.length == 32 and STEP.packed == 2
    update = dict.fromkeys(("recompute", "forward", "backward"), 3.0)
    assert STEP.calls == {"prefill": 1.0, "decode": 20.0, **update}
    assert Step(prompt=1, response=1, group=1, prompts=1, micro_tokens=1000).packed == 1


@pytest.mark.parametrize("model", ["SmolLM2-135M", "Qwen3-MoE-small"])
def test_every_phase_is_measured_and_summed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "LEAST_SECONDS", 1e-3)
    found = profile(named(model), STEP, rounds=1)
    assert tuple(found["phases"]) == PHASES
    ms = {name: phase["ms"] for name, phase in found["phases"].items()}
    assert all(min(each.values()) > 0 for each in ms.values())
    layers = named(model).layers
    calls = STEP.calls
    whole = layers * sum(calls[name] * ms[name]["vendor"] for name in PHASES) / 1e3
    reused = layers * sum(calls[name] * ms[name]["unified"] for name in PHASES if name != "recompute") / 1e3
    saved = layers * calls["recompute"] * ms["recompute"]["vendor"] / 1e3
    assert found["seconds"] == pytest.approx({"vendor+recompute": whole, "unified+reuse": reused})
    assert found["recompute_share"] == pytest.approx(saved / whole)
    assert found["ceiling"] == pytest.approx(whole / (whole - saved))
    assert found["to_ceiling"] == pytest.approx(found["speedup"] / found["ceiling"])


def test_both_arms_compute_the_same_layer() -> None:
    """On equal inputs the arms agree but for rounding, in every phase; another layer does not."""
    bench = profiling._Bench(named("Qwen3-MoE-small"), STEP, "cpu")

    def results(operators: Operators) -> list[list[torch.Tensor]]:
        bench.generator.manual_seed(0)
        return [list(bench.work(name, operators)()) for name in PHASES]  # type: ignore[call-overload]

    class Broken(Operators):
        def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            return 1.01 * super().rms_norm(x, weight, eps)

        def add_rms_norm(
            self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            normed, total = super().add_rms_norm(x, residual, weight, eps)
            return 1.01 * normed, total

    def close(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
        pairs = [
            (a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
        ]
        return all((a - b).norm() <= 1e-4 * b.norm() for a, b in pairs)

    vendor = results(Vendor())
    assert close(results(Operators()), vendor)
    assert not close(results(Broken()), vendor)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"group": 0}, "group must be at least 1, got 0"),
        ({"micro_tokens": 31}, "micro_tokens must be at least"),
    ],
)
def test_impossible_steps_are_refused(sizes: dict[str, int], message: str) -> None:
    given = {"prompt": 12, "response": 20, "group": 2, "prompts": 3, "micro_tokens": 70} | sizes
    with pytest.raises(ValueError, match=message):
        Step(**given)


def test_the_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profiling, "LEAST_SECONDS", 1e-3)
    monkeypatch.setattr(profiling, "ROUNDS", 1)
    sizes = ["--prompt", "8", "--response", "8", "--group", "2", "--prompts", "2", "--micro-tokens", "16"]
    done = CliRunner().invoke(app, ["profile", "SmolLM2-135M", *sizes, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["model"] == "SmolLM2-135M" and set(document["phases"]) == set(PHASES)
    table = CliRunner().invoke(app, ["profile", "SmolLM2-135M", *sizes, "--write", str(tmp_path)])
    assert table.exit_code == 0 and "ceiling of reuse alone" in table.stdout
    assert "profile.bench.json" in table.stderr
    assert listing.committed(tmp_path)["benchmarks"] == 1
    unknown = CliRunner().invoke(app, ["profile", "GPT-2"])
    assert unknown.exit_code != 0


def test_profiles_are_rows_of_one_file(tmp_path: Path) -> None:
    def row(model: str, prompt: int, ceiling: float) -> dict[str, object]:
        return {"model": model, "step": {"prompt": prompt}, "ceiling": ceiling}

    for each in (row("a", 1, 1.1), row("b", 1, 1.2), row("a", 2, 1.3), row("a", 1, 1.4)):
        path = profiling.kept(each, tmp_path, "cpu")
    rows = json.loads(path.read_text())["rows"]
    assert rows == [row("b", 1, 1.2), row("a", 2, 1.3), row("a", 1, 1.4)]
    whole = {"certificates": 0, "benchmarks": 1, "mismatched": 0, "problems": []}
    assert listing.committed(tmp_path) == whole
    document = json.loads(path.read_text())
    document["sources"]["models/vendor.py"] = "0"
    path.write_text(json.dumps(document))
    [problem] = listing.committed(tmp_path)["problems"]
    assert problem["reason"] == "models/vendor.py changed since it was measured"
    profiling.kept(row("c", 1, 1.0), tmp_path, "cpu")
    assert [each["model"] for each in json.loads(path.read_text())["rows"]] == ["c"]
