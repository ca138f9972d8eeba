"""A transformers model's parameters as the weights of a Decoder: packed update, and rollout without a copy.

Storage: `unify` lays q, k and v (and gate and up) of a layer one after the other in one storage;
q_proj.weight and the others are views of it, under their old names. So the joined matrix that the Decoder
multiplies with *is* the memory that the optimizer writes: no second copy of the weights, and a step in place
is seen at once. Where parameters lie apart (moved to another device or dtype since, replaced by
load_state_dict(assign=True)), the Decoder has static buffers instead, which `refresh` fills in place.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernelbraid.models import forwards
from kernelbraid.models.config import from_hugging_face
from kernelbraid.models.coverage import joint
from kernelbraid.models.joined import adjacent, alias, join
from kernelbraid.models.layer import (
    LayerWeights,
    Packed,
    RopeTables,
    attend_packed,
    layer,
    packed_positions,
)
from kernelbraid.models.model import Decoder, ModelWeights
from kernelbraid.models.unify import report
from kernelbraid.ops.add_rms_norm.api import add_rms_norm
from kernelbraid.ops.logprob.api import logprob


def packed_hidden(
    model: Any, input_ids: Tensor, cu_seqlens: Tensor, *, max_seqlen: int | None = None
) -> Tensor:
    """Last hidden states, normed, of packed sequences: the update of a unified model, differentiable.

    The computation is the Decoder's own, over the model's parameters: forward functions and hooks of modules
    do not run. Layers with gradient checkpointing, in training, are computed again in backward.

    Args:
        model: a model that `unify` covers as a whole.
        input_ids: [T] int32 or int64, sequences one after the other.
        cu_seqlens: [sequences + 1] int32, from 0 to T.
        max_seqlen: at least the longest sequence; without it, cu_seqlens is read, which waits for a GPU.

    Returns:
        [T, hidden] in the dtype of the model.

    Raises:
        ValueError: a module of the model is not unified, or an argument lies outside a contract.

    Bits: those of `Decoder.hidden` and of rollout, and the gradients those of `Decoder.hidden`.
    """
    require_complete(model)
    return hidden_of(model, input_ids, cu_seqlens, max_seqlen=max_seqlen)


def hidden_of(model: Any, input_ids: Tensor, cu_seqlens: Tensor, *, max_seqlen: int | None = None) -> Tensor:
    """`packed_hidden` without a look at what is unified: for callers that looked before.

    A framework may put another forward on the model itself, which then counts as left; no module's forward
    runs here, so it changes nothing.
    """
    if input_ids.dim() != 1:
        raise ValueError(f"input_ids must be [tokens], packed, got {list(input_ids.shape)}")
    if max_seqlen is None:
        max_seqlen = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    tables: RopeTables = model.model.rotary_emb.__dict__[forwards.TABLES]
    covered = len(tables.cos)
    if max_seqlen > covered:
        raise ValueError(
            f"a sequence has {max_seqlen} tokens, and positions cover {covered}: unify(model, positions=...)"
        )
    config = from_hugging_face(model.config)
    batch = Packed(packed_positions(cu_seqlens, len(input_ids)), cu_seqlens, max_seqlen)
    weights = weights_of(model)
    x, residual = forwards.embed(model.model.embed_tokens, input_ids), None
    for module, each in zip(model.model.layers, weights.layers, strict=True):
        step = partial(layer, config, each, attend=attend_packed(config, each, tables, batch))
        if getattr(module, "gradient_checkpointing", False) and module.training and torch.is_grad_enabled():
            x, residual = checkpoint(step, x, residual, use_reentrant=False, preserve_rng_state=False)
        else:
            x, residual = step(x, residual)
    assert residual is not None
    hidden, _ = add_rms_norm(x, residual, weights.norm, eps=config.eps)
    return hidden


def packed_logprobs(
    model: Any,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    max_seqlen: int | None = None,
) -> Tensor:
    """Log-probability of each packed token's label, differentiable, without logits in memory.

    Args:
        model, input_ids, cu_seqlens, max_seqlen: as in `packed_hidden`.
        labels: [T] int32 or int64, such as the token after each; -100: does not count, gives 0.
        temperature: as in `logprob`.

    Returns:
        [T] float32.

    Raises:
        ValueError: as `packed_hidden`.

    Bits: those of `Decoder.logprobs`, so those that rollout recorded under equal weights.
    """
    if labels.shape != input_ids.shape:
        raise ValueError(
            f"labels must have the shape of input_ids, {list(input_ids.shape)}, got {list(labels.shape)}"
        )
    hidden = packed_hidden(model, input_ids, cu_seqlens, max_seqlen=max_seqlen)
    found = logprob(hidden, model.lm_head.weight, labels, temperature=temperature)
    assert isinstance(found, Tensor)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def require_complete(model: Any) -> None:
    """Raise ValueError, naming what is left, unless a model is unified as a whole."""
    report(model).require()


def parts_of(model: Any) -> dict[str, list[Tensor]]:
    """The parameters that each of a Decoder's tensors consists of, by that tensor's name."""
    found = {"embedding": [model.model.embed_tokens.weight]}
    joined = dict(joint(model))
    for i, each in enumerate(model.model.layers):
        own = f"layers.{i}"
        attention, mlp = each.self_attn, each.mlp
        single = {
            "input_norm": each.input_layernorm,
            "o": attention.o_proj,
            "post_norm": each.post_attention_layernorm,
            "q_norm": getattr(attention, "q_norm", None),
            "k_norm": getattr(attention, "k_norm", None),
            "down": getattr(mlp, "down_proj", None),
            "router": getattr(mlp, "gate", None),
        }
        found |= {f"{own}.{name}": [part.weight] for name, part in single.items() if part is not None}
        for name in ("qkv", "qkv_bias", "gate_up"):
            if f"{own}.{name}" in joined:
                found[f"{own}.{name}"] = joined[f"{own}.{name}"]
        if hasattr(mlp, "experts"):
            found[f"{own}.experts_gate_up"] = [mlp.experts.gate_up_proj]
            found[f"{own}.experts_down"] = [mlp.experts.down_proj]
    found["norm"] = [model.model.norm.weight]
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        found["head"] = [model.lm_head.weight]
    return found


def weights_of(model: Any) -> ModelWeights:
    """A model's parameters as a Decoder's weights, differentiable in the parameters."""
    return _arranged({name: join(parts) for name, parts in parts_of(model).items()})


def _arranged(tensors: dict[str, Tensor]) -> ModelWeights:
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            _, i, field_ = name.split(".")
            layers.setdefault(int(i), {})[field_] = tensor
    return ModelWeights(
        tensors["embedding"],
        tuple(LayerWeights(**layers[i]) for i in sorted(layers)),
        tensors["norm"],
        tensors.get("head", tensors["embedding"]),
    )


@dataclass(frozen=True)
class ModelDecoder(Decoder):
    """The Decoder of a transformers model."""

    version: int = field(default=0, init=False)
    """Of the weights, as `refresh` was last told."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh did."""

    version: int
    shared: int
    """Tensors whose memory is the parameters' own: nothing to do."""
    copied: int
    """Tensors that were filled from parameters that lie elsewhere."""


