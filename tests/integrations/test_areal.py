"""AReaL's actor, loss and workflow on unified engines: `logp_abs_diff` is 0 until the weights move.

AReaL is not on the package index: docs/areal.md says how its sources come onto the path for these tests.
"""

import asyncio
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("areal", reason="AReaL is not installed: docs/areal.md says how")

from areal.api import InferenceEngine, ModelRequest, TrainEngine
from areal.api.cli_args import (
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
)
from areal.trainer.ppo.actor import PPOActor
from areal.utils import stats_tracker
from areal.workflow.rlvr import RLVRWorkflow
from tests.integrations import digits
from tests.models.unified import same

from kernelbraid.integrations import areal as integration
from kernelbraid.models.shared import packed_logprobs
from kernelbraid.rl.requests import EngineSettings
from kernelbraid.rl.spot_check import MismatchError

pytestmark = pytest.mark.filterwarnings("ignore")

GROUP = 4


def configured(**changes: Any) -> Any:
    """A configuration of AReaL's, as docs/areal.md has it."""
    actor = {
        "experiment_name": "test",
        "trial_name": "test",
        "path": "tiny",
        "backend": "fsdp:d1",
        "recompute_logprob": False,
        "use_decoupled_loss": False,
        "ppo_n_minibatches": 2,
        "kl_ctl": 0.0,
        "temperature": 0.9,
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=64),
        "optimizer": OptimizerConfig(),
        "adv_norm": NormConfig(mean_level="batch", std_level="batch"),
    }
    return PPOActorConfig(**{**actor, **changes})


def drawn(**changes: Any) -> Any:
    options = {"max_new_tokens": 10, "temperature": 0.9}
    return GenerationHyperparameters(**{**options, **changes})


def reward(prompt: str, completion: str, *_: Any, **__: Any) -> float:
    return completion.count("7") - 0.1 * len(completion)


def workflow(**changes: Any) -> Any:
    return RLVRWorkflow(
        reward_fn=reward,
        gconfig=drawn(**changes),
        tokenizer=digits.tokenizer(),
        get_input_ids_fn=lambda text, tokenizer, _: tokenizer(text)["input_ids"],
        data_extract_prompt_fn=lambda item: item["question"],
    )


def engines(**changes: Any) -> tuple[Any, Any]:
    model = digits.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        train = integration.TrainEngine(model, configured(**changes), optimizer)
    rollout = integration.InferenceEngine(model, EngineSettings(cache_tokens=2048))
    train.connect_engine(rollout, None)
    return train, rollout


ITEMS = [{"question": text} for text in ("1+", "23+4+", "9=", "5+5+5+")]


def step(train: Any, rollout: Any, actor: Any, version: int) -> dict[str, float]:
    """A step of AReaL's loop, as its trainer makes it."""
    batch = train.rollout_batch(ITEMS, workflow(), group_size=GROUP)
    stats_tracker.export_all()
    batch = actor.compute_advantages(batch)
    actor.ppo_update(batch)
    found: dict[str, float] = stats_tracker.export_all()
    train.update_weights(None)
    train.set_version(version)
    rollout.set_version(version)
    return found


@pytest.mark.slow
def test_two_steps_of_grpo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minibatches a step: the first one's differences are 0, the second is another policy's."""
    train, rollout = engines()
    actor = PPOActor(train.config, train)
    seen: list[float] = []
    stat = stats_tracker.stat

    def watch(*given: Any, **stats: Any) -> Any:
        if "logp_abs_diff" in stats:
            seen.append(float(stats["logp_abs_diff"].max()))
        return stat(*given, **stats)

    monkeypatch.setattr(stats_tracker, "stat", watch)
    for version in (1, 2):
        seen.clear()
        found = step(train, rollout, actor, version)
        minibatches = found["ppo_actor/update/num_micro_batches"]
        assert minibatches >= 1 and len(seen) > 2, "several micro-batches"
        assert seen[0] == 0.0 and max(seen) > 0, "AReaL's own statistic"
        first = seen.index(next(gap for gap in seen if gap > 0))
        assert first >= 1 and all(gap > 0 for gap in seen[first:]), "zero until the first optimizer step"
        assert found["ppo_actor/update/update_successful"] == 1.0
    assert train.checked_tokens > 0 and train.get_version() == rollout.get_version() == 2


@pytest.mark.slow
def test_recomputation_has_the_rollouts_bits() -> None:
    """AReaL's compute_logp, which `recompute_logprob` would call, gives what its workflow recorded."""
    train, _ = engines()
    actor = PPOActor(train.config, train)
    batch = train.rollout_batch(ITEMS, workflow(), group_size=GROUP)
    for item, found in zip(batch, actor.compute_logp(batch), strict=True):
        held = torch.roll(item["loss_mask"], -1, -1).bool()
        recorded = torch.roll(item["logprobs"], -1, -1)
        assert same(found[held], recorded[held])
        assert item["versions"][item["loss_mask"].bool()].unique().tolist() == [0]


