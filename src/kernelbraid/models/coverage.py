"""Which modules of a transformers model unified operators replace, and which models they refuse, and why."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kernelbraid import ops
from kernelbraid.models import forwards
from kernelbraid.models.config import FAMILIES, ModelConfig, from_hugging_face
from kernelbraid.ops.rope.tables import rope_tables

TESTED_TRANSFORMERS = ("5.0.0", "5.17.0", "5.24.0")
"""Versions whose layers' own code, between the modules that are replaced, was tested."""

PREFIXES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}


@dataclass(frozen=True, slots=True)
class Place:
    """A module that a family has, and what computes it; None: transformers' own code, which passes on."""

    kind: type[nn.Module]
    forward: Callable[..., Any] | None
    attention: bool = False
    """Part of the attention, which is unified as a whole: every layer, the tables, the layout."""


def family_of(model: nn.Module) -> str:
    """The family of a causal language model of transformers.

    Raises:
        ValueError: it is none of those that are covered.
    """
    kind = type(model)
    if kind.__module__.split(".")[0] == "peft" or hasattr(model, "peft_config"):
        raise ValueError(
            f"{kind.__name__} has PEFT adapters (LoRA), which are not covered: merge them first "
            "(merge_and_unload)"
        )
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {family!r}")
    wanted = _class(family, "ForCausalLM")
    if not isinstance(model, wanted):
        raise ValueError(f"model must be a {wanted.__name__}, got {kind.__name__}: pass the model inside")
    return str(family)


def _class(family: str, name: str) -> type[nn.Module]:
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    found: type[nn.Module] = getattr(module, PREFIXES[family] + name)
    return found


def places(family: str, config: ModelConfig) -> dict[str, Place]:
    """Every module of a model of a family, by name."""

    def own(name: str, forward: Callable[..., Any] | None, *, attention: bool = False) -> Place:
        return Place(_class(family, name), forward, attention)

    linear = Place(nn.Linear, forwards.project)
    projection = Place(nn.Linear, forwards.project, attention=True)
    norm = own("RMSNorm", forwards.norm)
    activation = Place(type(_silu()), None)
    passing = Place(nn.ModuleList, None)
    layer = {
        "": own("DecoderLayer", None),
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "self_attn": own("Attention", forwards.attend, attention=True),
        **{f"self_attn.{name}_proj": projection for name in "qkvo"},
    }
    if config.qk_norm:
        heads = own("RMSNorm", forwards.norm, attention=True)
        layer |= {f"self_attn.{name}_norm": heads for name in "qk"}
    if config.experts is None:
        layer |= {"mlp": own("MLP", forwards.feed_forward), "mlp.act_fn": activation}
        layer |= {f"mlp.{name}_proj": linear for name in ("gate", "up", "down")}
    else:
        layer |= {
            "mlp": own("SparseMoeBlock", None),
            "mlp.gate": own("TopKRouter", forwards.route),
            "mlp.experts": own("Experts", forwards.mix),
            "mlp.experts.act_fn": activation,
        }
    found = {
        "": own("ForCausalLM", None),
        "model": own("Model", forwards.backbone, attention=True),
        "model.embed_tokens": Place(nn.Embedding, forwards.embed),
        "model.layers": passing,
        "model.norm": norm,
        "model.rotary_emb": own("RotaryEmbedding", forwards.rotary, attention=True),
        "lm_head": Place(nn.Linear, forwards.head),
    }
    for i in range(config.layers):
        found |= {f"model.layers.{i}.{name}".rstrip("."): place for name, place in layer.items()}
    return found


def _silu() -> nn.Module:
    from transformers.activations import ACT2FN

    found: nn.Module = ACT2FN["silu"]
    return found


def left_of(model: nn.Module, known: Mapping[str, Place], sizes: ModelConfig) -> dict[str, str]:
    """Modules that cannot be unified, and why, by name; what is unified already can."""
    present = dict(model.named_modules(remove_duplicate=False))
    left = {name: "is missing" for name in known if name not in present}
    for name, module in present.items():
        reason = _reason(module, known.get(name)) or _altered(name, module, sizes)
        if reason:
            left[name] = reason
    for name, place in known.items():
        if place.forward is forwards.feed_forward:  # which computes these two itself
            for part in (f"{name}.gate_proj", f"{name}.up_proj"):
                if part in left:
                    left.setdefault(name, f"{part} cannot be unified")
    if any(known[name].attention for name in left if name in known):
        cause = next(name for name in left if name in known and known[name].attention)
        for name, place in known.items():
            if place.attention and place.forward is not None:
                left.setdefault(name, f"attention is unified as a whole, and {cause} cannot be")
    return left


def _reason(module: nn.Module, place: Place | None) -> str:
    """Why a module cannot be unified; empty where it can."""
    kind = type(module)
    if place is None:
        return f"{kind.__name__} at a place that the family does not have"
    if kind is not place.kind:
        return f"{kind.__name__}, not {place.kind.__name__}"
    if not forwards.is_ours(module) and not _is_own(module):
        return "its forward was replaced by something else"
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
        return "max_norm, scale_grad_by_freq and sparse gradients are not covered"
    return ""


