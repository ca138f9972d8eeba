"""transformers' models on unified attention, whose attention writes down what it was given and gave."""

import warnings
from typing import Any

import torch
from tests.models.test_load import CONFIGS, SIZES
from tests.models.unified import bits, padded, sequences
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from kernelbraid import attention
from kernelbraid.integrations.transformers import attend, prepare, register

NAMES = ("llama", "qwen2", "qwen3", "qwen3_moe")
RECORDED = "kernelbraid-recorded"
calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
"""Of layer 0: query, key, value as [B, heads, tokens, D], and out as [B, S, Hq, D]."""


def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, **options: Any) -> Any:
    out, weights = attend(module, query, key, value, mask, **options)
    if module.layer_idx == 0:
        calls.append((query.detach(), key.detach(), value.detach(), out.detach()))
    return out, weights


def quietly_register() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        register()
    AttentionInterface.register(RECORDED, record)
    AttentionMaskInterface.register(RECORDED, prepare)


def made(name: str, implementation: str = RECORDED, **changes: object) -> Any:
    """A tiny model of a family; the same weights whatever its attention."""
    import transformers

    quietly_register()
    kind, options = CONFIGS[name]
    config = getattr(transformers, kind)(**{**SIZES, **options, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=implementation
    ).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    calls.clear()
    return model


def rows(x: Tensor, places: Tensor) -> Tensor:
    """[B, heads, K, D] at [B, K] places, as packed rows [T, heads, D]."""
    return x.transpose(1, 2)[places.bool()]


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """The public operator over packed rows."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return attention(q, k, v, cu_seqlens=offsets, max_seqlen=max(lengths))


__all__ = ["NAMES", "bits", "calls", "made", "packed_attention", "padded", "rows", "sequences"]
