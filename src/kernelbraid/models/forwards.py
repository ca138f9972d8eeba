"""What the modules of a unified model compute: a function for each class, whose first argument is the module.

They are set as the module's own `forward`, so that hooks, gradient checkpointing and the state dict stay
those of transformers. Projections of the same rows (q, k, v; gate, up) are one product, whose gradient is
one sum.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernelbraid.models.joined import join
from kernelbraid.models.layer import RopeTables
from kernelbraid.models.layout import Layout, cached_tokens, layout
from kernelbraid.ops.attention.api import attention, paged_attention
from kernelbraid.ops.embedding.api import embedding
from kernelbraid.ops.linear import registered as linear_registered
from kernelbraid.ops.linear.api import linear
from kernelbraid.ops.logprob.api import head_logits
from kernelbraid.ops.moe_experts.api import moe_experts
from kernelbraid.ops.moe_router.api import moe_router
from kernelbraid.ops.qk_norm.api import qk_norm
from kernelbraid.ops.rms_norm.api import rms_norm
from kernelbraid.ops.rope.api import rope
from kernelbraid.ops.swiglu.api import swiglu

LAYOUT = "kernelbraid_layout"
"""The argument that carries the layout through transformers' layers."""
TABLES = "_kernelbraid_tables"
"""The attribute of a rotary embedding that holds its tables."""


