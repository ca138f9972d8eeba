"""Unified attention as an attention implementation of transformers: `attn_implementation="kernelbraid"`.

    register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kernelbraid")

Two functions go into transformers' public interfaces, one for the attention and one for its mask. The mask
becomes a layout of real tokens, once a forward; each layer's attention is then that of packed rows, or of the
cache read as pages. Everything else of the model stays transformers' own, so attention's bits alone are those
of the contract: `kernelbraid.unify` is what makes a whole model's equal.

Source: https://huggingface.co/docs/transformers/attention_interface
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
except ImportError as error:  # pragma: no cover - a test takes the library away in a process of its own
    raise RuntimeError(
        "attention for transformers needs the extra `models`, with transformers 5: "
        "pip install 'kernelbraid[models]'"
    ) from error

from kernelbraid import ops
from kernelbraid.models.forwards import attend_pages, refuse_gradients, refused_options
from kernelbraid.models.layout import Layout, cached_tokens, layout
from kernelbraid.ops.attention.api import attention

__all__ = ["NAME", "TESTED_TRANSFORMERS", "attend", "guard", "prepare", "register"]

NAME = "kernelbraid"
"""The value of `attn_implementation`."""
TESTED_TRANSFORMERS = ("5.0.0", "5.17.0", "5.24.0")
"""Versions that the tests of this file passed with."""
NOT_CAUSAL = (
    "mask_function must be causal, in a row or in each of the sequences packed in it: is_causal=False and "
    "masks of a model's own are not covered"
)
MASK_ROWS = 512
"""Rows of a packed batch's mask that are looked at together."""

NOT_COVERED = {
    "softcap": "capped scores are not covered",
    "s_aux": "attention sinks are not covered",
    "sinks": "attention sinks are not covered",
    "head_mask": "masks of heads are not covered",
    "position_bias": "biased scores are not covered",
    "block_table": "pages of continuous batching are not covered",
}
"""Arguments that models or callers hand to an attention implementation, and why they are refused."""
HARMLESS = (
    *("cache", "cache_position", "past_key_values", "use_cache"),
    *("cu_seq_lens_k", "max_length_k"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("is_causal", "logits_to_keep", "num_items_in_batch", "position_embeddings", "training"),
)
"""Arguments that reach it and do not change what it computes, or are looked at elsewhere."""


@dataclass(slots=True)
class Prepared:
    """What the mask function found out about a forward; transformers hands it to every layer as the mask."""

    where: Layout
    keys: int
    """Slots of keys that every layer is to bring."""
    plain: bool
    """No padding was stated, no packing found, and nothing is cached."""
    settled: Layout | None = None
    """The layout of the forward, once a layer has seen `position_ids` and `cu_seq_lens_q`."""


def register() -> None:
    """Make `attn_implementation="kernelbraid"` known to transformers; again: does nothing.

    The first call warns that equal bits of a whole model need `kernelbraid.unify(model)`.

    Raises:
        ValueError: something else has that name already.
    """
    interfaces: tuple[Any, Any] = (AttentionInterface, AttentionMaskInterface)
    held = tuple(interface().get(NAME) for interface in interfaces)
    if held == (attend, prepare):
        return
    if held != (None, None):
        raise ValueError(f"attn_implementation {NAME!r} is registered by something else already")
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, prepare)
    warnings.warn(
        f"attn_implementation={NAME!r} fixes the bits of attention alone: those of a whole model need "
        "kernelbraid.unify(model)",
        stacklevel=2,
    )


def guard(model: nn.Module) -> Any:
    """Refuse now what attention would refuse in a model's first call, and in each call what it cannot see.

    An attention implementation is not shown the cache, only the keys that come out of it. The guard is a hook
    of the model (`register_forward_pre_hook`) that looks at the cache before the forward begins, and refuses
    quantised, static, sliding and offloaded ones.

    Args:
        model: a transformers model that calls attention by name.

    Returns:
        The hook's handle; its `remove()` takes the guard away.

    Raises:
        ValueError: the configuration, or a parameter's dtype, lies outside the contract; the message names
            it. No hook is set then.
    """
    config: Any = model.config
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None) is not None:
        raise ValueError(f"sliding_window={config.sliding_window} is not covered: set it to None")
    for option in ("attn_logit_softcapping", "attention_dropout"):
        if getattr(config, option, None):
            raise ValueError(f"{option}={getattr(config, option)} is not covered: load without it")
    for option, value in refused_options(config, {}).items():
        raise ValueError(f"{option}={value!r} is not covered: set config.{option} to {not value}")
    kind = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if kind not in (None, "dynamic", "dynamic_full"):
        raise ValueError(f"cache_implementation={kind!r} is not covered: set it to None in generation_config")
    for parameter in model.parameters():
        _refuse_dtype("dtype", parameter)
    return model.register_forward_pre_hook(_refuse_cache, with_kwargs=True)


