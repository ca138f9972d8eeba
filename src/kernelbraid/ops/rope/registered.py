"""The rotary embedding as a registered operator of torch: implementation, fake kernels, autograd.

    kernelbraid::rope             heads of q and k, differentiable in both
    kernelbraid::rope_backward    its gradients

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
    INDEX_DTYPES,
    check_axis,
    check_shape,
    check_tensor,
    contract_of,
    dtypes_of,
)
from kernelbraid.ops.dispatch import is_traced, refuse_second, rows_contiguous
from kernelbraid.ops.rows import MOST_POSITIONS

_call = partial(dispatch.call, "rope")


# ---- Calls with their checks ----


def check_heads(names: tuple[str, str], q: Tensor, k: Tensor) -> None:
    """Check heads of queries and keys."""
    query, key = names
    contract = contract_of("rope", query, q)
    check_tensor(query, q, dtypes_of(contract), 3, q.device)
    check_tensor(key, k, (q.dtype,), 3, q.device)
    check_axis(contract, "tokens", query, q.shape[0])
    check_axis(contract, "query_heads", query, q.shape[1])
    check_axis(contract, "head_dim", query, q.shape[2])
    if q.shape[2] % 2:
        raise ValueError(f"{query}: head_dim must be even, got {q.shape[2]}")
    check_axis(contract, "kv_heads", key, k.shape[1])
    check_shape(key, k, (q.shape[0], None, q.shape[2]), query)


def check_tables(positions: Tensor, cos: Tensor, sin: Tensor, q: Tensor, like: str = "q") -> None:
    """Check positions, their values too where they lie in the CPU's memory, and the tables."""
    check_tensor("positions", positions, INDEX_DTYPES, 1, q.device)
    check_shape("positions", positions, (q.shape[0],), like)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (torch.float32,), 2, q.device)
        check_shape(name, table, (None, q.shape[2] // 2), like)
    check_shape("sin", sin, cos.shape, "cos")
    rows = cos.shape[0]
    if rows > MOST_POSITIONS:
        raise ValueError(f"cos must have at most {MOST_POSITIONS} rows, got {rows}")
    if positions.is_cpu and positions.numel():
        # As unsigned numbers, negative positions are too large as well.
        outside = positions.numpy().view("uint32") >= rows
        if outside.any():
            at = int(outside.argmax())
            raise ValueError(
                f"positions[{at}] must lie between 0 and {rows - 1}, the last row of cos and sin, got "
                f"{int(positions[at])}"
            )


def rotate(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn heads; see `api.rope`."""
    check_heads(("q", "k"), q, k)
    check_tables(positions, cos, sin, q)
    q_out, k_out = _empty(q), _empty(k)
    if q.numel():
        _call("rope", q.device, q, k, positions, cos, sin, q_out, k_out)
    return q_out, k_out


def differentiate(
    positions: Tensor, cos: Tensor, sin: Tensor, dq_out: Tensor, dk_out: Tensor, needed: list[bool]
) -> list[Tensor]:
    """Return those gradients of `rotate` in q and k that are needed."""
    check_heads(("dq_out", "dk_out"), dq_out, dk_out)
    check_tables(positions, cos, sin, dq_out, "dq_out")
    found = [_empty(x) if need else None for x, need in zip((dq_out, dk_out), needed, strict=True)]
    if dq_out.numel():
        _call("rope_backward", dq_out.device, positions, cos, sin, dq_out, dk_out, *found)
    return [gradient for gradient in found if gradient is not None]


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::rope", mutates_args=())
def rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, k, positions, cos, sin)


@rope.register_fake
def _(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(q), _empty(k)


@torch.library.custom_op("kernelbraid::rope_backward", mutates_args=())
def rope_backward(
    positions: Tensor, cos: Tensor, sin: Tensor, dq_out: Tensor, dk_out: Tensor, needed: list[bool]
) -> list[Tensor]:
    return differentiate(positions, cos, sin, dq_out, dk_out, needed)


@rope_backward.register_fake
def _(
    positions: Tensor, cos: Tensor, sin: Tensor, dq_out: Tensor, dk_out: Tensor, needed: list[bool]
) -> list[Tensor]:
    return [_empty(each) for each, need in zip((dq_out, dk_out), needed, strict=True) if need]


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[2:])


def _gradients(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:2])
    if not any(needed):
        return (None,) * 5
    recorded = is_traced(dq_out) or torch.is_grad_enabled()
    function: Callable[..., list[Tensor]] = rope_backward if recorded else differentiate
    found = iter(function(*ctx.saved_tensors, rows_contiguous(dq_out), rows_contiguous(dk_out), needed))
    return (*(next(found) if need else None for need in needed), None, None, None)


rope.register_autograd(_gradients, setup_context=_save)
rope_backward.register_autograd(refuse_second("rope"))


class Rope(torch.autograd.Function):
    """The differentiable rotation of eager calls."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        found = rotate(q, k, positions, cos, sin)
        _save(ctx, (q, k, positions, cos, sin), found)
        return found

    backward = staticmethod(_gradients)


def rotate_with_grad(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """`rotate`, recorded by autograd."""
    found: tuple[Tensor, Tensor] = Rope.apply(q, k, positions, cos, sin)  # type: ignore[no-untyped-call]
    return found
