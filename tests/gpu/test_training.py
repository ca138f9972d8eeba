"""Training steps on a GPU: both arms, their comparison, resumption, and what measures them."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

from tests.rl.runs import document, folder

from kernelbraid.models.config import named
from kernelbraid.models.profile import PHASES, Step, profile
from kernelbraid.rl.arm import Job, measure
from kernelbraid.rl.config import parse_config
from kernelbraid.rl.speed import Load, load_speed
from kernelbraid.rl.trainer import train

SIZES = {"layers": 2, "hidden": 128, "intermediate": 256, "query_heads": 4, "kv_heads": 2}


def made(**changes: Any) -> dict[str, Any]:
    model = {"device": "cuda", "dtype": "bfloat16", "random": SIZES, **changes.pop("model", {})}
    return document(model=model, **{"rollouts": 2, **changes})


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_both_arms_are_measured(algorithm: str, tmp_path: Path) -> None:
    found = {}
    for kernels in ("unified", "vendor"):
        given = made(algorithm=algorithm, model={"kernels": kernels}, rollout={"ignore_end": True})
        job = Job(given, str(folder(tmp_path / kernels)), ("recompute", "bypass"), steps=2)
        found[kernels] = measure(job, lambda text: None)
    ours, theirs = found["unified"], found["vendor"]
    assert ours["unequal"] == 0 < ours["compared"] == theirs["compared"]
    assert theirs["mismatch"] is not None and theirs["mismatch"] < 0.5
    for steps in (*ours["arms"].values(), *theirs["arms"].values()):
        assert all(each["phase_seconds"]["rollout"] > 0 < each["phase_seconds"]["update"] for each in steps)
    tokens = {each["tokens"] for one in found.values() for arm in one["arms"].values() for each in arm}
    assert len(tokens) == 1 and "FlashAttention" in theirs["operators"]


def test_the_vendors_gradients_are_ours_but_for_rounding(tmp_path: Path) -> None:
    rows: dict[str, list[Any]] = {}
    for kernels in ("unified", "vendor"):
        given = made(model={"kernels": kernels}, reuse={"old": "recompute"}, rollouts=1)
        train(
            parse_config(given), folder=folder(tmp_path / kernels), told=rows.setdefault(kernels, []).append
        )
    ours, theirs = rows["unified"][0], rows["vendor"][0]
    if ours["completions"] == theirs["completions"]:  # the arms may draw other tokens
        assert theirs["grad_norm"][0] == pytest.approx(ours["grad_norm"][0], rel=0.1)


@pytest.mark.parametrize("masters", [True, False])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(masters: bool, tmp_path: Path) -> None:
    changes = {"update": {"masters": masters}}
    whole = train(parse_config(made(**changes)), folder=folder(tmp_path / "whole"))
    place = folder(tmp_path / "parts")
    train(parse_config(made(**changes, rollouts=1)), folder=place)
    assert train(parse_config(made(**changes)), folder=place)["weights"] == whole["weights"]


def test_reuse_changes_no_bit(tmp_path: Path) -> None:
    found = [
        train(parse_config(made(reuse={"old": old})), folder=folder(tmp_path / old))["weights"]
        for old in ("reuse", "recompute")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("kernels", ["unified", "vendor"])
def test_a_load_is_measured(kernels: str) -> None:
    load = Load("SmolLM2-135M", 16, 40, 24, 4, (1, 3), kernels=kernels, device="cuda", bandwidth=4e12)
    found = load_speed(load)
    assert found["drawn_tokens"] == 16 * 24 and 0 < found["share_of_bound"] < 1.2
    assert [each["concurrency"] for each in found["repeats"]] == [16, 1, 3]
    if kernels == "unified":
        assert not any(each["unequal_tokens"] or each["unequal_logprobs"] for each in found["repeats"])
    torch.cuda.empty_cache()


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-MoE-small"])
def test_a_layer_is_profiled(model: str) -> None:
    found = profile(named(model), Step(64, 64, 4, 4, 512), device="cuda", rounds=1)
    assert tuple(found["phases"]) == PHASES and found["speedup"] > 0