def decoder_of(model: Any) -> ModelDecoder:
    """A Decoder over a model's weights, for rollout.

    Its tensors are the parameters' own memory, where those of each group are adjacent, as `unify` leaves
    them: then an optimizer's step in place is seen at once, and a token drawn after it comes from the new
    weights. Otherwise they are copies, which `refresh` writes. Nothing of it requires gradients.

    Raises:
        ValueError: a module of the model is not unified.
    """
    require_complete(model)
    tables: RopeTables = model.model.rotary_emb.__dict__[forwards.TABLES]
    with torch.no_grad():
        tensors = {name: join([part.detach() for part in parts]) for name, parts in parts_of(model).items()}
    return ModelDecoder(from_hugging_face(model.config), _arranged(tensors), len(tables.cos))


def refresh(decoder: ModelDecoder, model: Any, version: int) -> Refreshed:
    """Bring a Decoder's weights to a model's, in place: addresses stay, so captured graphs stay valid.

    Args:
        decoder: from `decoder_of`.
        model: that model, or one of the same sizes and dtype, on any device.
        version: of the weights, from now on `decoder.version`; must not go back.

    Raises:
        ValueError: a tensor does not fit, or the version goes back; nothing is written then.
    """
    if version < decoder.version:
        raise ValueError(f"version must be at least {decoder.version}, the decoder's, got {version}")
    held = dict(decoder.weights.tensors())
    sources = parts_of(model)
    if held.keys() != sources.keys():
        different = ", ".join(sorted(held.keys() ^ sources.keys())[:4])
        raise ValueError(f"model and decoder do not have the same tensors: {different}")
    for name, parts in sources.items():
        rows = sum(len(part) for part in parts)
        shape = (rows, *parts[0].shape[1:])
        if shape != held[name].shape or parts[0].dtype != held[name].dtype:
            raise ValueError(
                f"{name} is {list(held[name].shape)} {held[name].dtype} in the decoder, and {list(shape)} "
                f"{parts[0].dtype} in the model"
            )
    apart = [name for name, parts in sources.items() if not shares(held[name], parts)]
    with torch.no_grad():
        for name in apart:
            parts = sources[name]
            for place, part in zip(torch.split(held[name], [*map(len, parts)]), parts, strict=True):
                place.copy_(part)
    object.__setattr__(decoder, "version", version)
    return Refreshed(version, len(held) - len(apart), len(apart))


def shares(tensor: Tensor, parts: list[Tensor]) -> bool:
    """Whether a tensor is the memory of its parts."""
    if not adjacent(parts):
        return False
    whole = alias(parts) if len(parts) > 1 else parts[0]
    same = tensor.shape == whole.shape and tensor.stride() == whole.stride()
    return same and tensor.data_ptr() == whole.data_ptr()