def project(module: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer."""
    return linear(x, module.weight, module.bias)


def norm(module: Any, hidden_states: Tensor) -> Tensor:
    """An RMS norm."""
    return rms_norm(hidden_states, module.weight, eps=module.variance_epsilon)


def embed(module: nn.Embedding, ids: Tensor) -> Tensor:
    """A table's rows; the row of `padding_idx` gets no gradient from here, as in torch."""
    rows = embedding(ids, module.weight)
    if module.padding_idx is None or not rows.requires_grad:
        return rows
    return torch.where((ids == module.padding_idx).unsqueeze(-1), rows.detach(), rows)


def head(module: nn.Linear, x: Tensor) -> Tensor:
    """Logits in float32, those whose log-probabilities `logprob` gives, differentiable."""
    if torch.is_grad_enabled() and (x.requires_grad or module.weight.requires_grad):
        logits: Tensor = _Logits.apply(x.reshape(-1, x.shape[-1]), module.weight)  # type: ignore[no-untyped-call]
        return logits.view(*x.shape[:-1], len(module.weight))
    return head_logits(x, module.weight)


class _Logits(torch.autograd.Function):
    """`head_logits` with the gradients of `linear`, which computes the same product."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return head_logits(rows, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        needed = [*ctx.needs_input_grad, False]
        dout = gradient.to(rows.dtype).contiguous()
        found = iter(linear_registered.linear_backward(rows, weight, None, dout, needed))
        return tuple(next(found) if each else None for each in needed[:2])


def feed_forward(module: Any, x: Tensor) -> Tensor:
    """The dense feed-forward."""
    parts = [_weight(module, "gate_proj"), _weight(module, "up_proj")]
    found: Tensor = module.down_proj(swiglu(linear(x, join(parts))))
    return found


def route(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A router: its logits, the weights of the chosen experts in float32, and which they are."""
    logits = linear(hidden_states.reshape(-1, module.hidden_dim), module.weight)
    weights, experts = moe_router(logits, top_k=module.top_k, renormalize=module.norm_topk_prob)
    return logits, weights, experts


def mix(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts that a router chose."""
    return moe_experts(hidden_states, top_k_weights, top_k_index, module.gate_up_proj, module.down_proj)


def rotary(module: Any, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The tables of all positions; which rows they are that tokens need is in the layout."""
    tables: RopeTables = module.__dict__[TABLES]
    if tables.cos.device != x.device:
        tables = RopeTables(tables.cos.to(x.device), tables.sin.to(x.device))
        module.__dict__[TABLES] = tables
    return tables.cos, tables.sin


def attend(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: object = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of the new tokens, packed where no cache holds anything, paged where one does."""
    where: Layout | None = options.get(LAYOUT)
    if where is None or position_embeddings is None:
        raise ValueError("unified attention needs its model's forward: call the model, not its layers")
    weights, biases, norms = _projections(module)
    rows = where.unpadded(hidden_states)
    joint = linear(rows, join(weights), join(biases) if biases else None)
    widths = [len(weight) for weight in weights]
    heads = [
        part.view(len(rows), part.shape[1] // module.head_dim, module.head_dim)
        for part in torch.split(joint, widths, dim=1)
    ]
    q, k, v = heads
    if norms:
        eps = module.q_norm.variance_epsilon
        q, k = qk_norm(q, k, *norms, eps=eps)
    q, k = rope(q, k, where.positions, *position_embeddings)
    found = module.o_proj(_attended(module, where, options, q, k, v).flatten(1))
    return where.padded(found), None


def _attended(module: Any, where: Layout, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache = options.get("cache", options.get("past_key_values"))
    if cache is not None:
        refuse_gradients(where, q)
        keys, values = (where.padded(each).transpose(1, 2) for each in (k, v))
        keys, values = cache.update(keys, values, module.layer_idx)
        if where.pages is not None:
            return attend_pages(where, q, keys, values)
    elif where.pages is not None:
        raise ValueError("gradient checkpointing leaves the cache out: pass whole sequences, use_cache=False")
    return attention(q, k, v, cu_seqlens=where.cu_seqlens, max_seqlen=where.max_seqlen)


def refuse_gradients(where: Layout, q: Tensor) -> None:
    """Raise ValueError where gradients of new tokens would have to pass through a cache that holds tokens."""
    if where.pages is not None and torch.is_grad_enabled() and q.requires_grad:
        raise ValueError(
            "gradients through a cache that holds tokens are not covered: call under torch.no_grad(), or "
            "pass whole sequences with use_cache=False"
        )


def attend_pages(
    where: Layout, q: Tensor, keys: Tensor, values: Tensor, softmax_scale: float | None = None
) -> Tensor:
    """Attention of new tokens [T, Hq, D] over a cache [B, Hkv, K, D] that holds them too."""
    pages = where.pages
    assert pages is not None
    return paged_attention(
        q,
        pages.of(keys),
        pages.of(values),
        page_table=pages.table,
        cu_seqlens_q=where.cu_seqlens,
        seqlens_k=pages.seqlens,
        max_seqlen_q=where.max_seqlen,
        max_seqlen_k=pages.longest,
        softmax_scale=softmax_scale,
    )


def _projections(module: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights and biases of q, k and v, and the norms of q and k."""
    names = ("q_proj", "k_proj", "v_proj")
    weights = [_weight(module, name) for name in names]
    biases = [getattr(module, name).bias for name in names]
    norms = [_weight(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    return weights, biases if biases[0] is not None else [], norms


def _weight(module: Any, name: str) -> Tensor:
    """The weight of a part that is computed with others, so that its own forward and hooks do not run."""
    part = getattr(module, name)
    if not is_ours(part):
        raise ValueError(f"{name} was replaced since unify(model): undo that, or restore(model)")
    if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
        raise ValueError(f"{name} has hooks, which do not run in a joint projection: remove them")
    weight: Tensor = part.weight
    return weight


def backbone(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **options: Any,
) -> Any:
    """The model below its head: transformers' own, which is given the layout and no mask to build."""
    for option, value in refused_options(module.config, options).items():
        raise ValueError(f"{option}={value!r} is not covered by unified attention: leave it out")
    if not (attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2)):
        raise ValueError(
            "attention_mask must be [batch, slots] or None: prepared masks are not covered, nor are the "
            "caches that need them (cache_implementation)"
        )
    given = input_ids if input_ids is not None else options.get("inputs_embeds")
    if given is None or given.dim() < 2:
        raise ValueError("input_ids must be [batch, tokens]")
    cache = options.get("cache", options.get("past_key_values"))
    device = module.embed_tokens.weight.device
    where = layout(
        (given.shape[0], given.shape[1]),
        device,
        mask=None if attention_mask is None else attention_mask.to(device),
        positions=position_ids,
        past=cached_tokens(cache),
        cu_seqlens=options.get("cu_seq_lens_q"),
        max_seqlen=options.get("max_length_q"),
        alone=cache is None,
    )
    covered = len(module.rotary_emb.__dict__[TABLES].cos)
    longest = where.max_seqlen if where.pages is None else where.pages.longest
    if longest > covered:
        raise ValueError(
            f"a request has {longest} tokens, and positions cover {covered}: unify(model, positions=...)"
        )
    # A mask of four dimensions is taken as a prepared one: transformers hands it on and builds none.
    prepared = torch.empty((0, 0, 0, 0), device=device)
    options[LAYOUT] = where
    return type(module).forward(module, input_ids=input_ids, attention_mask=prepared, **options)


def refused_options(config: Any, options: dict[str, Any]) -> dict[str, object]:
    """Options of a call, or of the configuration, that change what attention computes or returns."""
    refused = {"output_attentions": True, "is_causal": False}
    found: dict[str, object] = {}
    for option, value in refused.items():
        stated = options.get(option)
        if (getattr(config, option, None) if stated is None else stated) is value:
            found[option] = value
    return found


FORWARDS = (project, norm, embed, head, feed_forward, route, mix, rotary, attend, backbone)


def is_ours(module: nn.Module) -> bool:
    """Whether a module computes one of these functions."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func in FORWARDS and forward.args == (module,)
