"""QK norm as a registered operator of torch: implementation, fake kernels, autograd.

    kernelbraid::qk_norm             heads of q and k, differentiable in both and in their weights
    kernelbraid::qk_norm_backward    its gradients

Outside of a trace the public function goes round the operator, whose boundary costs more than a small call:
the same functions run, the same bits come out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelbraid.ops import dispatch
from kernelbraid.ops.arguments import (
    check_axis,
    check_number,
    check_shape,
    check_tensor,
    contract_of,
    dtypes_of,
)
from kernelbraid.ops.dispatch import is_traced, refuse_second, rows_contiguous

LARGEST_EPS = 1.0

_call = partial(dispatch.call, "qk_norm")


# ---- Calls with their checks ----


def check(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """Check the arguments of the forward."""
    contract = contract_of("qk_norm", "q", q)
    check_tensor("q", q, dtypes_of(contract), 3, q.device)
    check_tensor("k", k, (q.dtype,), 3, q.device)
    check_axis(contract, "tokens", "q", q.shape[0])
    check_axis(contract, "query_heads", "q", q.shape[1])
    check_axis(contract, "head_dim", "q", q.shape[2])
    check_axis(contract, "kv_heads", "k", k.shape[1])
    check_shape("k", k, (q.shape[0], None, q.shape[2]), "q")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_tensor(name, weight, (q.dtype,), 1, q.device)
        check_shape(name, weight, (q.shape[2],), "q")
    check_number("eps", eps, 0.0, LARGEST_EPS)


def normalize(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize heads; see `api.qk_norm`."""
    check(q, k, q_weight, k_weight, eps)
    q_out, k_out = _empty(q), _empty(k)
    if q.numel():
        _call("qk_norm", q.device, q, k, q_weight, k_weight, eps, q_out, k_out)
    return q_out, k_out


def differentiate(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    dq_out: Tensor,
    dk_out: Tensor,
    eps: float,
    needed: list[bool],
) -> list[Tensor]:
    """Return those gradients of `normalize` in q, k, q_weight and k_weight that are needed."""
    check(q, k, q_weight, k_weight, eps)
    for name, dout, like, x in (("dq_out", dq_out, "q", q), ("dk_out", dk_out, "k", k)):
        check_tensor(name, dout, (q.dtype,), 3, q.device)
        check_shape(name, dout, x.shape, like)
    heads = [_empty(x) if need else None for x, need in zip((q, k), needed, strict=False)]
    weights = [
        torch.zeros(w.shape, dtype=torch.float32, device=w.device) if need else None
        for w, need in zip((q_weight, k_weight), needed[2:], strict=True)
    ]
    if q.numel():
        given = (q, k, q_weight, k_weight, dq_out, dk_out, eps)
        _call("qk_norm_backward", q.device, *given, *heads, *weights, 0)
    found = (*heads, *(None if w is None else w.to(q.dtype) for w in weights))
    return [gradient for gradient in found if gradient is not None]


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::qk_norm", mutates_args=())
def qk_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return normalize(q, k, q_weight, k_weight, eps)


@qk_norm.register_fake
def _(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _empty(q), _empty(k)


@torch.library.custom_op("kernelbraid::qk_norm_backward", mutates_args=())
def qk_norm_backward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    dq_out: Tensor,
    dk_out: Tensor,
    eps: float,
    needed: list[bool],
) -> list[Tensor]:
    return differentiate(q, k, q_weight, k_weight, dq_out, dk_out, eps, needed)


@qk_norm_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    dq_out: Tensor,
    dk_out: Tensor,
    eps: float,
    needed: list[bool],
) -> list[Tensor]:
    return [_empty(each) for each, need in zip((q, k, q_weight, k_weight), needed, strict=True) if need]


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:4])
    if not any(needed):
        return (None,) * 5
    tensors = ctx.saved_tensors
    recorded = is_traced(tensors[0]) or torch.is_grad_enabled()
    function: Callable[..., list[Tensor]] = qk_norm_backward if recorded else differentiate
    given = rows_contiguous(dq_out), rows_contiguous(dk_out)
    found = iter(function(*tensors, *given, ctx.eps, needed))
    return (*(next(found) if need else None for need in needed), None)


qk_norm.register_autograd(_gradients, setup_context=_save)
qk_norm_backward.register_autograd(refuse_second("qk_norm"))


class QkNorm(torch.autograd.Function):
    """The differentiable norms of eager calls."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        found = normalize(q, k, q_weight, k_weight, eps)
        _save(ctx, (q, k, q_weight, k_weight, eps), found)
        return found

    backward = staticmethod(_gradients)


def normalize_with_grad(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`normalize`, recorded by autograd."""
    found: tuple[Tensor, Tensor] = QkNorm.apply(q, k, q_weight, k_weight, eps)  # type: ignore[no-untyped-call]
    return found
