"""Other SwiGLUs on a GPU: what a benchmark runs beside ours.

Liger-Kernel's gradients are left out: they are written over the inputs, and copies would be timed with them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def torch_swiglu_backward(gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Gradients by the calls that torch's autograd makes, silu of the gate computed anew."""
    return torch.ops.aten.silu_backward(dout * up, gate), dout * silu(gate)


def liger_swiglu(gate: Tensor, up: Tensor) -> Any:
    from liger_kernel.ops.swiglu import swiglu_forward

    return swiglu_forward(gate, up)