def _refuse_cache(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    for given in (*arguments, options.get("cache"), options.get("past_key_values")):
        if given is not None and not isinstance(given, Tensor):
            cached_tokens(given)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def prepare(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    **options: Any,
) -> Prepared:
    """What transformers calls for the mask of a forward, once for all layers.

    Args:
        batch_size: rows B.
        q_length: new tokens S of a row.
        kv_length: slots K of keys, the cache's and the new ones.
        q_offset: slots that the cache held before.
        kv_offset: must be 0.
        mask_function: causal, or causal in each of the sequences packed in a row.
        attention_mask: [B, K] bool, True where a slot holds a token; None: all do.
        local_size: must be None: the contract does not cover sliding windows and chunks.
        use_vmap: must be False: it marks masks that a model or caller made up.
        device: of the model.
        cache_position: [S] int64, in older versions in the place of q_length and q_offset.
        options: what other masks need.

    Raises:
        ValueError: the mask is another one; the message names what makes it so.
    """
    if local_size is not None:
        raise ValueError(f"sliding_window or attention_chunk_size ({local_size}) is not covered: unset it")
    if use_vmap:
        raise ValueError("or_mask_function and and_mask_function are not covered: the mask must be causal")
    if "allow_is_bidirectional_skip" in options and "allow_is_causal_skip" not in options:
        raise ValueError("is_causal=False is not covered: the mask must be causal")
    if cache_position is not None:
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    assert q_length is not None
    past = int(q_offset)
    if int(kv_offset) or kv_length != past + q_length:
        raise ValueError(
            f"the cache states {kv_length} slots from {int(kv_offset)} for {past + q_length} tokens: pass a "
            "DynamicCache, without cache_implementation"
        )
    place = attention_mask.device if attention_mask is not None else torch.device(device or "cpu")
    shape = (batch_size, q_length)
    positions = None
    if mask_function is not causal_mask_function:
        if attention_mask is not None or past:
            raise ValueError(
                "mask_function must be causal beside an attention_mask or a cache that holds tokens"
            )
        positions = _packed_positions(mask_function, batch_size, q_length, place)
    where = layout(shape, place, mask=attention_mask, positions=positions, past=past)
    return Prepared(where, kv_length, plain=attention_mask is None and positions is None and not past)


def _packed_positions(function: Callable[..., Any], batch: int, length: int, device: torch.device) -> Tensor:
    """Positions [B, S] of tokens in the sequences of a row, where a mask is causal in each of them."""
    rows = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    keys = torch.arange(length, device=device)[None, None, None, :]
    starts = []
    for begin in range(0, length, MASK_ROWS):
        queries = torch.arange(begin, min(length, begin + MASK_ROWS), device=device)[None, None, :, None]
        seen = function(rows, head, queries, keys).expand(batch, 1, -1, length)
        start = seen.byte().argmax(-1, keepdim=True)
        if not torch.equal(seen, (keys >= start) & (keys <= queries)):
            raise ValueError(NOT_CAUSAL)
        starts.append(start[:, 0, :, 0])
    found = torch.cat(starts, 1)
    here = torch.arange(length, device=device)
    if not bool(((found[:, 1:] == found[:, :-1]) | (found[:, 1:] == here[1:])).all()):
        raise ValueError(NOT_CAUSAL)
    return here - found


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: attention of the real tokens, zeros in rows of padding.

    Args:
        module: the layer's attention.
        query: [B, Hq, S, D], float32 on the CPU, bfloat16 or float16 on a GPU.
        key: [B, Hkv, K, D], the cache's and the new ones.
        value: [B, Hkv, K, D].
        attention_mask: what `prepare` returned for this forward.
        scaling: factor of the scores, by default 1 / sqrt(D).
        dropout: must be 0.
        sliding_window: must be None.
        options: others that transformers hands on; `position_ids` [B or 1, S], and `cu_seq_lens_q`
            [sequences + 1] int32 with `max_length_q` say where sequences are packed.

    Returns:
        out [B, S, Hq, D], and None in the place of weights.

    Raises:
        ValueError: an argument lies outside the contract; the message names it.

    Bits: contract `attention` 1, of the packed rows of real tokens.
    """
    if dropout:
        raise ValueError(
            f"dropout={dropout} is not covered: load with attention_dropout=0.0, or call model.eval()"
        )
    if sliding_window is not None:
        raise ValueError(f"sliding_window={sliding_window} is not covered: set use_sliding_window=False")
    _refuse(module, options)
    _refuse_dtype("query", query)
    where = _settled(attention_mask, query, key, options)
    refuse_gradients(where, query)
    scale = None if scaling == query.shape[-1] ** -0.5 else scaling
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scaling must be a finite number, got {scale}")
    rows = where.unpadded(query.transpose(1, 2))
    if where.pages is not None:
        found = attend_pages(where, rows, key, value, scale)
    else:
        keys, values = (where.unpadded(each.transpose(1, 2)) for each in (key, value))
        found = attention(
            rows, keys, values, cu_seqlens=where.cu_seqlens, max_seqlen=where.max_seqlen, softmax_scale=scale
        )
    return where.padded(found), None


def _refuse(module: Any, options: dict[str, Any]) -> None:
    for option, why in NOT_COVERED.items():
        if options.get(option) is not None:
            raise ValueError(f"{option} must be None: {why}")
    for option, value in refused_options(getattr(module, "config", None), options).items():
        raise ValueError(f"{option}={value!r} is not covered: leave it out")
    if not getattr(module, "is_causal", True):
        raise ValueError("is_causal=False is not covered: the mask must be causal")
    known = ("position_ids", "cu_seq_lens_q", "max_length_q", *HARMLESS)
    for option, value in options.items():
        if value is not None and option not in known:
            raise ValueError(
                f"{option} is not known to {NAME} attention, which cannot leave it out: pass None"
            )


def _refuse_dtype(name: str, tensor: Tensor) -> None:
    backend = tensor.device.type
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {backend}")
    covered = ops.get("attention", backend).contract.dtypes
    if str(tensor.dtype).removeprefix("torch.") not in covered:
        raise ValueError(
            f"{name} must be {' or '.join(covered)} on {backend}, got {tensor.dtype}: load with dtype="
        )


def _settled(mask: object, query: Tensor, key: Tensor, options: dict[str, Any]) -> Layout:
    """The layout of a forward, in view of what transformers does not hand to the mask function."""
    if not isinstance(mask, Prepared):
        stated = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(
            f"attention_mask reached attention as {stated}: pass [batch, slots] or None to the model; "
            "prepared masks and continuous batching are not covered"
        )
    if key.shape[2] != mask.keys:
        raise ValueError(
            f"the cache brought {key.shape[2]} keys for {mask.keys} slots: pass a DynamicCache, without "
            "cache_implementation"
        )
    if mask.settled is None:
        mask.settled = _settle(mask, query, options)
    return mask.settled


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _settle(mask: Prepared, query: Tensor, options: dict[str, Any]) -> Layout:
    place = mask.where.positions.device
    if place != query.device:
        raise ValueError(
            f"a model over several devices is not covered: the mask is on {place}, a query on {query.device}"
        )
    where, positions, starts = mask.where, options.get("position_ids"), options.get("cu_seq_lens_q")
    if positions is not None and positions.dim() != 2:
        raise ValueError(f"position_ids must be [batch, tokens], got {list(positions.shape)}")
    if starts is not None:
        if where.pages is not None or where.real is not None:
            raise ValueError(
                "cu_seq_lens_q is for packed sequences, without attention_mask and cached tokens"
            )
        try:
            return layout(
                (where.batch, where.length),
                query.device,
                positions=positions,
                cu_seqlens=starts.to(query.device),
                max_seqlen=options.get("max_length_q"),
            )
        except ValueError as error:
            raise ValueError(
                "cu_seq_lens_q does not fit position_ids: rotary angles come from these, so pass both, for "
                "one row, positions from 0 in each sequence"
            ) from error
    if mask.plain and positions is not None and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(
            "position_ids begin anew in a call with a cache, where transformers packs nothing: pass "
            "use_cache=False for packed sequences, or the attention_mask of a padded batch"
        )
    return where
