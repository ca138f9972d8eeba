"""GRPO of TRL with a unified policy: ratios exactly 1 before the first step, and no second forward."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", reason="trl is not installed: `make test-slow` installs it")

from tests.integrations import digits  # noqa: E402
from tests.models.unified import same  # noqa: E402

from kernelbraid.integrations import trl as integration  # noqa: E402
from kernelbraid.models.padded import padded_logprobs  # noqa: E402
from kernelbraid.rl.reuse import Mode  # noqa: E402
from kernelbraid.rl.spot_check import MismatchError, SpotCheck  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

EXACT = {
    "sampling/sampling_logp_difference/mean": 0.0,
    "sampling/sampling_logp_difference/max": 0.0,
    "sampling/importance_sampling_ratio/min": 1.0,
    "sampling/importance_sampling_ratio/mean": 1.0,
    "sampling/importance_sampling_ratio/max": 1.0,
}
MISALIGNED = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
"""Four optimizer steps on one rollout: TRL asks for the old log-probabilities."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Forwards of log-probabilities: whether each has gradients, and its rows."""
    seen: list[tuple[bool, int]] = []

    def counted(model: Any, ids: torch.Tensor, *given: Any, **options: Any) -> Any:
        seen.append((torch.is_grad_enabled(), len(ids)))
        return padded_logprobs(model, ids, *given, **options)

    monkeypatch.setattr(integration, "padded_logprobs", counted)
    return seen


def settings(folder: Path, **changes: Any) -> Any:
    options = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return trl.GRPOConfig(**{**options, **changes})


