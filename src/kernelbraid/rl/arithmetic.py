"""The identity of everything between token ids and log-probabilities: what a snapshot's `bits_id` names."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

import torch

from kernelbraid import ops
from kernelbraid.contract import content_hash
from kernelbraid.models.config import ModelConfig
from kernelbraid.models.model import Decoder
from kernelbraid.models.operators import Operators
from kernelbraid.ops.dispatch import implementation
from kernelbraid.rl.records import Snapshot

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def architecture(device: torch.device) -> str:
    """As bits ids name it: `cpu`, or `sm_90` and the like."""
    if device.type == "cpu":
        return "cpu"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def bits_id(decoder: Decoder) -> str:
    """Identity of a decoder's arithmetic: equal ids and equal weights give equal log-probabilities.

    It covers the bits ids of the operators in use, installed winners included, in this decoder's sizes, and
    the options of its configuration. Operators that are not the unified ones add their name, which promises
    less: their bits may depend on shapes.
    """
    like = decoder.weights.norm
    where, dtype = architecture(like.device), DTYPES[like.dtype]
    ids = [] if decoder.operators.arithmetic == Operators.arithmetic else [decoder.operators.arithmetic]
    for name, axes in _operators(decoder.config):
        contract = ops.get(name, like.device.type).contract
        numerics: Mapping[str, int] = implementation(name, like.device).numerics(dict(axes))
        ids.append(contract.bits_id(numerics, dtype, axes, where))
    stated = asdict(replace(decoder.config, layers=1, max_positions=1))
    return content_hash([ids, decoder.config.layers, stated])[:16]


def snapshot_of(decoder: Decoder, *, version: int, run: str, weights: str | None = None) -> Snapshot:
    """The snapshot that a decoder's numbers come from.

    Args:
        decoder: the model as it is now.
        version: counts the optimizer's steps of the run.
        run: name of the process that counts the versions.
        weights: identity of the weights across processes, where there is one.
    """
    like = decoder.weights.norm
    return Snapshot(version, bits_id(decoder), DTYPES[like.dtype], architecture(like.device), run, weights)


def _operators(config: ModelConfig) -> Iterator[tuple[str, dict[str, int]]]:
    """Every operator between token ids and log-probabilities, with the constant axes of its calls."""
    width, heads = config.hidden, config.query_heads * config.head_dim
    sizes = {"query_heads": config.query_heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim}

    def linear(read: int, written: int, bias: bool = False) -> tuple[str, dict[str, int]]:
        return "linear", {"in_features": read, "out_features": written, "bias": int(bias)}

    yield "embedding", {"width": width}
    yield "rms_norm", {"width": width}
    yield "add_rms_norm", {"width": width}
    yield linear(width, config.qkv_width, config.qkv_bias)
    if config.qk_norm:
        yield "qk_norm", sizes
    yield "rope", sizes
    yield "attention", sizes
    yield linear(heads, width)
    if config.experts is None:
        yield linear(width, 2 * config.intermediate)
        yield "swiglu", {"width": config.intermediate}
        yield linear(config.intermediate, width)
    else:
        experts = config.experts
        yield linear(width, experts.count)
        choice = {"experts": experts.count, "top_k": experts.top_k}
        yield "moe_router", {**choice, "sigmoid": 0, "renormalize": int(experts.renormalize)}
        yield "moe_experts", {"width": width, "intermediate": experts.intermediate, **choice}
    yield "logprob", {"width": width, "vocabulary": config.vocab}
