"""Configurations of training runs: what is accepted, and what each mistake says."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kernelbraid.rl.losses import Aggregation, KlEstimator, Ppo
from kernelbraid.rl.records import Sampling
from kernelbraid.rl.reuse import Named
from kernelbraid.rl.tasks.jsonl import JsonLines

pytest.importorskip("pydantic")
pytest.importorskip("ruamel.yaml")

from kernelbraid.rl.config import GymSection, MathSection, make_task, parse_config, read_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "rl").glob("*.yaml"))
SMALL: dict[str, Any] = {
    "algorithm": "grpo",
    "rollouts": 10,
    "model": {"path": "model"},
    "task": {"kind": "jsonl", "path": "task.jsonl", "reward": "rewards.py:near"},
}


def changed(**changes: Any) -> dict[str, Any]:
    """The small configuration; `a__b=1` sets b of section a, None removes it."""
    made = copy.deepcopy(SMALL)
    for name, value in changes.items():
        *path, last = name.split("__")
        at = made
        for step in path:
            at = at.setdefault(step, {})
        if value is None:
            del at[last]
        else:
            at[last] = value
    return made


def refused(**changes: Any) -> list[str]:
    with pytest.raises(ValueError) as caught:
        parse_config(changed(**changes))
    first, *lines = str(caught.value).splitlines()
    assert first == f"the configuration has {len(lines)} error{'s' * (len(lines) > 1)}:"
    return lines


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(path: Path) -> None:
    config = read_config(path)
    assert isinstance(config.task, GymSection) and config.update.learning_rate == 1e-6
    assert config.loss.clip_high == 0.28 and config.objective.sampling == config.sampling


def test_defaults() -> None:
    config = parse_config(SMALL)
    assert config.sampling == Sampling() and config.reuse.mode == "auto"
    assert config.loss.aggregation == Aggregation.TOKEN and not config.objective.values
    ppo = parse_config(changed(algorithm="ppo", rollout__group_size=1, ppo={"value_clip": 0.1}))
    assert isinstance(ppo.loss, Ppo) and ppo.loss.value_clip == 0.1 and ppo.objective.values
    rewarded = parse_config(changed(algorithm="ppo", kl={"weight": 0.1, "placed": "reward"}))
    assert rewarded.loss.kl_weight == 0
    punished = parse_config(changed(kl={"weight": 0.1, "estimator": "k2"}))
    assert punished.loss.kl_weight == 0.1 and punished.loss.kl_estimator == KlEstimator.K2
    assert json.loads(config.model_dump_json())["rollout"]["record"] == ["whole", "processed"]
    assert parse_config(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"algoritm": "x"}, "algoritm: there is no such key; near it is algorithm"),
        ({"update__learning_rat": 1}, "update.learning_rat: there is no such key; near it is learning_rate"),
        ({"sampling__temprature": 1}, "sampling.temprature: there is no such key; near it is temperature"),
        ({"grpo__clip": 1}, "grpo.clip: there is no such key"),
        ({"reuse__spot_check__sed": 1}, "reuse.spot_check.sed: there is no such key; near it is seed"),
        ({"task__rewards": 1}, "task.rewards: there is no such key; near it is reward"),
        ({"model__path": None}, "model: one of path, random and named must be given"),
        ({"rollouts": None}, "rollouts: must be given"),
        ({"task__kind": "web"}, "task: input tag 'web' found using 'kind' does not match"),
        ({"rollouts": 0}, "rollouts: input should be greater than or equal to 1, got 0"),
        ({"algorithm": "dpo"}, "algorithm: input should be 'grpo' or 'ppo', got 'dpo'"),
        ({"sampling__top_p": 2.0}, "sampling: top_p must be above 0 and at most 1, got 2.0"),
        ({"grpo__aggregation": "fixed"}, "grpo: fixed_length must be given for aggregation `fixed`"),
        ({"model__dtype": "bfloat16"}, "model: dtype must be float32 on cpu, got bfloat16"),
        ({"model__device": "cuda"}, "model: dtype must be bfloat16 or float16 on cuda, got float32"),
        ({"rollout__group_size": 1}, "rollout.group_size: must be at least 2 for grpo"),
        ({"ppo": {}}, "ppo: goes with algorithm ppo alone"),
        ({"gae": {}}, "gae: goes with algorithm ppo alone"),
        ({"algorithm": "ppo", "grpo": {}}, "grpo: goes with algorithm grpo alone"),
        ({"algorithm": "ppo", "scale": "group"}, "scale: goes with algorithm grpo alone"),
        ({"kl": {"weight": 0.1, "placed": "reward"}}, "kl.placed: must be loss for grpo"),
        ({"grpo": {"kl_weight": 0.1}}, "grpo: kl_weight and kl_estimator stand under kl"),
        (
            {"grpo": {"aggregation": "fixed", "fixed_length": 7}},
            "grpo.fixed_length: must be sampling.max_tokens",
        ),
        (
            {"task__max_prompt_tokens": 2000},
            "rollout.cache_tokens: must be at least task.max_prompt_tokens 2000 + sampling.max_tokens 256 = "
            "2256, got 1024",
        ),
        ({"model__positions": 100}, "model.positions: must be at least task.max_prompt_tokens 512"),
        (
            {"update__minibatches": 65},
            "update.minibatches: must be at most the 64 completions of a rollout, got 65",
        ),
        ({"sampling__temperature": 0.0}, "sampling.temperature: must be above 0"),
        (
            {"reuse__mode": "require", "rollout__record": ["processed"]},
            "reuse.mode: require needs log-probability 'whole', add it to rollout.record",
        ),
        (
            {"reuse__logprob": "processed", "sampling__top_k": 5},
            "reuse.logprob: must be whole where tokens are drawn from a cut, penalised",
        ),
        (
            {"reuse__mode": "require", "reuse__spot_check__on_mismatch": "fall_back"},
            "reuse: spot_check.on_mismatch must be stop where mode is require",
        ),
    ],
)  # fmt: skip
def test_mistakes(changes: dict[str, Any], wanted: str) -> None:
    [line] = refused(**changes)
    assert line.startswith(wanted), line


def test_all_mistakes_at_once() -> None:
    lines = refused(rollout__group_size=1, update__minibatches=99, ppo={})
    assert [line.split(":")[0] for line in lines] == ["ppo", "rollout.group_size", "update.minibatches"]
    assert len(refused(rollouts=0, seed=-1, colour=1)) == 3


def test_what_is_not_processed_needs_no_record_of_its_own() -> None:
    config = parse_config(
        changed(reuse__mode="require", reuse__logprob="processed", rollout__record=["whole"])
    )
    assert config.objective.named == Named.PROCESSED


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: grpo\nrollouts: 1e1\nmodel: {path: no}\ntask: {kind: math, path: t.jsonl}\n")
    config = read_config(path)
    assert config.rollouts == 10 and config.model.path == "no" and isinstance(config.task, MathSection)
    for text, message in (
        ("rollouts: 1\nrollouts: 2\n", r"run\.yaml is not YAML: line 2: found duplicate key"),
        ("a: [1\n", r"run\.yaml is not YAML: line 2: "),
        ("- 1\n", r"run\.yaml must hold keys and values"),
        ("", r"run\.yaml must hold keys and values"),
        (
            "algorithm: grpo\n",
            r"run\.yaml has 3 errors:\nrollouts: must be given\nmodel: must be given\ntask",
        ),
        (
            "a: !!python/object/apply:os.getcwd []\n",
            r"run\.yaml is not YAML: line 1: could not determine a constructor",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(path)
    with pytest.raises(ValueError, match="there is no file"):
        read_config(tmp_path / "absent.yaml")


def test_tasks_are_made(tmp_path: Path) -> None:
    (tmp_path / "task.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "rewards.py").write_text("def near(completion, record):\n    return len(completion)\n")
    task = make_task(parse_config(SMALL).task, tmp_path)
    assert isinstance(task, JsonLines) and task.reward(task.example(0), "four") == 4
    pytest.importorskip("math_verify")
    task = make_task(parse_config(changed(task={"kind": "math", "path": "task.jsonl"})).task, tmp_path)
    assert task.reward(task.example(0), "\\boxed{2}") == 1
    pytest.importorskip("reasoning_gym")
    gym = {"kind": "gym", "name": "chain_sum", "size": 3, "threshold": 1.0}
    assert len(make_task(parse_config(changed(task=gym)).task, tmp_path)) == 3
