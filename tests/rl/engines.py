"""Small decoders and engines, and what a rollout is compared with."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from kernelbraid.models.config import ModelConfig, named
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Decoder
from kernelbraid.ops.linear.api import linear
from kernelbraid.ops.logprob.api import logprob_of_logits
from kernelbraid.rl.drawing import processed_logits
from kernelbraid.rl.records import Completion, RolloutBatch, Sampling
from kernelbraid.rl.requests import Request, group
from kernelbraid.rl.rollout import Engine, EngineSettings

POSITIONS = 128


@cache
def decoder(name: str = "SmolLM2-135M", seed: int = 0) -> Decoder:
    """Two narrow layers of a model's kind; nothing may change it."""
    config = replace(named(name).small(layers=2, vocab=180), hidden=64, intermediate=96)
    config = replace(config, query_heads=2, kv_heads=1, tied=False)
    if config.experts is not None:
        config = replace(config, experts=replace(config.experts, count=4, top_k=2))
    return remade(config, seed)


def remade(config: ModelConfig, seed: int = 0) -> Decoder:
    """One of its own, with distributions that are neither even nor all on one token."""
    weights = drawn(config, dtype=torch.float32, seed=seed)
    weights.head.mul_(12)
    return Decoder(config, weights, POSITIONS)


def value_head(hidden: torch.Tensor) -> torch.Tensor:
    """A fixed one, on a unified operator."""
    weight = torch.linspace(-1, 1, hidden.shape[1])[None]
    return linear(hidden, weight)[:, 0]


def text_of(ids: Sequence[int]) -> str:
    """Three letters a token, so that strings span tokens."""
    return "".join(f"{chr(97 + i // 26 % 26)}{chr(97 + i % 26)} " for i in ids)


STOPS = ("a ", "e ", "i ", "zz")
KINDS = (
    Sampling(max_tokens=14),
    Sampling(max_tokens=9, temperature=0.6, top_k=20, top_p=0.9),
    Sampling(max_tokens=17, temperature=1.3, min_p=0.05, repetition_penalty=1.3, logit_bias=((3, 2.0),)),
    Sampling(max_tokens=6, temperature=0.0),
    Sampling(max_tokens=12, presence_penalty=0.5, frequency_penalty=0.2, stop=STOPS, stop_tokens=(7,)),
)


def requests(samples: int = 3) -> list[Request]:
    """Groups of unlike prompts and parameters, two with a common beginning."""
    draw = torch.Generator().manual_seed(9)
    long = torch.randint(0, 180, (45,), generator=draw, dtype=torch.int32)
    prompts = (long[:37], long, long[40:], long[:1], long.flip(0)[:16])
    return [
        each
        for i, (prompt, sampling) in enumerate(zip(prompts, KINDS, strict=True))
        for each in group(prompt.clone(), sampling, prompt_index=i, samples=samples)
    ]


def engine(made: Decoder | None = None, **settings: Any) -> Engine:
    return Engine(
        made or decoder(), EngineSettings(**settings), run="r", decode=text_of, value_head=value_head
    )


def bits(completion: Completion) -> dict[str, object]:
    """Everything of a completion, numbers as integers."""
    numbers = {name: getattr(completion, name) for name in ("logprobs", "processed_logprobs", "values")}
    return {
        "tokens": completion.tokens.tolist(),
        "finish": completion.finish,
        **{name: None if each is None else each.view(torch.int32).tolist() for name, each in numbers.items()},
    }


def contents(batch: RolloutBatch) -> dict[tuple[int, int], dict[str, object]]:
    return {(each.prompt_index, each.sample_index): bits(each) for each in batch.completions}


def updated(made: Decoder, completions: Sequence[Completion]) -> list[dict[str, object]]:
    """The same numbers from one packed forward of the update."""
    sequences = [torch.cat([each.prompt, each.tokens])[:-1] for each in completions]
    lengths = [len(each) for each in sequences]
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        packed = made.hidden(torch.cat(sequences), cu, max(lengths))
        found = []
        for hidden, each in zip(torch.split(packed, lengths), completions, strict=True):
            rows, sampling = hidden[len(each.prompt) - 1 :], each.sampling
            logprobs = processed = None
            if not sampling.greedy:
                logprobs = made.logprobs(rows, each.tokens, sampling.temperature)
            if sampling.processed and not sampling.greedy:
                ids = [*each.prompt.tolist(), *each.tokens.tolist()]
                scores = torch.stack(
                    [
                        processed_logits(row, sampling, ids[: len(each.prompt) + t], len(each.prompt))
                        for t, row in enumerate(made.logits(rows))
                    ]
                )
                processed = logprob_of_logits(scores, each.tokens, temperature=sampling.temperature)
            assert not isinstance(processed, tuple)
            found.append(
                bits(
                    replace(
                        each,
                        logprobs=logprobs,
                        processed_logprobs=processed,
                        values=value_head(rows),
                    )
                )
            )
    return found
