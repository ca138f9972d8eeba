"""GRPO by AReaL's actor, loss and workflow, one process, on unified engines: learn to answer in eight words.

Run: python examples/areal_grpo.py --model FOLDER [--device cuda --dtype bfloat16]; docs/areal.md says what it
needs.
"""

import argparse
from typing import Any

import torch
import transformers
from areal.api.cli_args import (
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
)
from areal.trainer.ppo.actor import PPOActor
from areal.utils import stats_tracker
from areal.workflow.rlvr import RLVRWorkflow

from kernelbraid.integrations.areal import InferenceEngine, TrainEngine, check
from kernelbraid.rl.requests import EngineSettings

TOPICS = ["rain", "bread", "the sea", "a clock", "winter", "horses", "glass", "old maps"]


def reward(prompt: str, completion: str, *_: Any, **__: Any) -> float:
    """1 for eight words, less for every word more or fewer, down to -1; AReaL calls it in other processes."""
    return max(-1.0, 1 - abs(len(completion.split()) - 8) / 8)


def settings(model: str, tokens: int) -> Any:
    """AReaL's configuration under which the rollout's log-probabilities are the old ones."""
    names = {"experiment_name": "eight-words", "trial_name": "1"}
    return GRPOConfig(
        **names,
        actor=PPOActorConfig(
            **names,
            path=model,
            backend="fsdp:d1",
            recompute_logprob=False,
            use_decoupled_loss=False,
            ppo_n_minibatches=2,
            kl_ctl=0.0,
            optimizer=OptimizerConfig(),
            reward_norm=NormConfig(mean_level="group", std_level="group", group_size=8),
        ),
        rollout=InferenceEngineConfig(**names, max_head_offpolicyness=0, backend="sglang:d1"),
        gconfig=GenerationHyperparameters(max_new_tokens=tokens, temperature=1.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a folder with a model that `unify` covers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="bfloat16 on a GPU")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=48, help="of a completion, at most")
    given = parser.parse_args()
    config = settings(given.model, given.tokens)
    check(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype))
    model.to(given.device)
    train = TrainEngine(model, config.actor, torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0))
    rollout = InferenceEngine(model, EngineSettings(cache_tokens=65536))
    train.connect_engine(rollout, None)
    actor = PPOActor(config.actor, train)
    workflow = RLVRWorkflow(
        reward_fn=reward,
        gconfig=config.gconfig,
        tokenizer=tokenizer,
        get_input_ids_fn=lambda text, tokenizer, _: tokenizer(text)["input_ids"],
        data_extract_prompt_fn=lambda item: item["question"],
    )
    items = [{"question": f"One short sentence about {topic}:"} for topic in TOPICS[:2]]
    for step in range(given.steps):
        batch = train.rollout_batch(items, workflow, group_size=8)
        rewards = torch.cat([item["rewards"] for item in batch])
        actor.ppo_update(actor.compute_advantages(batch))
        stats_tracker.export_all()
        train.update_weights(None)
        train.set_version(step + 1)
        rollout.set_version(step + 1)
        print(f"step {step}: reward {rewards.mean():.3f}, {train.checked_tokens} tokens with equal bits")


if __name__ == "__main__":
    main()
