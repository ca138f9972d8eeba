"""What TRL computes on small inputs: `python tests/rl/trl_values.py` writes trl_values.json.

GRPO: `GRPOTrainer._compute_loss` of the installed TRL (1.16.0 made the file), called on a stand-in for a
trainer that hands it log-probabilities instead of running a model; advantages by its `nanstd`. PPO: TRL 1.16
has none, so `compute_advantages` and `loss` of `PPOTrainer`, and what they call, are taken from an unpacked
wheel of TRL 0.11.4, whose folder is the first argument.
"""

import importlib.metadata
import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_suffix(".json")
LENGTHS = (5, 1, 0, 7, 3, 6)
WIDTH = 7
TRUNCATED = 3
"""The completion that was cut off."""

GRPO_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "dapo clip-higher": {"loss_type": "dapo", "epsilon_high": 0.28},
    "grpo with reference": {"loss_type": "grpo", "beta": 0.04},
    "dapo with entropy": {"loss_type": "dapo", "entropy_coef": 0.01},
    "grpo, truncated masked": {"loss_type": "grpo", "masked": True},
    "dapo, truncated masked": {"loss_type": "dapo", "masked": True},
    "dr_grpo, truncated masked": {"loss_type": "dr_grpo", "masked": True, "epsilon_high": 0.28, "beta": 0.1},
}


def inputs() -> dict[str, Tensor]:
    """Padded float32 numbers [N, WIDTH], advantages and rewards [N]."""
    draw = torch.Generator().manual_seed(20)
    shape = (len(LENGTHS), WIDTH)

    def normal(scale: float, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(shape, generator=draw)

    old = normal(0.8, -2.0)
    return {
        "logprobs": old + normal(0.25),
        "old_logprobs": old,
        "reference": old + normal(0.3),
        "entropy": normal(0.5, 2.0).abs(),
        "values": normal(0.5),
        "old_values": normal(0.5),
        "rewards": normal(0.3),
        "advantages": torch.randn(len(LENGTHS), generator=draw),
        "scores": torch.tensor([1.0, 0.0, 0.25, 0.5, 0.5, 0.5]),
    }


def mask(masked: bool = False) -> Tensor:
    found = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
    if masked:
        found[TRUNCATED] = False
    return found


def grpo_values(case: dict[str, Any]) -> tuple[float, Tensor]:
    """TRL's loss and its gradient in the log-probabilities, [N, WIDTH]."""
    from trl import GRPOTrainer

    given = inputs()
    leaf = given["logprobs"].clone().requires_grad_()
    counted = mask(case.get("masked", False)).int()
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **options: (leaf, given["entropy"], None),
        _entropy_bonus_enabled="entropy_coef" in case,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, **_: x,
            sync_gradients=True,
        ),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=case.get("beta", 0.0),
        current_gradient_accumulation_steps=1,
        entropy_coef=case.get("entropy_coef", 0.0),
        epsilon_low=0.2,
        epsilon_high=case.get("epsilon_high", 0.2),
        importance_sampling_level="token",
        loss_type=case["loss_type"],
        max_completion_length=WIDTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
    )  # fmt: skip
    ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": counted,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old_logprobs"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": counted.sum(),
    }
    loss = GRPOTrainer._compute_loss(stub, None, batch)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


def group_values(scale: str) -> Tensor:
    """Advantages of two groups of three, with TRL's deviation."""
    from trl.trainer.utils import nanstd

    scores = inputs()["scores"].view(2, 3)
    differences = scores - torch.nanmean(scores, dim=1, keepdim=True)
    if scale == "group":
        differences = differences / (nanstd(scores, dim=1, keepdim=True) + 1e-4)
    elif scale == "batch":
        differences = differences / (nanstd(scores) + 1e-4)
    return differences.flatten()


def ppo_values(folder: Path) -> dict[str, Any]:
    """Advantages, returns and losses of TRL 0.11.4, from its unpacked wheel."""
    import ast

    text = (folder / "trl" / "core.py").read_text()
    wanted = {"masked_mean", "masked_var", "masked_whiten", "clip_by_value", "entropy_from_logits",
              "flatten_dict"}  # fmt: skip
    space: dict[str, Any] = {"torch": torch, "warnings": __import__("warnings")}
    exec("from typing import *; from collections.abc import *; import numpy as np", space)
    trainer = ast.parse((folder / "trl" / "trainer" / "ppo_trainer.py").read_text())
    functions = [node for node in ast.parse(text).body if getattr(node, "name", "") in wanted]
    [kind] = [node for node in trainer.body if getattr(node, "name", "") == "PPOTrainer"]
    functions += [node for node in kind.body if getattr(node, "name", "") in {"compute_advantages", "loss"}]
    for node in functions:
        node.decorator_list = []
    exec(compile(ast.Module(functions, []), "trl 0.11.4", "exec"), space)
    config = SimpleNamespace(
        whiten_rewards=False, gamma=0.99, lam=0.9, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1,
        ratio_threshold=1e9,
    )  # fmt: skip
    stub, given, counted = SimpleNamespace(config=config), inputs(), mask().float()
    values, advantages, returns = space["compute_advantages"](
        stub, given["old_values"], given["rewards"], counted
    )
    leaves = [given[name].clone().requires_grad_() for name in ("logprobs", "values")]
    logits = torch.zeros(*counted.shape, 2)
    policy, value, _ = space["loss"](
        stub, given["old_logprobs"], values, logits, leaves[1], leaves[0], counted, advantages, returns
    )
    (policy + value).backward()
    return {
        "advantages": advantages.tolist(),
        "returns": returns.tolist(),
        "policy": policy.item(),
        "value": value.item(),
        "dlogprobs": leaves[0].grad.tolist(),  # type: ignore[union-attr]
        "dvalues": leaves[1].grad.tolist(),  # type: ignore[union-attr]
    }


def main() -> None:
    found: dict[str, Any] = {"trl": importlib.metadata.version("trl"), "trl of ppo": "0.11.4"}
    found["inputs"] = {name: each.tolist() for name, each in inputs().items()}
    found["groups"] = {scale: group_values(scale).tolist() for scale in ("group", "batch", "none")}
    found["grpo"] = {}
    for name, case in GRPO_CASES.items():
        loss, gradient = grpo_values(case)
        found["grpo"][name] = {"loss": loss, "dlogprobs": gradient.tolist()}
    found["ppo"] = ppo_values(Path(sys.argv[1]))
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
