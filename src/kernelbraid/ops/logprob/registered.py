"""Log-probabilities as registered operators of torch: implementation, fake kernels, autograd.

    kernelbraid::logprob              of rows [T, width] under a head, differentiable in x and weight
    kernelbraid::logprob_backward     its gradients
    kernelbraid::logprob_of_logits    of logits [T, vocabulary] in memory, not differentiable
    kernelbraid::head_logits          those logits, not differentiable

Outside of a trace the public functions go round the operators, whose boundary costs more than a small call:
the same functions run, the same bits come out.
"""

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
    check_written,
    contract_of,
    dtypes_of,
)
from kernelbraid.ops.dispatch import count_write, is_traced, refuse_second
from kernelbraid.ops.logprob.spec import IGNORED

SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-5, 1e5
TARGET_DTYPES = (torch.int32, torch.int64)
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_call = partial(dispatch.call, "logprob")


# ---- Calls with their checks ----


def check_head(x: Tensor, weight: Tensor) -> None:
    """Check rows and the head that they meet."""
    contract = contract_of("logprob", "x", x)
    check_tensor("x", x, dtypes_of(contract), 2, x.device)
    check_tensor("weight", weight, (x.dtype,), 2, x.device)
    check_axis(contract, "width", "x", x.shape[1])
    check_axis(contract, "tokens", "x", x.shape[0])
    check_axis(contract, "vocabulary", "weight", weight.shape[0])
    check_shape("weight", weight, (None, x.shape[1]), "x")


def check_targets(targets: Tensor, tokens: int, vocabulary: int, device: torch.device) -> None:
    """Check targets; their values where the host can see them."""
    check_tensor("targets", targets, TARGET_DTYPES, 1, device)
    check_shape("targets", targets, (tokens,), "x")
    if targets.is_cpu and tokens:
        wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != IGNORED)
        if wrong.any():
            raise ValueError(
                f"targets must lie between 0 and {vocabulary - 1}, or be {IGNORED} for a token that does not "
                f"count; got {int(targets[wrong][0])}"
            )


def check_temperature(temperature: float) -> None:
    check_number("temperature", temperature, SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE)


def check_weight_grad(weight_grad: Tensor, x: Tensor, weight: Tensor) -> None:
    """Check what the gradient of the weight is added to."""
    check_tensor("weight_grad", weight_grad, (torch.float32,), 2, x.device)
    check_shape("weight_grad", weight_grad, weight.shape, "weight")
    check_written("weight_grad", weight_grad, {"x": x, "weight": weight})
    if not weight.requires_grad:
        raise ValueError("weight_grad is given, but weight does not require a gradient")
    if weight_grad.requires_grad:
        raise ValueError("weight_grad must not require a gradient: it is written in place")


def _int32(targets: Tensor, vocabulary: int) -> Tensor:
    """Targets as kernels read them; whatever lies outside of the vocabulary stays outside."""
    return targets if targets.dtype == torch.int32 else targets.clamp(-1, vocabulary).to(torch.int32)


