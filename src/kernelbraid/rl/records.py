"""What a rollout records: completions, what they were drawn with and under, and batches of them.

The engine that draws writes these records; `reuse` reads them to decide whether they may stand for a
recomputation. Tensors are on the host, and nothing changes them after they were recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-5, 1e5
"""Limits of contract `logprob` 1; 0 is greedy and has no log-probability of its own."""


class Finish(StrEnum):
    """Why a completion ended."""

    END = "end"
    """A token that ends sequences, or one of `stop_tokens`; it belongs to the completion."""
    STOP_STRING = "stop_string"
    """One of the strings to stop at; tokens up to the one that completed it are kept."""
    LENGTH = "length"
    """It reached `max_tokens` or the end of the cache: truncated."""
    ABORTED = "aborted"
    """The rollout was stopped or the request was given up: truncated."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that tokens are drawn with, as contract `sample` 1 orders them, and when to stop.

    Raises:
        ValueError: a parameter lies outside its limits; the message names both.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    temperature: float = 1.0
    top_p: float = 1.0
    """At most 1, which cuts nothing."""
    top_k: int = 0
    """0 cuts nothing."""
    min_p: float = 0.0
    """0 cuts nothing."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), by ascending id."""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        greedy = self.temperature == 0
        if not greedy and not LOWEST_TEMPERATURE < self.temperature <= HIGHEST_TEMPERATURE:
            limits = f"0, or above {LOWEST_TEMPERATURE} and at most {HIGHEST_TEMPERATURE}"
            raise ValueError(f"temperature must be {limits}, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (no limit) or positive, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be positive and finite, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not np.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        ids = [token for token, _ in self.logit_bias]
        if ids != sorted(set(ids)) or any(token < 0 for token in ids):
            raise ValueError(f"logit_bias must name each token id once, ascending, got {ids}")
        if any(np.isnan(added) for _, added in self.logit_bias):
            raise ValueError("logit_bias must not add NaN")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if "" in self.stop:
            raise ValueError("stop must not hold the empty string")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def inverse_temperature(self) -> float:
        """What logits are multiplied by: float32(1 / temperature), as contract `logprob` 1 rounds it."""
        return float(np.float32(1 / self.temperature)) if self.temperature else float("inf")

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def changes_logits(self) -> bool:
        """Penalties or biases: logits are changed before the temperature."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return not neutral or any(added != 0 for _, added in self.logit_bias)

    @property
    def processed(self) -> bool:
        """Whether tokens are drawn from another distribution than the whole one at the temperature."""
        return self.truncates or self.changes_logits

    def document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        found = asdict(self)
        return {**found, "logit_bias": [list(pair) for pair in self.logit_bias]}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Sampling":
        """What `document` gave."""
        given = dict(document)
        given["logit_bias"] = tuple((int(token), float(added)) for token, added in given["logit_bias"])
        return cls(**{**given, "stop": tuple(given["stop"]), "stop_tokens": tuple(given["stop_tokens"])})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights and arithmetic that probabilities come from.

    Equal snapshots give equal bits: that is what the operators' contracts promise, and the spot check tests.
    """

    version: int
    """Counts the optimizer's steps of one run."""
    bits_id: str
    """Of everything between token ids and log-probabilities."""
    dtype: str
    """In which the weights are used, such as `float32` or `bfloat16`."""
    device: str
    """The architecture as in bits ids: `cpu`, `sm_90`."""
    run: str
    """Name of the process that counts the versions, a random one for instance. A resumed run is another one:
    it may begin at an earlier checkpoint and count the same versions again."""
    weights: str | None = None
    """Identity of the weights across processes, such as a checkpoint's hash; None where nobody made one."""

    def __post_init__(self) -> None:
        for name in ("bits_id", "dtype", "device", "run"):
            if not getattr(self, name):
                raise ValueError(f"{name} of a snapshot must not be empty")
        if self.version < 0:
            raise ValueError(f"version must not be negative, got {self.version}")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens from `start` on were drawn under this version of the weights."""

    start: int
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One answer to one prompt, with what its tokens were drawn from.

    Raises:
        ValueError: tensors disagree in length or dtype, or versions do not start with the first token.
    """

    prompt: Tensor
    """int32 [P], at least one token."""
    tokens: Tensor
    """int32 [L]; L may be 0."""
    sampling: Sampling
    finish: Finish
    snapshot: Snapshot
    """Its version is that of the first token."""
    prompt_index: int
    """Position of the prompt in the order of the task: with `sample_index` the request's name."""
    sample_index: int
    """Number of the completion among those of its prompt."""
    logprobs: Tensor | None = None
    """float32 [L]: of each token under the whole distribution at the temperature, or None."""
    processed_logprobs: Tensor | None = None
    """float32 [L]: of each token under what it was drawn from, where that was cut, penalised or biased."""
    values: Tensor | None = None
    """float32 [L]: what a value model gave each token's state, for PPO."""
    drawn: tuple[Drawn, ...] = ()
    """Versions that tokens were drawn under, where weights changed meanwhile; empty: one version."""
    prefix_version: int | None = None
    """Version that keys and values of the prompt were computed under, where it is not the first token's: a
    prefix kept in a cache over an update of the weights, or an update between two chunks of a prompt."""
    as_drawn: bool = True
    """False where the tokens are not those that were drawn: edited, or a text that was tokenised again."""

    def __post_init__(self) -> None:
        _check_tokens("prompt", self.prompt)
        _check_tokens("tokens", self.tokens)
        if not len(self.prompt):
            raise ValueError("prompt must hold at least one token")
        for name in ("logprobs", "processed_logprobs", "values"):
            each = getattr(self, name)
            if each is None:
                continue
            if each.dtype != torch.float32 or each.shape != self.tokens.shape or not each.is_cpu:
                found = f"{each.dtype} {list(each.shape)} on {each.device}"
                raise ValueError(f"{name} must be float32 [{len(self.tokens)}] on the CPU, got {found}")
        starts, end = [each.start for each in self.drawn], len(self.tokens)
        if starts and (starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] > end):
            raise ValueError(f"drawn must start at token 0 and ascend to at most {end}, got {starts}")
        if self.drawn and self.drawn[0].version != self.snapshot.version:
            raise ValueError(f"drawn must start with the snapshot's version {self.snapshot.version}")
        if self.prompt_index < 0 or self.sample_index < 0:
            raise ValueError("prompt_index and sample_index must not be negative")

    @property
    def truncated(self) -> bool:
        return self.finish in (Finish.LENGTH, Finish.ABORTED)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that the prompt's keys or at least one token came from, each once, in order."""
        ends = [*(each.start for each in self.drawn[1:]), len(self.tokens)]
        held = [each.version for each, end in zip(self.drawn, ends, strict=False) if each.start < end]
        first = self.prefix_version if self.prefix_version is not None else self.snapshot.version
        return tuple(dict.fromkeys([first, *(held or [self.snapshot.version])]))


