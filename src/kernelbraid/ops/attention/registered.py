"""Attention as registered operators of torch: implementations, fake kernels, autograd.

    kernelbraid::attention             packed sequences, differentiable in q, k and v
    kernelbraid::attention_backward    its gradients
    kernelbraid::paged_attention       writes out and lse
    kernelbraid::write_kv_cache        writes the caches

This file needs torch alone. An implementation, and Numba or Triton with it, is loaded by the first call that
computes, so that the first call of a process may be one under `torch.compile(fullgraph=True)`. Values that a
traced call cannot look at are checked when it runs. Outside of a trace the public functions go round the
operators, whose boundary costs more than a small call: the same functions run, the same bits come out.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelbraid.ops import dispatch
from kernelbraid.ops.attention import arguments
from kernelbraid.ops.dispatch import count_write, is_traced, refuse_second, rows_contiguous

_call = partial(dispatch.call, "attention")


# ---- Calls with their checks ----


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend packed sequences; see `api.attention`."""
    scale = arguments.check_packed(q, k, v, cu_seqlens, max_seqlen, softmax_scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = empty_lse(q) if with_lse else None
    if q.numel():
        _call("attention", q.device, q, k, v, cu_seqlens, max_seqlen, scale, out, lse)
    return out, lse


def differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None,
    needed: list[bool],
) -> list[Tensor]:
    """Return those gradients of `attend` in q, k and v that are needed."""
    arguments.check_packed(q, k, v, cu_seqlens, max_seqlen, softmax_scale)
    arguments.check_gradient(q, out, lse, dout)
    return _differentiate(q, k, v, out, lse, dout, cu_seqlens, max_seqlen, softmax_scale, needed)


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of a call whose arguments were checked."""
    scale = arguments.score_factor(softmax_scale, q)
    gradients = [_empty_like(x) if need else None for x, need in zip((q, k, v), needed, strict=True)]
    if q.numel():
        operands = (q, k, v, out, lse, dout, cu_seqlens, max_seqlen, scale)
        _call("attention_backward", q.device, *operands, *gradients)
    return [gradient for gradient in gradients if gradient is not None]


def attend_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    out: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend pages; see `api.paged_attention`."""
    metadata = (page_table, cu_seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = arguments.check_paged(q, k_cache, v_cache, *metadata, softmax_scale, out)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        count_write(out)
    lse = empty_lse(q) if with_lse else None
    if q.numel():
        _call("paged_attention", q.device, q, k_cache, v_cache, *metadata, scale, out, lse)
    return out, lse


def write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
) -> None:
    """Write a cache; see `api.write_kv_cache`."""
    operands = (k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)
    arguments.check_cache_write(*operands)
    if k.numel():
        _call("write_kv_cache", k.device, *operands)


def empty_lse(q: Tensor) -> Tensor:
    """Room for the log-sum-exps of q's rows."""
    return torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None,
) -> tuple[Tensor, Tensor]:
    out, lse = attend(q, k, v, cu_seqlens, max_seqlen, softmax_scale, True)
    assert lse is not None
    return out, lse


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float | None
) -> tuple[Tensor, Tensor]:
    return _empty_like(q), empty_lse(q)


@torch.library.custom_op("kernelbraid::attention_backward", mutates_args=())
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None,
    needed: list[bool],
) -> list[Tensor]:
    return differentiate(q, k, v, out, lse, dout, cu_seqlens, max_seqlen, softmax_scale, needed)


@attention_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None,
    needed: list[bool],
) -> list[Tensor]:
    return [_empty_like(x) for x, need in zip((q, k, v), needed, strict=True) if need]


@torch.library.custom_op("kernelbraid::paged_attention", mutates_args=("out", "lse"))
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    metadata = (page_table, cu_seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = arguments.check_paged(q, k_cache, v_cache, *metadata, softmax_scale, out)
    if q.numel():
        _call("paged_attention", q.device, q, k_cache, v_cache, *metadata, scale, out, lse)


@torch.library.custom_op("kernelbraid::write_kv_cache", mutates_args=("k_cache", "v_cache"))
def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
) -> None:
    write(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)


@write_kv_cache.register_fake
def _(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
) -> None:
    # Where torch.compile (to 2.13) knows shapes as symbols, it writes at offset 0 instead of the view's own.
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.storage_offset() != 0:
            raise ValueError(
                f"{name} is a view with an offset, and torch.compile may write elsewhere: give each layer a "
                "tensor of its own, or call write_kv_cache outside of compiled code"
            )


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.max_seqlen, ctx.softmax_scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, cu_seqlens, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])
    if dout is None or not any(needed):
        return (None,) * 6
    q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
    tensors = (q, k, v, out, lse, rows_contiguous(dout), cu_seqlens)
    # An eager call was checked in its forward; its backward is recorded only if a second one may follow.
    recorded = is_traced(q) or torch.is_grad_enabled()
    function = attention_backward if recorded else _differentiate
    found = iter(function(*tensors, ctx.max_seqlen, ctx.softmax_scale, needed))
    return (*(next(found) if need else None for need in needed), None, None, None)


attention.register_autograd(_gradients, setup_context=_save)
attention_backward.register_autograd(refuse_second("attention"))


class Attention(torch.autograd.Function):
    """The differentiable attention of eager calls. A setup_context would cost each call 60 us more."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        softmax_scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, cu_seqlens, max_seqlen, softmax_scale, True)
        assert lse is not None
        _save(ctx, (q, k, v, cu_seqlens, max_seqlen, softmax_scale), (out, lse))
        return out, lse

    backward = staticmethod(_gradients)


def attend_with_grad(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float | None
) -> tuple[Tensor, Tensor]:
    """`attend` with a log-sum-exp, recorded by autograd."""
    out, lse = Attention.apply(q, k, v, cu_seqlens, max_seqlen, softmax_scale)  # type: ignore[no-untyped-call]
    return out, lse