def compute(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and log-sum-exps of rows; see `api.logprob`."""
    check_head(x, weight)
    check_targets(targets, x.shape[0], weight.shape[0], x.device)
    check_temperature(temperature)
    outputs = _outputs(x)
    if x.shape[0]:
        wanted = _int32(targets, weight.shape[0])
        _call("logprob", x.device, x, weight, wanted, float(temperature), *outputs)
    return outputs


def _outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor each, as operators must return."""
    logprob, entropy, lse = (torch.empty(x.shape[0], dtype=torch.float32, device=x.device) for _ in range(3))
    return logprob, entropy, lse


def differentiate(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    dlogprob: Tensor,
    dentropy: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    needed: list[bool],
    weight_grad: Tensor | None = None,
) -> list[Tensor]:
    """Return those gradients of `compute` in x and weight that are needed.

    The weight's is added to `weight_grad` instead, if there is one.
    """
    check_head(x, weight)
    check_targets(targets, x.shape[0], weight.shape[0], x.device)
    check_temperature(temperature)
    tokens = x.shape[0]
    numbers = {"dlogprob": dlogprob, "dentropy": dentropy, "entropy": entropy, "lse": lse}
    for name, tensor in numbers.items():
        if tensor is not None:
            check_tensor(name, tensor, (torch.float32,), 1, x.device)
            check_shape(name, tensor, (tokens,), "x")
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight = weight_grad if needed[1] else None
    if needed[1] and weight_grad is None:
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    if tokens and (dx is not None or dweight is not None):
        given = (dlogprob, dentropy, lse, None if dentropy is None else entropy)
        wanted = _int32(targets, weight.shape[0])
        written = (dx, dweight, int(weight_grad is not None))
        _call("logprob_backward", x.device, x, weight, wanted, float(temperature), *given, *written)
    if weight_grad is not None:
        count_write(weight_grad)
        dweight = None
    return [g for g in (dx, None if dweight is None else dweight.to(weight.dtype)) if g is not None]


def compute_of_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same of logits in memory; see `api.logprob_of_logits`."""
    contract = contract_of("logprob", "logits", logits)
    dtypes = LOGIT_DTYPES if logits.is_cuda else (torch.float32,)
    check_tensor("logits", logits, dtypes, 2, logits.device)
    check_axis(contract, "tokens", "logits", logits.shape[0])
    check_axis(contract, "vocabulary", "logits", logits.shape[1])
    check_targets(targets, logits.shape[0], logits.shape[1], logits.device)
    check_temperature(temperature)
    outputs = _outputs(logits)
    if logits.shape[0]:
        wanted = _int32(targets, logits.shape[1])
        _call("logprob_of_logits", logits.device, logits, wanted, float(temperature), *outputs)
    return outputs


def compute_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Logits in float32, as `compute` sees them before the temperature."""
    check_head(x, weight)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    if out.numel():
        _call("logits", x.device, x, weight, out)
    return out


# ---- Registered operators ----


@torch.library.custom_op("kernelbraid::logprob", mutates_args=())
def logprob(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    return compute(x, weight, targets, temperature)


@logprob.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x)


@torch.library.custom_op("kernelbraid::logprob_backward", mutates_args=())
def logprob_backward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    dlogprob: Tensor,
    dentropy: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    needed: list[bool],
) -> list[Tensor]:
    return differentiate(x, weight, targets, temperature, dlogprob, dentropy, entropy, lse, needed)


@logprob_backward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    dlogprob: Tensor,
    dentropy: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    needed: list[bool],
) -> list[Tensor]:
    return [
        torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for each, need in zip((x, weight), needed, strict=True)
        if need
    ]


@torch.library.custom_op("kernelbraid::logprob_of_logits", mutates_args=())
def logprob_of_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    return compute_of_logits(logits, targets, temperature)


@logprob_of_logits.register_fake
def _(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(logits)


@torch.library.custom_op("kernelbraid::head_logits", mutates_args=())
def head_logits(x: Tensor, weight: Tensor) -> Tensor:
    return compute_logits(x, weight)


@head_logits.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)


# ---- Autograd ----


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, targets, ctx.temperature = inputs
    ctx.save_for_backward(x, weight, targets, *output[1:])


def _gradients(
    ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:2])
    if not any(needed) or (dlogprob is None and dentropy is None):
        return None, None, None, None
    x, weight, targets, entropy, lse = ctx.saved_tensors
    dlogprob = torch.zeros_like(lse) if dlogprob is None else dlogprob.resolve_neg().contiguous()
    dentropy = None if dentropy is None else dentropy.resolve_neg().contiguous()
    given = (x, weight, targets, ctx.temperature, dlogprob, dentropy, entropy, lse, needed)
    weight_grad = getattr(ctx, "weight_grad", None)
    if is_traced(x) or torch.is_grad_enabled():
        if weight_grad is not None:
            raise RuntimeError("weight_grad takes no part in recorded gradients: leave create_graph off")
        found = iter(logprob_backward(*given))
    else:
        found = iter(differentiate(*given, weight_grad))
    own = needed[0], needed[1] and weight_grad is None
    return (*(next(found) if need else None for need in own), None, None)


logprob.register_autograd(_gradients, setup_context=_save)
logprob_backward.register_autograd(refuse_second("logprob"))


class LogProb(torch.autograd.Function):
    """The differentiable log-probabilities of eager calls."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, temperature: float, weight_grad: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = compute(x, weight, targets, temperature)
        _save(ctx, (x, weight, targets, temperature), found)
        ctx.weight_grad = weight_grad
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found[2])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, *gradients), None)


def compute_with_grad(
    x: Tensor, weight: Tensor, targets: Tensor, temperature: float, weight_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`compute`, recorded by autograd."""
    found: tuple[Tensor, Tensor, Tensor] = LogProb.apply(x, weight, targets, temperature, weight_grad)  # type: ignore[no-untyped-call]
    return found
