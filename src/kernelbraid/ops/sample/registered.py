"""Sampling as a registered operator of torch: implementation and fake kernel. It has no gradients.

    kernelbraid::sample               tokens [T] of logits [T, vocabulary]

Outside of a trace the public function goes round the operator, whose boundary costs more than a small call:
the same function runs, the same bits come out.
"""

from functools import partial

import torch
from torch import Tensor

from kernelbraid.ops import dispatch
from kernelbraid.ops.arguments import check_axis, check_shape, check_tensor, contract_of, dtypes_of

_call = partial(dispatch.call, "sample")


def choose(
    logits: Tensor,
    inverse_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    samples: Tensor,
    positions: Tensor,
) -> Tensor:
    """Choose tokens; see `api.sample`."""
    contract = contract_of("sample", "logits", logits)
    check_tensor("logits", logits, dtypes_of(contract), 2, logits.device)
    check_axis(contract, "tokens", "logits", logits.shape[0])
    check_axis(contract, "vocabulary", "logits", logits.shape[1])
    numbers = {"inverse_temperature": inverse_temperature, "top_p": top_p, "min_p": min_p}
    integers = {"top_k": top_k, "samples": samples, "positions": positions}
    kinds = ((numbers, torch.float32), (integers, torch.int32), ({"seeds": seeds}, torch.int64))
    for tensors, dtype in kinds:
        for name, tensor in tensors.items():
            check_tensor(name, tensor, (dtype,), 1, logits.device)
            check_shape(name, tensor, (logits.shape[0],), "logits")
    tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    if len(tokens):
        given = (inverse_temperature, top_k, top_p, min_p, seeds, samples, positions)
        _call("sample", logits.device, logits, *(each.contiguous() for each in given), tokens)
    return tokens


@torch.library.custom_op("kernelbraid::sample", mutates_args=())
def sample(
    logits: Tensor,
    inverse_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    samples: Tensor,
    positions: Tensor,
) -> Tensor:
    return choose(logits, inverse_temperature, top_k, top_p, min_p, seeds, samples, positions)


@sample.register_fake
def _(
    logits: Tensor,
    inverse_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    samples: Tensor,
    positions: Tensor,
) -> Tensor:
    return torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
