"""Tables of the angles' cosines and sines: the one place that computes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernelbraid.ops.rope.spec import LARGEST_HEAD
from kernelbraid.ops.rows import MOST_POSITIONS

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long waves are stretched by a factor, short ones stay, others are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"factor must be at least 1, got {self.factor!r}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be above 0 and below high_freq_factor, got {self.low_freq_factor!r} "
                f"and {self.high_freq_factor!r}"
            )
        if not self.original_max_position >= 1:
            raise ValueError(f"original_max_position must be at least 1, got {self.original_max_position!r}")

    def __call__(self, frequencies: Doubles) -> Doubles:
        """Scale angles per position."""
        turns = self.original_max_position * frequencies / (2 * np.pi)  # within the original context
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = np.clip(share, 0.0, 1.0)
        scaled: Doubles = (1 - share) * (frequencies / self.factor) + share * frequencies
        return scaled


def scaling_of(config: Mapping[str, Any] | None) -> Llama3Scaling | None:
    """Read the scaling that a Hugging Face config states, such as `config.rope_scaling`.

    Raises:
        ValueError: it is none of `default` and `llama3`.
    """
    kind = "default" if config is None else config.get("rope_type", config.get("type", "default"))
    if config is None or kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type must be default or llama3, got {kind!r}")
    return Llama3Scaling(
        float(config["factor"]),
        float(config["low_freq_factor"]),
        float(config["high_freq_factor"]),
        int(config["original_max_position_embeddings"]),
    )


def rope_tables(
    head_dim: int,
    max_positions: int,
    theta: float,
    scaling: Llama3Scaling | None = None,
    *,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of every position's angles, position * theta^(-2 i / head_dim).

    Args:
        head_dim: elements of a head, even, at most 256.
        max_positions: rows of the tables, at most 131072.
        theta: base of the angles, such as 10000 (Llama 2), 500000 (Llama 3), 1000000 (Qwen 2 and 3).
        scaling: of Llama 3.1 and later; None for the models without.
        device: where the tables go; they are computed on the CPU.

    Returns:
        (cos, sin), both [max_positions, head_dim / 2] float32.

    Raises:
        ValueError: an argument lies outside these limits; the message names it.

    Bits: computed in float64 and rounded once to float32, on the CPU wherever they go.
    """
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or not 2 <= head_dim <= LARGEST_HEAD:
        raise ValueError(f"head_dim must be an int between 2 and {LARGEST_HEAD}, got {head_dim!r}")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    if isinstance(max_positions, bool) or not isinstance(max_positions, int):
        raise ValueError(f"max_positions must be an int, got {max_positions!r}")
    if not 1 <= max_positions <= MOST_POSITIONS:
        raise ValueError(f"max_positions must be between 1 and {MOST_POSITIONS}, got {max_positions}")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 < theta < float("inf"):
        raise ValueError(f"theta must be a finite number above 1, got {theta!r}")
    frequencies = float(theta) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = np.arange(max_positions, dtype=np.float64)[:, None] * frequencies[None, :]
    cos, sin = (torch.from_numpy(table.astype(np.float32)) for table in (np.cos(angles), np.sin(angles)))
    return cos.to(device), sin.to(device)