@pytest.mark.slow
def test_a_changed_number_is_found() -> None:
    train, _ = engines()
    actor = PPOActor(train.config, train)
    batch = train.rollout_batch(ITEMS, workflow(), group_size=GROUP)
    first = int(batch[2]["loss_mask"][1].nonzero()[0])
    held = batch[2]["logprobs"]
    for item in batch:  # every row, so that it stands in the first minibatch wherever that is cut
        rows = item["loss_mask"].argmax(1)
        for row, place in enumerate(rows.tolist()):
            number = item["logprobs"][row, place]
            item["logprobs"][row, place] = torch.nextafter(number, torch.tensor(0.0))
    assert held[1, first] < 0
    with pytest.raises(MismatchError, match="logp_abs_diff must be 0 in the first minibatch"):
        actor.ppo_update(actor.compute_advantages(batch))


@pytest.mark.slow
def test_stale_tokens_are_refused() -> None:
    train, rollout = engines()
    actor = PPOActor(train.config, train)
    batch = train.rollout_batch(ITEMS, workflow(), group_size=GROUP)
    train.set_version(1)
    rollout.set_version(1)
    with pytest.raises(RuntimeError, match=r"drawn under versions \[0\] of the weights, which are at 1"):
        actor.ppo_update(actor.compute_advantages(batch))


@pytest.mark.slow
def test_gradients_are_those_of_the_loss() -> None:
    """Cut into micro-batches or not, and as autograd gives them from packed log-probabilities."""
    found = []
    for most in (32, 100000):
        train, _ = engines(mb_spec=MicroBatchSpec(max_tokens_per_mb=most))
        batch = train.rollout_batch(ITEMS, workflow(), group_size=1)
        whole = {
            name: torch.cat([pad(item[name]) for item in batch]) for name in ("input_ids", "attention_mask")
        }
        whole["loss_mask"] = whole["attention_mask"].int()

        def loss(scored: torch.Tensor, entropies: torch.Tensor, part: Any) -> torch.Tensor:
            return (scored + 0.1 * entropies).sum() / len(scored)

        train.optimizer_step = lambda: {}
        train.train_batch(whole, loss, lambda part: part["loss_mask"].sum())
        found.append([each.grad.clone() for each in train.model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def pad(tensor: torch.Tensor, to: int = 24) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, to - tensor.shape[1]))


@pytest.mark.slow
def test_what_is_drawn_does_not_depend_on_who_asks_beside() -> None:
    _, rollout = engines()
    request = ModelRequest(input_ids=[3, 12, 5], gconfig=drawn(seed=7, stop_token_ids=[1]))
    alone = asyncio.run(rollout.agenerate(request))

    async def together() -> Any:
        others = [ModelRequest(input_ids=[4 + i], gconfig=drawn()) for i in range(5)]
        return (await asyncio.gather(*map(rollout.agenerate, [*others, request])))[-1]

    found = asyncio.run(together())
    assert found.output_tokens == alone.output_tokens and found.output_logprobs == alone.output_logprobs
    ids = torch.tensor(alone.input_tokens + alone.output_tokens)
    wanted = packed_logprobs(
        rollout.model, ids[:-1], torch.tensor([0, len(ids) - 1], dtype=torch.int32), ids[1:], temperature=0.9
    )
    assert same(torch.tensor(alone.output_logprobs), wanted[2:].detach())


def test_interfaces_are_whole() -> None:
    assert not integration.TrainEngine.__abstractmethods__
    assert issubclass(integration.TrainEngine, TrainEngine)
    assert issubclass(integration.InferenceEngine, InferenceEngine)


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [
        ("actor", "recompute_logprob", True),
        ("actor", "use_decoupled_loss", True),
        ("rollout", "max_head_offpolicyness", 2),
        ("gconfig", "top_p", 0.9),
        ("gconfig", "top_k", 50),
        ("gconfig", "frequency_penalty", 0.5),
        ("gconfig", "greedy", True),
        ("gconfig", "temperature", 0.5),
    ],
)
def test_refused_configurations(section: str, option: str, value: object) -> None:
    config = GRPOConfig(
        experiment_name="test",
        trial_name="test",
        actor=configured(),
        rollout=InferenceEngineConfig(max_head_offpolicyness=0, backend="sglang:d1"),
        gconfig=drawn(),
    )
    integration.check(config)
    setattr(getattr(config, section), option, value)
    with pytest.raises(ValueError, match=f"{section}.{option} must be"):
        integration.check(config)


def test_refused_requests() -> None:
    for changes, message in (
        ({"top_p": 0.5}, "gconfig.top_p must be 1.0"),
        ({"top_k": 9}, "gconfig.top_k must be"),
        ({"n_samples": 2}, "n_samples=1"),
        ({"stop": ["x"]}, "no stop strings"),
        ({"max_tokens": 2}, "leaves no room"),
    ):
        with pytest.raises(ValueError, match=message):
            integration.sampling_of(ModelRequest(input_ids=[2, 3], gconfig=drawn(**changes)))
    train, rollout = engines()
    with pytest.raises(ValueError, match="over the same model"):
        train.connect_engine(object(), None)
    with pytest.raises(NotImplementedError, match="synchronous"):
        train.prepare_batch()
    with pytest.raises(ValueError, match="dynamic must be left out"):
        rollout.rollout_batch([], None, dynamic=True)


def test_without_areal() -> None:
    code = "import sys; sys.modules['areal'] = None; import kernelbraid.integrations.areal"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and "not on the package index" in done.stderr
