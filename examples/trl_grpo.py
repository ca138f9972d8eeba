"""GRPO by TRL on unified operators: `trl_stock.py` with three lines changed.

Run: python examples/trl_grpo.py --model MODEL     # needs kernelbraid[trl]
"""

import argparse

from datasets import Dataset
from trl import GRPOConfig

from kernelbraid.integrations.trl import GRPOTrainer

TOPICS = ["rain", "bread", "the sea", "a clock", "winter", "horses", "glass", "old maps"]
WORDS = 8


def reward(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """1 for eight words, less for every word more or fewer, down to -1."""
    counts = [len(each[0]["content"].split()) for each in completions]
    return [max(-1.0, 1 - abs(count - WORDS) / WORDS) for count in counts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a folder or a name on the Hub")
    parser.add_argument("--dtype", default="float32", help="bfloat16 on a GPU")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    chats = [[{"role": "user", "content": f"Write one short sentence about {topic}."}] for topic in TOPICS]
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir="trl-output",
            model_init_kwargs={"dtype": given.dtype},
            max_steps=given.steps,
            per_device_train_batch_size=16,
            num_generations=8,
            steps_per_generation=2,  # two optimizer steps on a rollout: TRL needs old log-probabilities
            max_completion_length=48,
            learning_rate=1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": chats}),
    )
    trainer.train()
    print([entry["reward"] for entry in trainer.state.log_history if "reward" in entry])


if __name__ == "__main__":
    main()
