"""What a rollout asks for, and the identity of the arithmetic that answers."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelbraid.rl.policy import Policy

DIGITS = 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """A completion to draw."""

    prompt: Tensor
    """int32 [P]."""
    prompt_index: int
    sample_index: int


def bits_of(policy: Policy) -> str:
    """Identity of the arithmetic between token ids and log-probabilities: operators and model sizes.

    It is what a rollout claims; whether the claim is true is what the spot check tests.
    """
    from kernelbraid import ops

    backend = "cpu" if policy.device.type == "cpu" else "cuda"
    whole = hashlib.sha256(f"{policy.kernels.value} {policy.decoder.config}".encode())
    for operator in ops.OPERATORS:
        if operator.backend == backend:
            whole.update(f" {operator.name} {operator.contract.hash}".encode())
    return whole.hexdigest()[:DIGITS]


def architecture(device: torch.device) -> str:
    """As bits ids name it: `cpu`, `sm_90`."""
    if device.type == "cpu":
        return "cpu"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
