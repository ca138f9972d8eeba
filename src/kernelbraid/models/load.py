"""Weights of a decoder: from a transformers model, from a file of one, or drawn at random.

Projections that read the same rows become one matrix (qkv, gate_up); nothing is rounded on the way but to the
dtype that is asked for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelbraid.models.config import ModelConfig, from_hugging_face
from kernelbraid.models.layer import LayerWeights
from kernelbraid.models.model import Decoder, ModelWeights


def load(
    path: str | Path, *, dtype: torch.dtype, device: str = "cpu", positions: int | None = None
) -> Decoder:
    """Load a model that transformers can read: a folder with safetensors, or a GGUF file.

    Args:
        path: the folder or the file; nothing is fetched from a network.
        dtype: of all parameters.
        device: where they are kept.
        positions: that the rotary tables cover; the model's own limit by default.

    Raises:
        ValueError: no such file, or a model that unified operators do not cover.
        ModuleNotFoundError: transformers, or gguf for such a file, is not installed (extra `models`).
    """
    from transformers import AutoModelForCausalLM

    place = Path(path)
    if not place.exists():
        raise ValueError(f"no model at {place}")
    where: dict[str, Any] = {"local_files_only": True, "dtype": torch.float32 if place.is_file() else dtype}
    if place.is_file():
        where["gguf_file"] = place.name
    model = AutoModelForCausalLM.from_pretrained(place.parent if place.is_file() else place, **where)
    config = from_hugging_face(model.config)
    weights = from_state(config, model.state_dict(), dtype=dtype, device=device)
    return Decoder(config, weights, positions or config.max_positions)


def from_state(
    config: ModelConfig, state: Mapping[str, Tensor], *, dtype: torch.dtype, device: str = "cpu"
) -> ModelWeights:
    """Arrange a transformers state dict.

    Raises:
        ValueError: a parameter is missing, or one is left over.
    """
    left = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}

    def take(*names: str) -> Tensor:
        missing = [name for name in names if name not in left]
        if missing:
            raise ValueError(f"the state dict has no {missing[0]}")
        parts = [left.pop(name).to(device, dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def one(i: int) -> LayerWeights:
        own = f"model.layers.{i}."
        heads = [f"{own}self_attn.{name}_proj" for name in "qkv"]
        weights: dict[str, Tensor] = {
            "input_norm": take(f"{own}input_layernorm.weight"),
            "qkv": take(*(f"{name}.weight" for name in heads)),
            "o": take(f"{own}self_attn.o_proj.weight"),
            "post_norm": take(f"{own}post_attention_layernorm.weight"),
        }
        if config.qkv_bias:
            weights["qkv_bias"] = take(*(f"{name}.bias" for name in heads))
        if config.qk_norm:
            weights |= {name: take(f"{own}self_attn.{name}.weight") for name in ("q_norm", "k_norm")}
        if config.experts is None:
            weights["gate_up"] = take(*(f"{own}mlp.{name}_proj.weight" for name in ("gate", "up")))
            weights["down"] = take(f"{own}mlp.down_proj.weight")
        else:
            weights["router"] = take(f"{own}mlp.gate.weight")
            weights["experts_gate_up"] = take(f"{own}mlp.experts.gate_up_proj")
            weights["experts_down"] = take(f"{own}mlp.experts.down_proj")
        return LayerWeights(**weights)

    table = take("model.embed_tokens.weight")
    layers = tuple(one(i) for i in range(config.layers))
    norm = take("model.norm.weight")
    head = table if config.tied else take("lm_head.weight")
    if config.tied:
        left.pop("lm_head.weight", None)
    if left:
        raise ValueError(f"the state dict has parameters of no known place: {', '.join(sorted(left)[:4])}")
    return ModelWeights(table, layers, norm, head)


def to_state(config: ModelConfig, weights: ModelWeights) -> dict[str, Tensor]:
    """The transformers state dict of parameters: what `from_state` reads, as views of them."""
    widths = [count * config.head_dim for count in (config.query_heads, config.kv_heads, config.kv_heads)]
    state = {"model.embed_tokens.weight": weights.embedding}
    for i, each in enumerate(weights.layers):
        own = f"model.layers.{i}."
        found = {
            "input_layernorm.weight": each.input_norm,
            "self_attn.o_proj.weight": each.o,
            "post_attention_layernorm.weight": each.post_norm,
            "self_attn.q_norm.weight": each.q_norm,
            "self_attn.k_norm.weight": each.k_norm,
            "mlp.down_proj.weight": each.down,
            "mlp.gate.weight": each.router,
            "mlp.experts.gate_up_proj": each.experts_gate_up,
            "mlp.experts.down_proj": each.experts_down,
        }
        for kind, joined in (("weight", each.qkv), ("bias", each.qkv_bias)):
            if joined is not None:
                parts = torch.split(joined, widths)
                found |= {f"self_attn.{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)}
        if each.gate_up is not None:
            gate, up = each.gate_up.chunk(2)
            found |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
        state |= {f"{own}{name}": tensor for name, tensor in found.items() if tensor is not None}
    state["model.norm.weight"] = weights.norm
    state["lm_head.weight"] = weights.head
    return {name: tensor.detach() for name, tensor in state.items()}


def drawn(config: ModelConfig, *, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> ModelWeights:
    """Random weights of plausible size: normal by 0.02, output projections smaller, norms near 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 0.02) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    def near_one(width: int) -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=generator, device=device)).to(dtype)

    out = 0.02 / (2 * config.layers) ** 0.5
    width = config.query_heads * config.head_dim

    def one() -> LayerWeights:
        weights: dict[str, Tensor] = {
            "input_norm": near_one(config.hidden),
            "qkv": normal(config.qkv_width, config.hidden),
            "o": normal(config.hidden, width, scale=out),
            "post_norm": near_one(config.hidden),
        }
        if config.qkv_bias:
            weights["qkv_bias"] = normal(config.qkv_width, scale=0.5)
        if config.qk_norm:
            weights |= {name: near_one(config.head_dim) for name in ("q_norm", "k_norm")}
        if config.experts is None:
            weights["gate_up"] = normal(2 * config.intermediate, config.hidden)
            weights["down"] = normal(config.hidden, config.intermediate, scale=out)
        else:
            count, inner = config.experts.count, config.experts.intermediate
            weights["router"] = normal(count, config.hidden)
            weights["experts_gate_up"] = normal(count, 2 * inner, config.hidden)
            weights["experts_down"] = normal(count, config.hidden, inner, scale=out)
        return LayerWeights(**weights)

    table = normal(config.vocab, config.hidden)
    layers = tuple(one() for _ in range(config.layers))
    head = table if config.tied else normal(config.vocab, config.hidden)
    return ModelWeights(table, layers, near_one(config.hidden), head)
