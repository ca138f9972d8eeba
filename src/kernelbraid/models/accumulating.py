"""Unified operators whose backward adds the gradients of parameters to float32 tensors, in token order.

Autograd adds what each backward pass gives to what is there, so its sums depend on where a batch was cut. The
contracts add tokens in order, in blocks of 64 of the call's tokens, to a total that may go on from what is
there: pieces of multiples of 64 tokens then give the bits of the whole batch, however it is cut.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernelbraid.models.model import ModelWeights
from kernelbraid.models.operators import Operators
from kernelbraid.ops.add_rms_norm import registered as add_rms_norm
from kernelbraid.ops.dispatch import call, rows_contiguous
from kernelbraid.ops.embedding.api import embedding
from kernelbraid.ops.linear import registered as linear
from kernelbraid.ops.logprob.api import logprob
from kernelbraid.ops.moe_experts import registered as moe_experts
from kernelbraid.ops.qk_norm import registered as qk_norm
from kernelbraid.ops.rms_norm import registered as rms_norm

TOKEN_BLOCK = 64
"""Tokens between two places where a batch may be cut: of contracts `linear`, `rms_norm` and the others."""


class Accumulating(Operators):
    """Unified operators of one model, with a gradient of each of its parameters.

    Forward bits are those of `Operators`. Parameters must require a gradient; autograd gives them none.

    Args:
        weights: the model's parameters.
        more: other parameters that `linear` multiplies with, such as a value head's, by name.
    """

    def __init__(self, weights: ModelWeights, more: dict[str, Tensor] | None = None) -> None:
        named = {**dict(weights.tensors()), **(more or {})}
        self._names = {id(tensor): name for name, tensor in named.items()}
        self._grads = {name: torch.zeros_like(each, dtype=torch.float32) for name, each in named.items()}
        self.tied = weights.head is weights.embedding
        self._head = torch.zeros_like(self._grads["embedding"]) if self.tied else self._grads["head"]
        # a tied table's two sums are kept apart: otherwise the cut would decide which is added first

    def zero(self) -> None:
        """Begin an optimizer step."""
        for _, each in self._all():
            each.zero_()

    def gradients(self) -> dict[str, Tensor]:
        """Of each parameter by name, float32: the tensors themselves; call it once, at the end of a step."""
        if self.tied:
            self._grads["embedding"] += self._head
            self._head.zero_()
        return self._grads

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._grads.items()
        yield "head", self._head

    def of(self, weight: Tensor) -> Tensor:
        """What the gradient of a parameter is added to."""
        return self._grads[self._names[id(weight)]]

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().embedding(ids, weight)
        return embedding(ids, weight, weight_grad=self.of(weight))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not torch.is_grad_enabled():
            return super().rms_norm(x, weight, eps)
        out: Tensor = _RmsNorm.apply(x, weight, eps, self.of(weight))  # type: ignore[no-untyped-call]
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return super().add_rms_norm(x, residual, weight, eps)
        out: tuple[Tensor, Tensor] = _AddRmsNorm.apply(  # type: ignore[no-untyped-call]
            x, residual, weight, eps, self.of(weight)
        )
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return super().linear(x, weight, bias)
        of_bias = None if bias is None else self.of(bias)
        out: Tensor = _Linear.apply(x, weight, bias, self.of(weight), of_bias)  # type: ignore[no-untyped-call]
        return out

    def moe_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return super().moe_experts(x, weights, experts, gate_up, down)
        out: Tensor = _MoeExperts.apply(  # type: ignore[no-untyped-call]
            x, weights, experts, gate_up, down, self.of(gate_up), self.of(down)
        )
        return out

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return super().qk_norm(q, k, q_weight, k_weight, eps)
        out: tuple[Tensor, Tensor] = _QkNorm.apply(  # type: ignore[no-untyped-call]
            q, k, q_weight, k_weight, eps, self.of(q_weight), self.of(k_weight)
        )
        return out

    def logprob(
        self, x: Tensor, weight: Tensor, targets: Tensor, temperature: float, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return super().logprob(x, weight, targets, temperature, entropy=entropy)
        found = logprob(
            x, weight, targets, temperature=temperature, return_entropy=entropy, weight_grad=self._head
        )
        return (found, None) if isinstance(found, Tensor) else (found[0], found[1])


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.grad = eps, grad
        return rms_norm.normalize(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        call("rms_norm", "rms_norm_backward", x.device, x, weight, rows_contiguous(dout), ctx.eps, dx,
             ctx.grad, 1)  # fmt: skip
        return dx, None, None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, total = add_rms_norm.normalize(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.grad = eps, grad
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dtotal: Tensor | None) -> Any:
        total, weight = ctx.saved_tensors
        dout = torch.zeros_like(total) if dout is None else rows_contiguous(dout)
        others = None if dtotal is None else rows_contiguous(dtotal)
        dx = torch.empty_like(total)
        call("add_rms_norm", "add_rms_norm_backward", total.device, total, weight, dout, others, ctx.eps, dx,
             ctx.grad, 1)  # fmt: skip
        return dx, dx, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, bias_grad: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grad, ctx.bias_grad = grad, bias_grad
        return linear.multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        given = (x, weight, rows_contiguous(dout))
        call("linear", "linear_backward", x.device, *given, None, ctx.grad, ctx.bias_grad, 1)
        call("linear", "linear_backward", x.device, *given, dx, None, None, 0)
        return dx, None, None, None, None


class _MoeExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_grad: Tensor,
        down_grad: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weights, experts, gate_up, down)
        ctx.grads = gate_up_grad, down_grad
        return moe_experts.compute(x, weights, experts, gate_up, down)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        tensors = ctx.saved_tensors
        dx, dweights = torch.empty_like(tensors[0]), torch.empty_like(tensors[1])
        call("moe_experts", "moe_experts_backward", dx.device, *tensors, rows_contiguous(dout), dx, dweights,
             *ctx.grads, 1)  # fmt: skip
        return dx, dweights, None, None, None, None, None


class _QkNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        q_grad: Tensor,
        k_grad: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, q_weight, k_weight)
        ctx.eps, ctx.grads = eps, (q_grad, k_grad)
        return qk_norm.normalize(q, k, q_weight, k_weight, eps)

    @staticmethod
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> Any:
        q, k, q_weight, k_weight = ctx.saved_tensors
        dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        given = (q, k, q_weight, k_weight, rows_contiguous(dq_out), rows_contiguous(dk_out), ctx.eps)
        call("qk_norm", "qk_norm_backward", q.device, *given, dq, dk, *ctx.grads, 1)
        return dq, dk, None, None, None, None, None
