"""The public functions of log-probabilities: checks and autograd are in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features, refuse_tangents
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.logprob import registered
from kernelbraid.ops.logprob.spec import CONTRACT

__all__ = ["head_logits", "logprob", "logprob_of_logits", "next_token_logprobs"]


def logprob(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_lse: bool = False,
    weight_grad: Tensor | None = None,
    bias: object = None,
    softcap: object = None,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probability of each token's target under softmax(x @ weight.T / temperature), without the logits.

    Log-probabilities and entropies are differentiable once in x and weight, under `torch.compile` and
    activation checkpointing too. Memory beside inputs and results: forward, 12 bytes for every block of 128
    logits of at most 4096 tokens on the CPU and 8192 on a GPU (at a vocabulary of 151936: 58 and 117 MB);
    backward, the gradients of the logits of a piece of tokens, at most 32 MiB or 64 tokens on the CPU, 512
    MiB or 128 tokens on a GPU, and dweight in float32.

    Args:
        x: hidden states [..., width], float32 on the CPU, bfloat16 or float16 on a GPU; at most 131072 rows.
        weight: the head [vocabulary, width], dtype and device of x.
        targets: [...] int32 or int64, as x without its last axis. -100 means that a token does not count: its
            log-probability is 0 and has no gradient. On a GPU, where values are not checked, so does every
            other target outside of the vocabulary.
        temperature: logits are multiplied by float32(1 / temperature); above 1e-5, at most 1e5.
        return_entropy: return also the entropies of the whole distributions.
        return_lse: return also the log-sum-exps of the scaled logits, which have no gradient.
        weight_grad: float32 [vocabulary, width] to which backward adds the gradient of weight, which then
            gets none of its own; eager calls only.
        bias: must be None: the contract does not cover a bias.
        softcap: must be None: the contract does not cover capped logits.

    Returns:
        [...] float32, or a tuple of it with what else is asked for: entropies, then log-sum-exps.

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, the installed implementation changed since it was promoted,
            or a gradient is differentiated again.

    Bits: contract `logprob` 1. A token's bits depend on its row, its target, the weight and the temperature
        alone; the gradient of weight adds tokens in the order of the rows of x.
    """
    if bias is not None or softcap is not None:
        refuse_features(CONTRACT, bias=bias, softcap=softcap)
    check_is_tensor("x", x)
    check_is_tensor("weight", weight)
    check_is_tensor("targets", targets)
    refuse_tangents("logprob", x=x, weight=weight)
    rows, wanted = _flat(x, targets)
    if weight_grad is not None:
        if is_traced(x):
            raise ValueError("weight_grad must be None under torch.compile and other traces")
        registered.check_weight_grad(weight_grad, x, weight)
    if is_traced(x):
        found = registered.logprob(rows, weight, wanted, temperature)
    elif torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        found = registered.compute_with_grad(rows, weight, wanted, temperature, weight_grad)
    else:
        found = registered.compute(rows, weight, wanted, temperature)
    return _chosen(found, targets, return_entropy, return_lse)


def next_token_logprobs(x: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each row's next token, as rollout records it: `logprob` without gradients.

    Args:
        x, weight, temperature: as in `logprob`.
        tokens: [...] int32 or int64, the tokens that were sampled.

    Returns:
        [...] float32.

    Raises:
        ValueError: as `logprob`.

    Bits: those of `logprob` of the same rows, at once or token by token.
    """
    with torch.no_grad():
        found = logprob(x, weight, tokens, temperature=temperature)
    assert isinstance(found, Tensor)
    return found


def head_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Logits x @ weight.T in float32, to sample from: those whose log-probabilities `logprob` gives.

    Not differentiable.

    Args:
        x: hidden states [..., width], float32 on the CPU, bfloat16 or float16 on a GPU.
        weight: the head [vocabulary, width], dtype and device of x.

    Returns:
        [..., vocabulary] float32, not rounded to 16 bits.

    Raises:
        ValueError: an argument lies outside the contract, or requires a gradient.

    Bits: contract `logprob` 1: a row's bits depend on the row and the weight alone.
    """
    check_is_tensor("x", x)
    check_is_tensor("weight", weight)
    _refuse_gradients("head_logits", x=x, weight=weight)
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    out = (registered.head_logits if is_traced(x) else registered.compute_logits)(rows, weight)
    return out.view(*x.shape[:-1], weight.shape[0])


def logprob_of_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probability of each token's target under softmax(logits / temperature), of logits in memory.

    Not differentiable: train with `logprob`.

    Args:
        logits: [..., vocabulary] float32, on a GPU bfloat16 or float16 too, which are widened exactly.
        targets, temperature, return_entropy, return_lse: as in `logprob`.

    Returns:
        As `logprob`.

    Raises:
        ValueError: an argument lies outside the contract, or logits require a gradient.

    Bits: of `head_logits(x, weight)`, those of `logprob(x, weight, ...)`.
    """
    check_is_tensor("logits", logits)
    check_is_tensor("targets", targets)
    _refuse_gradients("logprob_of_logits", logits=logits)
    rows, wanted = _flat(logits, targets)
    compute = registered.logprob_of_logits if is_traced(logits) else registered.compute_of_logits
    return _chosen(compute(rows, wanted, temperature), targets, return_entropy, return_lse)


def _flat(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and their targets, one below the other."""
    if x.dim() == 0 or targets.shape != x.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of the rows before them, {list(x.shape[:-1])}, "
            f"got {list(targets.shape)}"
        )
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows, targets.reshape(-1)


def _chosen(
    found: tuple[Tensor, Tensor, Tensor], targets: Tensor, return_entropy: bool, return_lse: bool
) -> Tensor | tuple[Tensor, ...]:
    values, entropies, lse = (each.view(targets.shape) for each in found)
    asked = (values, *(entropies,) * return_entropy, *(lse.detach(),) * return_lse)
    return asked if len(asked) > 1 else values


def _refuse_gradients(function: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient, which {function} has not: use torch.no_grad()")
