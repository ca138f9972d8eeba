"""The public function of sampling: what it checks of its tensors is in registered.py."""

import torch
from torch import Tensor

from kernelbraid.ops.arguments import check_is_tensor, refuse_features
from kernelbraid.ops.dispatch import is_traced
from kernelbraid.ops.sample import registered
from kernelbraid.ops.sample.spec import CONTRACT

__all__ = ["sample"]

LARGEST_INTEGER, LARGEST_SEED = (1 << 31) - 1, (1 << 63) - 1
LARGEST_TEMPERATURE = 1e5


def sample(
    logits: Tensor,
    *,
    seeds: Tensor | int,
    positions: Tensor | int,
    samples: Tensor | int = 0,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    penalties: object = None,
    generator: object = None,
) -> Tensor:
    """Draw a token a row, from random numbers that belong to (seed, sample, position) of the row alone.

    Everything but logits is a number for all rows, or a tensor [...] with one for each. Cuts apply in the
    order min-p, top-k, top-p, each to what is left, after the temperature. Tensors' values are checked on the
    CPU only; on a GPU every value has a meaning, stated in the contract.

    Args:
        logits: [..., vocabulary] float32, such as those of `head_logits`; at most 131072 rows.
        seeds: any int64: that of a request's prompt.
        positions: of the token in its sequence, not negative, int32.
        samples: which of a prompt's completions it belongs to, not negative, int32.
        temperature: logits are multiplied by float32(1 / temperature), as in `logprob`; 0 is greedy, at most
            1e5.
        top_k: keep the largest top_k logits, ties by index; 0 keeps all.
        top_p: keep the fewest tokens whose probabilities reach top_p of what is left; above 0, 1 keeps
            all.
        min_p: keep tokens at least min_p times as probable as the most probable; from 0 to 1.
        penalties: must be None: the contract does not cover penalties.
        generator: must be None: there is no stream of random numbers.

    Returns:
        [...] int32.

    Raises:
        ValueError: an argument lies outside the contract; the message names it and its limit.
        RuntimeError: the GPU is older than sm_80, or the installed implementation changed since it was
            promoted.

    Bits: contract `sample` 1. A token depends on its row and the numbers given for it alone: not on the
        batch, its size or order.
    """
    if penalties is not None or generator is not None:
        refuse_features(CONTRACT, penalties=penalties, generator=generator)
    check_is_tensor("logits", logits)
    if not logits.dim():
        raise ValueError("logits must have at least 1 dimension, got a scalar")
    shape = logits.shape[:-1]
    temperatures = _column("temperature", temperature, logits, torch.float64, 0.0, LARGEST_TEMPERATURE)
    smallest = 2.0**-149
    given = (
        (1 / temperatures).to(torch.float32),
        _column("top_k", top_k, logits, torch.int32, 0, LARGEST_INTEGER),
        _column("top_p", top_p, logits, torch.float32, smallest, 1.0),
        _column("min_p", min_p, logits, torch.float32, 0.0, 1.0),
        _column("seeds", seeds, logits, torch.int64, -LARGEST_SEED - 1, LARGEST_SEED),
        _column("samples", samples, logits, torch.int32, 0, LARGEST_INTEGER),
        _column("positions", positions, logits, torch.int32, 0, LARGEST_INTEGER),
    )
    rows = logits.detach() if logits.dim() == 2 else logits.detach().reshape(-1, logits.shape[-1])
    tokens = (registered.sample if is_traced(logits) else registered.choose)(rows, *given)
    return tokens.view(shape)


def _column(
    name: str, given: Tensor | float, logits: Tensor, dtype: torch.dtype, low: float, high: float
) -> Tensor:
    """One number a row: of a tensor like the rows, or the same for all."""
    shape = logits.shape[:-1]
    whole = not dtype.is_floating_point
    if isinstance(given, Tensor):
        if given.shape != shape:
            raise ValueError(f"{name} must have the rows' shape {list(shape)}, got {list(given.shape)}")
        if given.device != logits.device:
            raise ValueError(
                f"{name} is on {given.device}, logits on {logits.device}: move them to one device"
            )
        if given.dtype == torch.bool or given.is_complex() or (whole and given.is_floating_point()):
            raise ValueError(f"{name} must be {'integers' if whole else 'numbers'}, got {given.dtype}")
        if given.is_cpu and not is_traced(given):
            wrong = ~((given >= low) & (given <= high))
            if wrong.any():
                raise ValueError(
                    f"{name} must lie between {low:g} and {high:g}, got {given[wrong][0].item()}"
                )
        return given.reshape(-1).to(dtype)
    if isinstance(given, bool) or not isinstance(given, int if whole else int | float):
        raise ValueError(f"{name} must be {'an int' if whole else 'a number'} or a tensor, got {given!r}")
    if not low <= given <= high:
        raise ValueError(f"{name} must lie between {low:g} and {high:g}, got {given!r}")
    return torch.full((shape.numel(),), given, dtype=dtype, device=logits.device)
