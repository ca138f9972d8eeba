"""Training runs: arms that must agree bit for bit, those that must not, and what stops a run."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")

from tests.rl.runs import config, curve, document, folder

from kernelbraid.rl import trainer as training
from kernelbraid.rl.config import parse_config
from kernelbraid.rl.reuse import ReuseError
from kernelbraid.rl.spot_check import MismatchError
from kernelbraid.rl.trainer import Trainer, train

PPO: dict[str, Any] = {"algorithm": "ppo", "ppo": {"entropy_weight": 0.01}, "kl": {"weight": 0.05}}


@pytest.fixture(scope="module")
def reused(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    return curve(config(reuse={"mode": "require"}), tmp_path_factory.mktemp("reuse"))


def test_reuse_equals_recompute(reused: list[tuple[Any, ...]], tmp_path: Path) -> None:
    assert curve(config(reuse={"old": "recompute"}), tmp_path) == reused


def test_the_cut_into_micro_batches_changes_no_bit(reused: list[tuple[Any, ...]], tmp_path: Path) -> None:
    assert curve(config(update={"micro_batch_tokens": 1}), tmp_path / "one") == reused
    update = {"micro_batch_tokens": 200, "checkpoint_activations": True}
    assert curve(config(update=update), tmp_path / "some") == reused


def test_another_seed_is_another_run(reused: list[tuple[Any, ...]], tmp_path: Path) -> None:
    """What the comparisons above rest on: curves tell runs apart, in each of their parts."""
    other = curve(config(seed=4, rollouts=2), tmp_path)
    assert all(one != two for one, two in zip(other[1], reused[1], strict=True))


def test_ppo_reuse_equals_recompute(tmp_path: Path) -> None:
    """Values too: those recorded while decoding are those that the update computes."""
    one = curve(config(**PPO, rollouts=3, reuse={"mode": "require"}), tmp_path / "reuse")
    assert curve(config(**PPO, rollouts=3, reuse={"old": "recompute"}), tmp_path / "recompute") == one
    cut = {"micro_batch_tokens": 1}
    assert curve(config(**PPO, rollouts=3, update=cut), tmp_path / "cut") == one


def test_ppo_with_the_penalty_in_the_rewards(tmp_path: Path) -> None:
    weights = [
        curve(
            config(algorithm="ppo", rollouts=2, kl={"weight": weight, "placed": "reward"}), tmp_path / str(i)
        )
        for i, weight in enumerate((0.0, 0.5))
    ]
    assert weights[0][1][-1] != weights[1][1][-1]


def test_vendor_with_forced_reuse_is_detected(tmp_path: Path) -> None:
    """The negative control: other bits in rollout and update do not get past the spot check."""
    made = config(model={"kernels": "vendor"}, reuse={"mode": "require"}, rollouts=10)
    with (
        Trainer(made, folder(tmp_path)) as trainer,
        pytest.raises(MismatchError, match="numbers, first the log"),
    ):
        trainer.run()
    assert trainer.old.counters.logprob_mismatch_max > 0


def test_vendor_arms_train(tmp_path: Path) -> None:
    for old in ("recompute", "bypass", "detach"):
        made = config(model={"kernels": "vendor"}, reuse={"old": old}, rollouts=2)
        found = curve(made, tmp_path / old)
        assert found[0][3] != found[1][3]


def test_bypass_and_detach_of_unified_kernels(reused: list[tuple[Any, ...]], tmp_path: Path) -> None:
    """Bypass has reuse's bits where reuse is valid; detach forgets the snapshot after the first step."""
    assert curve(config(reuse={"old": "bypass"}, rollouts=2), tmp_path / "bypass") == reused[:2]
    assert curve(config(reuse={"old": "detach"}, rollouts=2), tmp_path / "detach") != reused[:2]