def _is_own(module: nn.Module) -> bool:
    """Whether a module computes what its class does, compiled or not."""
    forward = module.__dict__.get("forward")
    compiled = getattr(forward, "_torchdynamo_orig_callable", forward)
    return forward is None or compiled == MethodType(type(module).forward, module)


def _altered(name: str, module: Any, sizes: ModelConfig) -> str:
    """What of a module is not as the configuration states; empty where all is."""
    part = name.rsplit(".", 1)[-1]
    stated: dict[str, object] = {}
    if hasattr(module, "variance_epsilon"):
        stated["variance_epsilon"] = sizes.eps
    if part == "self_attn":
        stated |= {"head_dim": sizes.head_dim, "scaling": sizes.head_dim**-0.5}
    if part == "gate" and sizes.experts is not None:
        stated |= {"top_k": sizes.experts.top_k, "norm_topk_prob": sizes.experts.renormalize}
    for option, value in stated.items():
        if getattr(module, option) != value:
            return f"its {option} is {getattr(module, option)}, the configuration's {value}"
    biased = sizes.qkv_bias and part in ("q_proj", "k_proj", "v_proj")
    if isinstance(module, nn.Linear) and (module.bias is not None) != biased:
        return "it has a bias that the family does not have" if not biased else "it has no bias"
    return ""


def refuse(model: Any) -> ModelConfig:
    """Raise ValueError where a model has what unified operators do not cover; otherwise return its sizes."""
    config = model.config
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        stated = quantised if isinstance(quantised, dict) else vars(quantised)
        method = getattr(stated.get("quant_method"), "value", stated.get("quant_method"))
        if method != "gguf":  # whose weights transformers dequantises as it loads them
            raise ValueError(
                f"quantization_config states {method} weights, which are not covered: load the model without"
            )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("the model has PEFT adapters (LoRA), which are not covered: delete or merge them")
    sizes = from_hugging_face(config)
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(
            f"attention_dropout={config.attention_dropout} is not covered: load with attention_dropout=0.0"
        )
    for option, value in forwards.refused_options(config, {}).items():
        raise ValueError(f"{option}={value!r} is not covered: set config.{option} to {not value}")
    if dict(config.rope_parameters).get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("partial_rotary_factor is not covered: heads are turned as a whole")
    for name, module in model.named_modules():
        for option in ("attention_dropout", "sliding_window"):
            if getattr(module, option, None):
                raise ValueError(f"{name}.{option}={getattr(module, option)} is not covered")
        if type(module).__module__.split(".")[0] == "peft":
            raise ValueError(f"{name} is a PEFT adapter (LoRA), which is not covered: merge it first")
    _refuse_parameters(model)
    _refuse_angles(model.model.rotary_emb, sizes)
    backend = next(model.parameters()).device.type
    for axis in ("query_heads", "kv_heads", "head_dim"):
        ops.get("attention", backend).contract.axis(axis).check(getattr(sizes, axis))
    return sizes


def _refuse_angles(rotary: Any, sizes: ModelConfig) -> None:
    """Tables are made from the configuration: what the module has must be that."""
    cos, sin = rope_tables(sizes.head_dim, 2, sizes.rope_theta, sizes.rope_scaling)
    wanted = torch.atan2(sin[1], cos[1])
    found = getattr(rotary, "inv_freq", wanted)
    close = found.shape == wanted.shape and torch.allclose(found.float().cpu(), wanted, rtol=1e-3, atol=0.0)
    if not close or getattr(rotary, "attention_scaling", 1.0) != 1.0:
        raise ValueError(
            "model.rotary_emb has other angles than rope_parameters of the configuration state: load the "
            "model with the configuration that it is to have"
        )


def _refuse_parameters(model: nn.Module) -> None:
    """One dtype that contracts admit, one device, plain dense parameters."""
    parameters = dict(model.named_parameters())
    first = next(iter(parameters.values()))
    if first.device.type not in ("cpu", "cuda"):
        raise ValueError(f"parameters are on {first.device}: move the model to the CPU or a CUDA device")
    admitted = ops.get("linear", first.device.type).contract.dtypes
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter or not isinstance(parameter.data, Tensor):
            raise ValueError(
                f"{name} is a {type(parameter).__name__}, which is not covered: unify plain parameters, "
                "before they are sharded or quantised"
            )
        dtype = str(parameter.dtype).removeprefix("torch.")
        if dtype not in admitted or parameter.dtype != first.dtype:
            wanted = f"one of {', '.join(admitted)} throughout on {first.device.type}"
            raise ValueError(f"{name} is {dtype}, parameters must be {wanted}: load with dtype=...")
        if parameter.device != first.device:
            raise ValueError(f"{name} is on {parameter.device}, others on {first.device}: use one device")


def joint(model: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """Parameters that are one matrix of a `LayerWeights`, by its name there."""
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        heads = [attention.q_proj, attention.k_proj, attention.v_proj]
        yield f"layers.{i}.qkv", [each.weight for each in heads]
        if heads[0].bias is not None:
            yield f"layers.{i}.qkv_bias", [each.bias for each in heads]
        if hasattr(mlp, "gate_proj"):
            yield f"layers.{i}.gate_up", [mlp.gate_proj.weight, mlp.up_proj.weight]
