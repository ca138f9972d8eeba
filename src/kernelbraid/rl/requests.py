"""What an engine is asked for, and the limits within which it works."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernelbraid.rl.records import Sampling
from kernelbraid.rl.reuse import Named

LARGEST_PAGE = 256
"""Of contract `attention` 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One completion of one prompt.

    Raises:
        ValueError: the prompt is empty or no int32 [P] on the CPU, or a number lies outside its limits.
    """

    prompt: Tensor
    """int32 [P] on the CPU, at least one token."""
    sampling: Sampling
    prompt_index: int
    """Position of the prompt in the order of the task."""
    sample_index: int = 0
    """Number of the completion among those of its prompt."""
    seed: int | None = None
    """int64: its random numbers are those of (seed, sample_index, position). By default made of the engine's
    seed and prompt_index."""

    def __post_init__(self) -> None:
        if self.prompt.dtype != torch.int32 or self.prompt.dim() != 1 or not self.prompt.is_cpu:
            found = f"{self.prompt.dtype} {list(self.prompt.shape)} on {self.prompt.device}"
            raise ValueError(f"prompt must be int32 [tokens] on the CPU, got {found}")
        if not len(self.prompt):
            raise ValueError("prompt must hold at least one token")
        for name in ("prompt_index", "sample_index"):
            value = getattr(self, name)
            if not 0 <= value < 2**31:
                raise ValueError(f"{name} must lie between 0 and {2**31 - 1}, got {value}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an int64, got {self.seed}")

    @property
    def name(self) -> tuple[int, int]:
        return self.prompt_index, self.sample_index


def group(
    prompt: Sequence[int] | Tensor,
    sampling: Sampling,
    *,
    prompt_index: int,
    samples: int,
    seed: int | None = None,
) -> list[Request]:
    """The requests for several completions of one prompt.

    Args:
        prompt: token ids.
        sampling: parameters of all of them.
        prompt_index: position of the prompt in the order of the task.
        samples: how many; they get the sample indices from 0.
        seed: see `Request`.
    """
    tokens = torch.as_tensor(prompt, dtype=torch.int32)
    return [Request(tokens, sampling, prompt_index, sample, seed) for sample in range(samples)]


def prompt_seed(seed: int, prompt_index: int) -> int:
    """An int64 made of a run's seed and a prompt's position, by SHA-256."""
    digest = hashlib.sha256(f"{seed}/{prompt_index}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of an engine. None of them changes a bit of any completion, but for `seed` and `end_tokens`.

    Raises:
        ValueError: a limit is out of range; the message names it.
    """

    cache_tokens: int = 16384
    """Tokens that the cache has pages for, all running requests together; rounded up to whole pages."""
    page_size: int = 16
    """Tokens of a page, at most 256."""
    max_sequences: int = 64
    """Requests that run at a time."""
    step_tokens: int = 512
    """The most tokens of a step: one for each running completion, the rest for chunks of prompts."""
    share_prefixes: bool = True
    """Share full pages of equal beginnings of prompts."""
    record: tuple[Named, ...] = (Named.WHOLE, Named.PROCESSED)
    """Which log-probabilities completions carry."""
    end_tokens: tuple[int, ...] = ()
    """Token ids that end every completion, beside `Sampling.stop_tokens`."""
    seed: int = 0
    """Of the run: see `Request.seed`."""
    graphs: bool | None = None
    """Pad decode steps to a few sizes and, on a GPU, replay a CUDA graph of each. None: on GPUs alone,
    where the operators allow it."""
    largest_graph: int = 256
    """Most rows of a step that is padded; a larger one runs as it is."""

    def __post_init__(self) -> None:
        for name in ("cache_tokens", "max_sequences", "step_tokens", "largest_graph"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.page_size <= LARGEST_PAGE:
            raise ValueError(f"page_size must lie between 1 and {LARGEST_PAGE}, got {self.page_size}")
        if self.step_tokens < self.max_sequences:
            raise ValueError(
                f"step_tokens must be at least max_sequences {self.max_sequences}, got {self.step_tokens}"
            )

    @property
    def pages(self) -> int:
        return -(-self.cache_tokens // self.page_size)


@dataclass(slots=True)
class Statistics:
    """What an engine did since it was made or since `Engine.reset_statistics`."""

    steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed, and tokens computed again after a preemption."""
    prefill_seconds: float = 0.0
    """Of steps with a piece of a prompt, whatever else was in them."""
    decode_tokens: int = 0
    """Tokens drawn in steps without a piece of a prompt."""
    decode_seconds: float = 0.0
    """Of those steps."""
    decode_steps: int = 0
    """How many there were."""
    decode_keys: int = 0
    """Keys that they read in each layer, of all requests together."""
    drawn_tokens: int = 0
    """All tokens that were drawn."""
    batch_sizes: dict[int, int] = field(default_factory=dict)
    """Requests in a step without a piece of a prompt: how many such steps."""
    most_pages: int = 0
    """The most pages that were held at a time."""
    pages: int = 0
    """Of the cache."""
    preemptions: int = 0
    prefix_hits: int = 0
    """Prompt tokens whose keys were shared instead of computed."""
    completions: int = 0

    def document(self) -> dict[str, object]:
        """As JSON can hold it, with tokens a second; None where there was no such step."""

        def rate(tokens: int, seconds: float) -> float | None:
            return tokens / seconds if seconds else None

        return {
            **{name: getattr(self, name) for name in self.__slots__ if name != "batch_sizes"},
            "batch_sizes": {str(size): count for size, count in sorted(self.batch_sizes.items())},
            "prefill_tokens_per_second": rate(self.prefill_tokens, self.prefill_seconds),
            "decode_tokens_per_second": rate(self.decode_tokens, self.decode_seconds),
        }
