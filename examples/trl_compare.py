"""TRL's GRPO three ways on one task: as it is, with its importance-sampling correction, on unified operators.

    python examples/trl_compare.py --model MODEL --steps 50 --output compare.json
    python examples/trl_compare.py --model MODEL --device cuda --dtype bfloat16

`recompute` is TRL as it is: transformers' generate, and a forward without gradients for the old
log-probabilities. `corrected` adds TRL's correction, which TRL itself applies to vLLM's samples alone: here
to those of generate, whose log-probabilities a logits processor records. `kernelbraid` reuses the rollout's.
All arms draw at temperature 1, take several optimizer steps on each rollout and keep float32 masters of
16-bit weights. The first rollout of an arm, which compiles, is left out of its times.
"""

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

from kernelbraid.integrations.trl import GRPOTrainer, mismatch, summary, tokenized
from kernelbraid.rl.masters import keep_float_masters

TOPICS = ["rain", "bread", "the sea", "a clock", "winter", "horses", "glass", "old maps"]
WORDS = 8


class Reward:
    """1 for eight words, less for every word more or fewer; counts the tokens that were drawn."""

    __name__ = "eight_words"

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(
        self, completions: list[str], completion_ids: Sequence[Sequence[int]], **_: object
    ) -> list[float]:
        self.tokens.append(sum(map(len, completion_ids)))
        return [max(-1.0, 1 - abs(len(text.split()) - WORDS) / WORDS) for text in completions]


class Recorder(transformers.LogitsProcessor):
    """Log-probabilities of the tokens that generate draws at temperature 1."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.take(input_ids)
        self.last = torch.log_softmax(scores.float(), -1)
        return scores

    def take(self, ids: torch.Tensor) -> None:
        if self.last is not None:
            self.found.append(self.last.gather(1, ids[:, -1:]))


def sampled(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A `rollout_func` that is transformers' generate, as TRL calls it, with its log-probabilities."""
    tokens, device = tokenized(prompts, trainer), trainer.accelerator.device
    longest, pad = max(map(len, tokens)), trainer.processing_class.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(each)) + each for each in tokens], device=device)
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in tokens], device=device)
    recorder = Recorder()
    with torch.no_grad():
        drawn = trainer.model.generate(
            ids,
            attention_mask=mask,
            generation_config=trainer.generation_config,
            logits_processor=[recorder],
        )
    recorder.take(drawn)
    completions, logprobs = [], []
    for row, numbers in zip(drawn[:, longest:].tolist(), torch.cat(recorder.found, 1).tolist(), strict=True):
        ends = [i for i, token in enumerate(row) if token in trainer.eos_token_ids]
        length = ends[0] + 1 if ends else len(row)
        completions.append(row[:length])
        logprobs.append(numbers[:length])
    return {"prompt_ids": tokens, "completion_ids": completions, "logprobs": logprobs}


class Recomputing(trl.GRPOTrainer):
    """TRL as it is, with its mismatch measured."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.gaps: list[dict[str, float]] = []
        super().__init__(*given, rollout_func=sampled, **options)

    def create_optimizer(self, *given: Any, **options: Any) -> Any:
        made = super().create_optimizer(*given, **options)
        keep_float_masters(made)
        return made

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        old, drawn = inputs["old_per_token_logps"], inputs["sampling_per_token_logps"]
        self.gaps.append(mismatch(old, drawn, inputs["completion_mask"].bool()))
        return super().compute_loss(model, inputs, *given, **options)


class Corrected(Recomputing):
    """The same with TRL's correction, which it turns on where `use_vllm` is."""

    _last_loaded_step = -1  # as the constructor sets it where it starts vLLM

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.use_vllm, self.vllm_generation = True, NothingToSync()


class NothingToSync:
    """In the place of vLLM, which has weights of its own."""

    def sync_weights(self) -> None:
        pass


