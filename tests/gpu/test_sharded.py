"""FSDP2 on GPUs: divided and replicated runs have the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

from tests.rl.processes import run
from tests.rl.runs import document, folder

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TRAIN = """
import json, sys
from pathlib import Path
from kernelbraid.rl.config import parse_config
from kernelbraid.rl.trainer import Trainer

with Trainer(parse_config(json.loads(sys.argv[2])), Path(sys.argv[1])) as trainer:
    rows = []
    while trainer.done < 2:
        row = trainer.step()
        rows.append([row[key] for key in ("reward", "loss", "grad_norm", "tokens")])
    digests = trainer.group.gather([trainer.policy.digest()])
    held = sum(each.numel() for each in trainer.policy.masters.values())
    if trainer.group.first:
        print(json.dumps({"rows": rows, "digests": digests, "held": held}))
"""


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_parts_train_as_the_whole(algorithm: str, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for parallel in ("replicated", "fsdp2"):
        made = document(
            parallel=parallel,
            algorithm=algorithm,
            rollouts=2,
            model={
                "device": "cuda",
                "dtype": "bfloat16",
                "random": {"layers": 2, "hidden": 128, "intermediate": 256},
            },
            update={"micro_batch_tokens": 128, "checkpoint_activations": True},
        )
        found[parallel] = run(TRAIN, str(folder(tmp_path / parallel)), json.dumps(made))
    whole, parts = found["replicated"], found["fsdp2"]
    assert parts["rows"] == whole["rows"]
    assert len({*parts["digests"], *whole["digests"]}) == 1
    assert parts["held"] < 0.6 * whole["held"]
