"""torch's and Liger-Kernel's RMS norm of queries and of keys on a GPU: what a benchmark runs beside ours."""

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


def torch_qk_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return rms_norm(q, q_weight.shape, q_weight, eps), rms_norm(k, k_weight.shape, k_weight, eps)


def torch_qk_norm_backward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, dq_out: Tensor, dk_out: Tensor, eps: float
) -> Any:
    """Gradients by torch's fused backward, given the factors of the forward."""
    return [
        torch.ops.aten._fused_rms_norm_backward(dout, x, weight.shape, _factors(x, eps), weight, [True, True])
        for x, weight, dout in ((q, q_weight, dq_out), (k, k_weight, dk_out))
    ]


def liger_qk_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Any:
    function = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return [function.apply(x, weight, eps) for x, weight in ((q, q_weight), (k, k_weight))]


@lru_cache(maxsize=64)
def _factors(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