def test_the_first_minibatch_has_ratio_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(update={"minibatches": 1, "epochs": 1}, rollouts=1)
    with Trainer(made, folder(tmp_path)) as trainer:
        assert trainer.step()["largest_log_ratio"] == 0.0
    original = training.prepare

    def nudged(*arguments: Any) -> Any:
        found = original(*arguments)
        assert found.old is not None
        found.old[0] += 1e-5
        return found

    monkeypatch.setattr(training, "prepare", nudged)
    with Trainer(made, folder(tmp_path / "nudged")) as trainer, pytest.raises(MismatchError, match="ratio 1"):
        trainer.step()


def test_summary_and_rows(tmp_path: Path) -> None:
    made = config(rollouts=2, logging={"completions": 2})
    rows: list[Any] = []
    found = train(made, folder=folder(tmp_path), told=rows.append)
    assert found["steps"] == 2 and found["reused_batches"] == 2 and found["recomputed_batches"] == {}
    assert found["logprob_mismatch_max"] == 0 and found["unequal_tokens"] == 0 and found["checked_tokens"] > 0
    assert found["tokens"] == sum(row["tokens"] for row in rows)
    assert found["reward_first"] == rows[0]["reward"] and found["reward_last"] == rows[1]["reward"]
    assert set(found["phase_seconds"]) == {"rollout", "reward", "old", "update"}
    written = [json.loads(line) for line in (tmp_path / "logs" / "rollouts.jsonl").read_text().splitlines()]
    assert [row["rollout"] for row in written] == [0, 1] and len(written[0]["completions"]) == 2


def test_recomputed_batches_have_reasons(tmp_path: Path) -> None:
    found = train(config(reuse={"old": "recompute"}, rollouts=1), folder=folder(tmp_path))
    assert found["reused_batches"] == 0 and found["recomputed_batches"] == {"asked": 1}


def test_reuse_demanded_and_not_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(config(reuse={"mode": "require"}), folder(tmp_path)) as trainer:
        original = training.rollout

        def later(*arguments: Any) -> Any:
            batch = original(*arguments)
            trainer.updater.steps += 1  # the weights moved on after the rollout
            return batch

        monkeypatch.setattr(training, "rollout", later)
        with pytest.raises(ReuseError, match="another version"):
            trainer.step()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"group_size": 1}}, "rollout.group_size: must be at least 2"),
        ({"rollout": {"cache_tokens": 64}}, "rollout.cache_tokens: must be at least"),
        ({"reuse": {"mode": "require"}, "rollout": {"record": []}}, "reuse.mode: require needs"),
        ({"reuse": {"mode": "require", "old": "bypass"}}, "mode goes with old reuse alone"),
        ({"reuse": {"logprob": "processed"}, "sampling": {"top_k": 3}}, "reuse.logprob: must be whole"),
        ({"task": {"template": "chat"}}, "task.template: must be plain"),
        ({"model": {"path": "x"}}, "one of path, random and named"),
        ({"model": {"kernels": "fast"}}, "model.kernels"),
    ],
)
def test_wrong_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(document(**changes))


def test_wrong_folders(tmp_path: Path) -> None:
    place = folder(tmp_path)
    with pytest.raises(ValueError, match="no model at"):
        Trainer(config(model={"random": None, "path": "nowhere"}), place)
    with pytest.raises(ValueError, match="there is no file"):
        Trainer(config(task={"path": "nowhere.jsonl"}), place)
    with pytest.raises(ValueError, match="has 12 tokens, the limit is 8"):
        train(config(task={"max_prompt_tokens": 8, "shuffle": False}), folder=place)


def test_out_of_memory_leaves_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(rollouts=3)
    with Trainer(made, folder(tmp_path)) as trainer:
        original = trainer.updater.run

        def full(prepared: Any) -> Any:
            if trainer.done == 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
            return original(prepared)

        monkeypatch.setattr(trainer.updater, "run", full)
        with pytest.raises(MemoryError, match=r"rollout 2: lower update\.micro_batch_tokens"):
            trainer.run()
    with Trainer(made, tmp_path) as again:
        assert again.done == 2
