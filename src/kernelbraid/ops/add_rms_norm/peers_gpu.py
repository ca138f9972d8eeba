"""torch's and Liger-Kernel's sum and RMS norm on a GPU: what a benchmark runs beside ours."""

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight.shape, weight, eps), total


def torch_add_rms_norm_backward(
    residual_out: Tensor, weight: Tensor, dout: Tensor, dresidual_out: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients by torch's fused backward, given the factors of the forward, and a sum."""
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(
        dout, residual_out, weight.shape, _factors(residual_out, eps), weight, [True, True]
    )
    return dx + dresidual_out, dweight


def liger_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
    liger = import_module("liger_kernel.ops.fused_add_rms_norm")
    return liger.fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama", None)[:2]


def liger_add_rms_norm_backward(
    residual_out: Tensor, weight: Tensor, dout: Tensor, dresidual_out: Tensor, eps: float
) -> Any:
    """Gradients by Liger-Kernel's fused backward, given the factors of the forward."""
    liger = import_module("liger_kernel.ops.fused_add_rms_norm")
    block, warps = import_module("liger_kernel.ops.utils").calculate_settings(residual_out.shape[-1])
    factors = _factors(residual_out, eps).view(-1)
    mode = liger._CASTING_MODE_LLAMA.value
    return liger.fused_add_rms_norm_backward(
        dout, dresidual_out, residual_out, weight, factors, 0.0, mode, block, warps, False, None
    )


@lru_cache(maxsize=64)
def _factors(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