class Clock(transformers.TrainerCallback):
    """Seconds of each optimizer step, rollout included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **options: Any) -> None:
        self.began = now()

    def on_step_end(self, *_: Any, **options: Any) -> None:
        self.seconds.append(now() - self.began)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


ARMS: dict[str, Any] = {"recompute": Recomputing, "corrected": Corrected, "kernelbraid": GRPOTrainer}


def loaded(place: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, or of a GGUF file, whose weights are dequantised."""
    folder, name = (place.parent, place.name) if place.is_file() else (place, None)
    options: dict[str, Any] = {"local_files_only": True, **({"gguf_file": name} if name else {})}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left", **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    if name:
        weights, model.config.quantization_config = model.state_dict(), None
        del model.config.quantization_config
        model = transformers.AutoModelForCausalLM.from_config(model.config, dtype=dtype)
        model.load_state_dict(weights)
    return model, tokenizer


def run(arm: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train an arm; what it measured, as JSON can hold it."""
    model, tokenizer = loaded(given.model, getattr(torch, given.dtype))
    prompts = [f"Write one short sentence about {topic}." for topic in TOPICS]
    if tokenizer.chat_template is not None:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    args = trl.GRPOConfig(
        output_dir=str(given.output.with_suffix("")),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        num_generations=given.generations,
        steps_per_generation=given.steps_per_rollout,
        max_completion_length=given.tokens,
        learning_rate=given.learning_rate,
        lr_scheduler_type="constant",
        seed=given.seed,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=given.device == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    reward, clock = Reward(), Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = ARMS[arm](
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    history = trainer.state.log_history
    if isinstance(trainer, Recomputing):
        gaps = trainer.gaps
    else:
        gaps = [{name: value for name, value in each.items() if "sampling/" in name} for each in history]
    steps, rollouts = clock.seconds, given.steps_per_rollout
    warm, drawn = steps[rollouts:], reward.tokens[1:]
    return {
        "step_seconds": steps,
        "median_step_seconds": statistics.median(warm) if warm else None,
        "drawn_tokens": reward.tokens,
        "tokens_per_second": sum(drawn) / sum(warm) if warm else None,
        "mismatch": summary(gaps),
        "trl_logged": {
            name: [each[name] for each in history if name in each]
            for name in sorted({key for each in history for key in each})
            if name.startswith(("sampling/", "kernelbraid/"))
        },
        "reward": [each["reward"] for each in history if "reward" in each],
    }


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder or GGUF file that `unify` covers")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of an arm")
    parser.add_argument("--steps-per-rollout", type=int, default=2, help="at least 2: then TRL recomputes")
    parser.add_argument("--batch", type=int, default=16, help="completions of a step")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of a completion, at most")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--output", type=Path, default=Path("trl_compare.json"))
    given = parser.parse_args(arguments)
    if given.steps_per_rollout < 2:
        parser.error(
            "--steps-per-rollout must be at least 2: with one step TRL needs no old log-probabilities"
        )
    if (given.device == "cpu") != (given.dtype == "float32"):
        parser.error("unified operators compute in float32 on the CPU, in 16 bits on a GPU: set --dtype")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    where = torch.cuda.get_device_name(0) if given.device == "cuda" else platform.processor() or "cpu"
    document = {
        "settings": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()
        },
        "device": where,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        "arms": {arm: run(arm, given) for arm in given.arms},
    }
    new = given.output.with_name(f".{given.output.name}.new")
    new.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(new, given.output)
    for arm, found in document["arms"].items():
        gap, ratio = (
            found["mismatch"].get(f"sampling/{name}/max")
            for name in ("sampling_logp_difference", "importance_sampling_ratio")
        )
        rewards, seconds = found["reward"], found["median_step_seconds"]
        speed = "no step after the first rollout to time"
        if seconds is not None:
            speed = f"{seconds:.3f} s a step, {found['tokens_per_second']:.1f} tokens/s"
        print(
            f"{arm:12} {speed}, largest difference {gap:.3g}, "
            f"largest ratio {ratio:.9g}, reward {rewards[0]:.3f} -> {rewards[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
