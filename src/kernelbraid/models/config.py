"""What a decoder-only model is made of, read from a Hugging Face configuration or by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernelbraid.ops.rope.tables import Llama3Scaling


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in the place of the dense feed-forward."""

    count: int
    top_k: int
    intermediate: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and options of a decoder: Llama, Qwen2, Qwen3 and Qwen3-MoE are its instances."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    eps: float = 1e-6
    max_positions: int = 32768
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    experts: Experts | None = None

    @property
    def qkv_width(self) -> int:
        return (self.query_heads + 2 * self.kv_heads) * self.head_dim

    def small(self, *, layers: int = 2, vocab: int = 512) -> "ModelConfig":
        """The same options with few layers and a small vocabulary, for checks that must be quick."""
        return replace(self, layers=layers, vocab=vocab)


def from_hugging_face(config: Any) -> ModelConfig:
    """Read the configuration of a transformers model.

    Raises:
        ValueError: the model is of another family, or uses what unified operators do not cover; the message
            names it.
    """
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {family!r}")
    activation = config.hidden_act
    if activation != "silu":
        raise ValueError(f"hidden_act must be silu, got {activation!r}")
    if getattr(config, "use_sliding_window", False) and config.sliding_window is not None:
        raise ValueError("sliding-window attention is not covered: set use_sliding_window=False")
    if getattr(config, "mlp_bias", False):
        raise ValueError("mlp_bias is not covered")
    if family != "qwen2" and getattr(config, "attention_bias", False):
        raise ValueError("attention_bias is covered for qwen2 alone, whose output projection has none")
    heads = config.num_attention_heads
    rope = dict(config.rope_parameters)
    return ModelConfig(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_scaling(rope),
        eps=float(config.rms_norm_eps),
        max_positions=config.max_position_embeddings,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tied=config.tie_word_embeddings,
        experts=_experts(config) if family == "qwen3_moe" else None,
    )


FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def _scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type must be default or llama3, got {kind!r}")
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )


def _experts(config: Any) -> Experts:
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        raise ValueError("every layer must be sparse: decoder_sparse_step 1 and no mlp_only_layers")
    return Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob
    )


_LLAMA3 = Llama3Scaling(32.0, 1.0, 4.0, 8192)

NAMED: Mapping[str, ModelConfig] = {
    "SmolLM2-135M": ModelConfig(
        49152, 576, 1536, 30, 9, 3, 64, 100000.0, eps=1e-5, max_positions=8192, tied=True
    ),
    "Qwen3-0.6B": ModelConfig(
        151936, 1024, 3072, 28, 16, 8, 128, 1e6, max_positions=40960, qk_norm=True, tied=True
    ),
    "Qwen3-8B": ModelConfig(151936, 4096, 12288, 36, 32, 8, 128, 1e6, max_positions=40960, qk_norm=True),
    "Qwen2.5-1.5B": ModelConfig(
        151936, 1536, 8960, 28, 12, 2, 128, 1e6, max_positions=131072, qkv_bias=True, tied=True
    ),
    "Llama-3.2-1B": ModelConfig(
        128256, 2048, 8192, 16, 32, 8, 64, 500000.0, _LLAMA3, 1e-5, max_positions=131072, tied=True
    ),
    "Qwen3-MoE-small": ModelConfig(
        *(4096, 256, 512, 2, 8, 2, 64, 1e6),
        max_positions=4096,
        qk_norm=True,
        experts=Experts(count=16, top_k=4, intermediate=96, renormalize=True),
    ),
}
"""Models by name: sizes of the published ones, and a small mixture of experts."""

LARGER: Mapping[str, ModelConfig] = {
    "Qwen3-1.7B": ModelConfig(
        151936, 2048, 6144, 28, 16, 8, 128, 1e6, max_positions=40960, qk_norm=True, tied=True
    ),
    "Qwen3-4B": ModelConfig(
        151936, 2560, 9728, 36, 32, 8, 128, 1e6, max_positions=40960, qk_norm=True, tied=True
    ),
    "Qwen3-14B": ModelConfig(151936, 5120, 17408, 40, 40, 8, 128, 1e6, max_positions=40960, qk_norm=True),
    "Qwen3-32B": ModelConfig(151936, 5120, 25600, 64, 64, 8, 128, 1e6, max_positions=40960, qk_norm=True),
    "Qwen3-30B-A3B": ModelConfig(
        *(151936, 2048, 6144, 48, 32, 4, 128, 1e6),
        max_positions=40960,
        qk_norm=True,
        experts=Experts(count=128, top_k=8, intermediate=768, renormalize=True),
    ),
    "Qwen2.5-7B": ModelConfig(152064, 3584, 18944, 28, 28, 4, 128, 1e6, max_positions=131072, qkv_bias=True),
    "Llama-3.1-8B": ModelConfig(
        *(128256, 4096, 14336, 32, 32, 8, 128, 500000.0),
        *(Llama3Scaling(8.0, 1.0, 4.0, 8192), 1e-5),
        max_positions=131072,
    ),
}
"""More published models, which relations are not checked on: their layers are measured (`profile`)."""


def named(name: str) -> ModelConfig:
    """Return a model's configuration by name.

    Raises:
        ValueError: there is none of that name; the message lists those that exist.
    """
    known = {**NAMED, **LARGER}
    if name not in known:
        raise ValueError(f"unknown model {name!r}; models are {', '.join(known)}")
    return known[name]