def trainer(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return integration.GRPOTrainer(
            model=options.pop("model", None) or digits.model(),
            reward_funcs=options.pop("reward", digits.reward),
            args=settings(folder, **(changes or {})),
            train_dataset=digits.dataset(),
            processing_class=digits.tokenizer(),
            **options,
        )


def logged(made: Any, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


@pytest.mark.slow
def test_ratios_are_one_and_no_second_forward(tmp_path: Path, calls: list[tuple[bool, int]]) -> None:
    made = trainer(tmp_path, check=SpotCheck(completions=2))
    made.train()
    for name, value in EXACT.items():
        assert logged(made, name) == [value] * 3, name
    assert [rows for grad, rows in calls if not grad] == [2, 2, 2], "spot checks alone have no gradients"
    assert sum(grad for grad, _ in calls) == 3
    assert logged(made, "kernelbraid/reused_rollouts") == [1, 2, 3]
    assert len(set(logged(made, "entropy"))) == 3, "the weights move"


@pytest.mark.slow
def test_what_trl_would_recompute_is_answered(
    tmp_path: Path, calls: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several steps on a rollout, two micro-batches each: the answer has a recomputation's bits."""
    answer, compared = integration.Record.answer, []

    def both(record: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        found = answer(record, ids, mask, labels)
        again, _ = padded_logprobs(made.model, ids, mask, labels, temperature=0.7, look=False)
        compared.append(same(found, again))
        return found

    monkeypatch.setattr(integration.Record, "answer", both)
    made = trainer(
        tmp_path,
        {**MISALIGNED, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "temperature": 0.7},
        check=SpotCheck(completions=0),
    )
    made.train()
    assert compared == [True] * 4
    assert not [rows for grad, rows in calls if not grad]
    assert logged(made, "kernelbraid/forwards_answered") == [4]
    for name, value in EXACT.items():
        assert logged(made, name) == [value], "only the first of the steps is before an optimizer step"
    assert any(logged(made, "clip_ratio/region_mean")[1:]), "later steps are other policies"


@pytest.mark.slow
def test_a_rollout_amid_accumulation(tmp_path: Path) -> None:
    """Rollouts that begin within an optimizer step and end in the next keep their weights' numbers."""
    changes = {
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 3,
        "mask_truncated_completions": True,
    }
    made = trainer(tmp_path, changes)
    made.train()
    assert logged(made, "kernelbraid/reused_rollouts") == [2, 3, 5]
    assert set(logged(made, "sampling/sampling_logp_difference/max")) == {0.0}
    assert all(map(torch.isfinite, map(torch.tensor, logged(made, "loss"))))


@pytest.mark.slow
def test_the_reference_is_unified_too(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    digits.model().save_pretrained(folder)
    digits.tokenizer().save_pretrained(folder)
    made = trainer(tmp_path, {"beta": 0.1}, model=str(folder))
    made.train()
    found = logged(made, "kl")
    assert found[0] == 0.0 and min(found[1:]) > 0


@pytest.mark.slow
def test_losses_and_gradients_are_trls(tmp_path: Path) -> None:
    """On the same rows TRL's own kernels give nearly the same: the objective is TRL's."""
    ours = trainer(tmp_path, {"max_steps": 1, "loss_type": "grpo", "entropy_coef": 0.05})
    kept: dict[str, Any] = {}
    compute = integration.trl.GRPOTrainer.compute_loss

    def keep(self: Any, model: Any, inputs: Any, *given: Any) -> Any:
        kept.update(inputs)
        return compute(self, model, inputs, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration.trl.GRPOTrainer, "compute_loss", keep)
        ours.train()
    models = digits.model(), digits.model()
    stock = trl.GRPOTrainer(
        model=models[0],
        reward_funcs=digits.reward,
        args=settings(tmp_path, loss_type="grpo", entropy_coef=0.05, bf16=False),
        train_dataset=digits.dataset(),
        processing_class=digits.tokenizer(),
    )
    again = trainer(tmp_path, {"loss_type": "grpo", "entropy_coef": 0.05}, model=models[1])
    kept["advantages"] = torch.linspace(-1, 1, len(kept["advantages"]))
    losses = []
    for each in (stock, again):
        each.model.train()
        each.current_gradient_accumulation_steps = 1
        loss = trl.GRPOTrainer.compute_loss(each, each.model, dict(kept))
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)
    for (name, one), (_, other) in zip(*(each.named_parameters() for each in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_changed_record_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: one number that is one unit off, first past the spot check, then before it."""
    made = trainer(tmp_path, check=SpotCheck(completions=0))
    draw = integration.Rollout.__call__

    def off(self: Any, prompts: Any, asking: Any) -> Any:
        found = draw(self, prompts, asking)
        number = torch.tensor(found["logprobs"][3][0])
        found["logprobs"][3][0] = float(torch.nextafter(number, torch.tensor(0.0)))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(integration.Rollout, "__call__", off)
        with pytest.raises(MismatchError, match=r"1 of .* differ in bits from sampling_per_token_logps"):
            made.train()

    made = trainer(tmp_path, check=SpotCheck(completions=8))
    generate = integration.Engine.generate

    def wrong(self: Any, *given: Any, **options: Any) -> Any:
        batch = generate(self, *given, **options)
        batch.completions[5].logprobs[0] -= 1e-6
        return batch

    monkeypatch.setattr(integration.Engine, "generate", wrong)
    with pytest.raises(MismatchError, match="A recomputed sample had other bits"):
        made.train()


@pytest.mark.slow
def test_weights_that_moved_are_seen(tmp_path: Path, calls: list[tuple[bool, int]]) -> None:
    """Weights written by a reward function: TRL's recomputation runs, and the loss is refused."""

    def reward(completions: list[str], **options: Any) -> list[float]:
        with torch.no_grad():
            made.model.model.norm.weight.mul_(1.5)
        return digits.reward(completions, **options)

    made = trainer(tmp_path, MISALIGNED, reward=reward)
    with pytest.raises(RuntimeError, match="written between a rollout and its first loss"):
        made.train()

    made = trainer(tmp_path, MISALIGNED, check=SpotCheck(completions=0))
    made.model.train()
    rows = [{"prompt": "1+"}] * 4
    found = made.rollout([row["prompt"] for row in rows], made)
    ids = torch.tensor([found["prompt_ids"][0] + found["completion_ids"][0]])
    labels = ids.clone()
    labels[:, : len(found["prompt_ids"][0])] = -100
    calls.clear()
    with torch.no_grad():
        made.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
        assert not calls and made.rollout.answered == 1
        made.model.lm_head.weight.mul_(1.01)
        made.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    assert calls == [(False, 1)] and made.rollout.answered == 1


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    """Qwen3-MoE: its routers' auxiliary loss is refused; without it everything is as elsewhere."""
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    with pytest.raises(ValueError, match=r"router_aux_loss_coef must be 0\.0"):
        trainer(tmp_path, model=digits.model("Qwen3Moe", **sizes))
    made = trainer(
        tmp_path, {"router_aux_loss_coef": 0.0, "max_steps": 2}, model=digits.model("Qwen3Moe", **sizes)
    )
    made.train()
    assert logged(made, "sampling/sampling_logp_difference/max") == [0.0, 0.0]


@pytest.mark.slow
def test_a_resumed_run_draws_anew(tmp_path: Path) -> None:
    """From a checkpoint amid a rollout: the rest of it is drawn again, with the checkpoint's weights."""
    changes = {**MISALIGNED, "save_strategy": "steps", "save_steps": 1}
    made = trainer(tmp_path, changes)
    made.train()
    again = trainer(tmp_path, changes)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.rollout.old.counters.reused_batches == 1
    assert logged(again, "sampling/sampling_logp_difference/max")[-1] == 0.0
    assert again.state.global_step == 4


@pytest.mark.slow
def test_never_reuse(tmp_path: Path, calls: list[tuple[bool, int]]) -> None:
    made = trainer(tmp_path, {"max_steps": 1}, reuse=Mode.NEVER)
    made.train()
    assert logged(made, "kernelbraid/recomputed_rollouts") == [1]
    assert [rows for grad, rows in calls if not grad] == [8]
    assert logged(made, "sampling/sampling_logp_difference/max") == [0.0], "recomputed bits are the same"


@pytest.mark.slow
def test_evaluation_and_conversations(tmp_path: Path) -> None:
    """Chats by the tokenizer's template; evaluation draws and scores without the record."""
    tokenizer = digits.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    rows = digits.dataset(8).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})

    def reward(completions: Any, **_: Any) -> list[float]:
        return digits.reward([each[0]["content"] for each in completions])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = integration.GRPOTrainer(
            model=digits.model(),
            reward_funcs=reward,
            args=settings(tmp_path, max_steps=1, per_device_eval_batch_size=8),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=tokenizer,
        )
    made.train()
    assert logged(made, "sampling/importance_sampling_ratio/max") == [1.0]
    found = made.evaluate()
    assert found["eval_reward"] == found["eval_reward"] and "eval_entropy" in found


REFUSALS = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"suppress_tokens": [3]},
    "use_vllm": True,
    "use_transformers_continuous_batching": True,
    "cast_lm_head_to_fp32": True,
    "use_liger_kernel": True,
    "torch_compile": True,
    "fp16": True,
    "deepspeed": "zero3.json",
    "world_size": 2,
    "fsdp": "full_shard",
    "cache_implementation": "static",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, tmp_path: Path) -> None:
    args = settings(tmp_path)
    held = {each: getattr(args, each) for each, _, _ in integration.REFUSED}
    plain = SimpleNamespace(**held, fsdp=args.fsdp, temperature=1.0)
    integration.refuse(plain)
    setattr(plain, name, REFUSALS[name])
    with pytest.raises(ValueError, match=f"{name} must be"):
        integration.refuse(plain)


def test_refused_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tools must be left out"):
        trainer(tmp_path, tools=[print])
    with pytest.raises(ValueError, match="rollout_func must be left out"):
        trainer(tmp_path, rollout_func=print)
    with pytest.raises(ValueError, match="greedy has no log-probabilities"):
        trainer(tmp_path, {"temperature": 0.0})
    made = trainer(tmp_path)
    with pytest.raises(ValueError, match=r"model\.forward was replaced"):
        trainer(tmp_path, model=made.model)
    with pytest.raises(ValueError, match="model_type must be one of"):
        trainer(tmp_path, model=digits.model("Mistral", sliding_window=None))


def test_without_the_extra(tmp_path: Path) -> None:
    (tmp_path / "trl.py").write_text("raise ImportError('gone')\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import kernelbraid.integrations.trl"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode != 0 and "pip install 'kernelbraid[trl]'" in done.stderr
