"""The public function of the rotary embedding: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.rope import registered
from kernelbraid.ops.rope.spec import CONTRACT
from kernelbraid.ops.rope.tables import Llama3Scaling, rope_tables

__all__ = ["Llama3Scaling", "rope", "rope_tables"]


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: object = None,
    rotary_dim: object = None,
    sections: object = None,
) -> tuple[Tensor, Tensor]:
    """Turn the halves of every head of q and k by the angles of their tokens' positions (Llama, Qwen).

    Differentiable in q and k, under `torch.compile` and activation checkpointing too. On a GPU positions are
    not looked at, which would mean to wait for it: one outside the tables gives NaN.

    Args:
        q: [T, Hq, D], float32 on the CPU, bfloat16 or float16 on a GPU; T at most 131072, D even and at most
            256; last dimension contiguous, so that it may be a part of a joint projection.
        k: [T, Hkv, D], dtype and device of q.
        positions: [T] int32, rows of the tables.
        cos: [positions, D / 2] float32 on the device of q, at most 131072 rows, as `rope_tables` gives it.
        sin: the same of the sine.
        interleaved: must be None: the contract does not cover turned pairs of neighbours.
        rotary_dim: must be None: the contract does not cover heads that are turned in part.
        sections: must be None: the contract does not cover positions of several dimensions.

    Returns:
        (q_out, k_out), of the shapes of q and k and their dtype, contiguous.

    Raises:
        ValueError: an argument lies outside the contract, or a table requires grad; the message names it.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `rope` 1. A head's bits depend on that head and on its row of the tables alone.
    """
    if interleaved is not None or rotary_dim is not None or sections is not None:
        refuse_features(CONTRACT, interleaved=interleaved, rotary_dim=rotary_dim, sections=sections)
    tensors = {"q": q, "k": k, "positions": positions, "cos": cos, "sin": sin}
    for name, tensor in tensors.items():
        check_is_tensor(name, tensor)
    refuse_tangents("rope", **tensors)
    if cos.requires_grad or sin.requires_grad:
        name = "cos" if cos.requires_grad else "sin"
        raise ValueError(f"{name} requires grad, and rope has none of its tables: pass {name}.detach()")
    if is_traced(q):
        found: tuple[Tensor, Tensor] = registered.rope(q, k, positions, cos, sin)
        return found
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return registered.rotate_with_grad(q, k, positions, cos, sin)
    return registered.rotate(q, k, positions, cos, sin)
