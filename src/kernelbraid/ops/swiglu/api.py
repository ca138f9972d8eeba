"""The public function of SwiGLU: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.swiglu import registered
from kernelbraid.ops.swiglu.spec import CONTRACT

__all__ = ["swiglu"]


def swiglu(x: Tensor, up: Tensor | None = None, *, limit: object = None, alpha: object = None) -> Tensor:
    """Multiply silu of the gate, gate / (1 + exp(-gate)), by the up projection, element by element.

    Differentiable once, under `torch.compile` and activation checkpointing too. The saved tensors are the
    inputs; gradients compute the activation again.

    Args:
        x: [..., 2 * width], the gate in the first half and up in the second; with `up` the gate alone,
            [..., width]. float32 on the CPU, bfloat16 or float16 on a GPU; at most 131072 rows of at most
            131072 outputs. Rows may lie apart.
        up: [..., width], shape, dtype and device of x.
        limit: must be None: the contract does not cover clamped inputs.
        alpha: must be None: the contract does not cover a scaled gate.

    Returns:
        [..., width] in the dtype of x. The product is rounded once, and silu not before it.

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `swiglu` 1. An element's bits depend on its gate and up alone.
    """
    if limit is not None or alpha is not None:
        refuse_features(CONTRACT, limit=limit, alpha=alpha)
    check_is_tensor("x", x)
    if up is None:
        return _packed(x)
    check_is_tensor("up", up)
    refuse_tangents("swiglu", x=x, up=up)
    if up.shape != x.shape:
        raise ValueError(f"up must have the shape of x, {list(x.shape)}, got {list(up.shape)}")
    gate_rows, up_rows = _rows(x), _rows(up)
    if is_traced(x):
        out: Tensor = registered.swiglu(gate_rows, up_rows)
    elif torch.is_grad_enabled() and (x.requires_grad or up.requires_grad):
        out = registered.activate_with_grad(gate_rows, up_rows)
    else:
        out = registered.activate(gate_rows, up_rows)
    return out.view(x.shape)


def _packed(x: Tensor) -> Tensor:
    refuse_tangents("swiglu", x=x)
    if not x.dim() or x.shape[-1] % 2 or not x.shape[-1]:
        raise ValueError(f"x must end with an even size, gate and up, got shape {list(x.shape)}")
    rows = _rows(x)
    if is_traced(x):
        out: Tensor = registered.swiglu(*rows.chunk(2, 1))
    elif torch.is_grad_enabled() and x.requires_grad:
        out = registered.activate_packed_with_grad(rows)
    else:
        out = registered.activate(*rows.chunk(2, 1))
    return out.view(*x.shape[:-1], x.shape[-1] // 2)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1] if x.dim() else 1)