@dataclass(frozen=True, slots=True)
class Packed:
    """Tokens of completions one after another: what losses take."""

    tokens: Tensor
    """int32 [T]."""
    cu_seqlens: Tensor
    """int32 [N + 1]: where each completion starts, and the end."""
    max_seqlen: int


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Completions of one rollout, those of a prompt beside each other.

    Raises:
        ValueError: a request occurs twice, or the completions of a prompt are not adjacent.
    """

    number: int
    """Counts the rollouts of a run."""
    completions: tuple[Completion, ...]

    def __post_init__(self) -> None:
        names = [(each.prompt_index, each.sample_index) for each in self.completions]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"prompt {twice[0]} has two completions of number {twice[1]}")
        if len(self.groups) != len({prompt for prompt, _ in names}):
            raise ValueError("completions of one prompt must be adjacent")

    def __len__(self) -> int:
        return len(self.completions)

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """Completions of each prompt, as ranges of positions."""
        prompts = [each.prompt_index for each in self.completions]
        starts = [i for i, each in enumerate(prompts) if i == 0 or each != prompts[i - 1]]
        return tuple(range(a, b) for a, b in pairwise([*starts, len(prompts)]) if a < b)

    def group_offsets(self) -> Tensor:
        """int32 [groups + 1]: where each prompt's completions start, and the end."""
        return torch.tensor([0, *(each.stop for each in self.groups)], dtype=torch.int32)

    def counted(self, *, mask_truncated: bool = False) -> Tensor:
        """bool [T]: tokens that count in a loss, all of them, or none of truncated completions."""
        flags = [
            torch.full((len(each.tokens),), not (mask_truncated and each.truncated))
            for each in self.completions
        ]
        return torch.cat([torch.empty(0, dtype=torch.bool), *flags])

    def packed(self, chosen: Sequence[int] | None = None) -> Packed:
        """Tokens of all completions, or of those at some positions, in the order given."""
        held = [self.completions[i] for i in chosen] if chosen is not None else list(self.completions)
        return pack(held)


def pack(completions: Sequence[Completion]) -> Packed:
    """Put the tokens of completions one after another."""
    lengths = [len(each.tokens) for each in completions]
    offsets = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)], dtype=torch.int32)
    tokens = torch.cat([torch.empty(0, dtype=torch.int32), *(each.tokens for each in completions)])
    return Packed(tokens, offsets, max(lengths, default=0))


def _check_tokens(name: str, tokens: Tensor) -> None:
    if tokens.dtype != torch.int32 or tokens.dim() != 1 or not tokens.is_cpu:
        found = f"{tokens.dtype} {list(tokens.shape)} on {tokens.device}"
        raise ValueError(f"{name} must be int32 [tokens] on the CPU, got {found}")
