"""The rollout engine on a GPU: CUDA graphs of decode steps and cuts of many rows at a time change no bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelbraid.models.config import named
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Decoder
from kernelbraid.rl import drawing
from kernelbraid.rl.records import Completion, RolloutBatch, Sampling
from kernelbraid.rl.requests import Request, group
from kernelbraid.rl.rollout import Engine, EngineSettings

KINDS = (
    Sampling(max_tokens=40),
    Sampling(max_tokens=30, temperature=0.7, top_p=0.9, top_k=50),
    Sampling(max_tokens=20, temperature=1.2, min_p=0.02, presence_penalty=0.4),
    Sampling(max_tokens=10, temperature=0.0),
)


def decoder(name: str = "Qwen3-0.6B", seed: int = 0) -> Decoder:
    config = replace(named(name).small(layers=2, vocab=1024), hidden=256, intermediate=512, tied=False)
    weights = drawn(config, dtype=torch.bfloat16, device="cuda", seed=seed)
    weights.head.mul_(8)
    return Decoder(config, weights, 4096)


def engine(made: Decoder, **settings: Any) -> Engine:
    limits = EngineSettings(**{"cache_tokens": 8192, **settings})
    return Engine(made, limits, run="r", value_head=lambda hidden: hidden[:, 0].float())


def requests(samples: int = 3) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 1024, (n,), generator=generator) for n in (200, 1, 37, 64)]
    return [
        each
        for i, (prompt, sampling) in enumerate(zip(prompts, KINDS, strict=True))
        for each in group(prompt, sampling, prompt_index=i, samples=samples)
    ]


def bits(completion: Completion) -> list[Any]:
    numbers = (completion.logprobs, completion.processed_logprobs, completion.values)
    as_integers = [None if each is None else each.view(torch.int32).tolist() for each in numbers]
    return [completion.tokens.tolist(), completion.finish, *as_integers]


def contents(batch: RolloutBatch) -> list[Any]:
    return [bits(each) for each in batch.completions]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    made = engine(decoder(), graphs=False, max_sequences=1, share_prefixes=False)
    return contents(made.generate(requests()))


@pytest.mark.parametrize(
    "settings",
    [
        {"graphs": False},
        {"graphs": True},
        {"graphs": True, "largest_graph": 4, "max_sequences": 12},
        {"graphs": True, "page_size": 1},
        {"graphs": True, "cache_tokens": 256},
        {"graphs": False, "step_tokens": 20, "max_sequences": 20, "page_size": 64},
    ],
    ids=str,
)
def test_graphs_and_limits_change_no_bit(settings: dict[str, Any], alone: list[Any]) -> None:
    made = engine(decoder(), **settings)
    assert contents(made.generate(requests())) == alone
    made.check()
    assert contents(made.generate(requests())) == alone  # from graphs that there are already
    assert (made._buckets is not None) == settings["graphs"]
    if made._buckets is not None:
        assert made._buckets.steps
    assert (made.statistics.preemptions > 0) == (settings.get("cache_tokens") == 256)


def test_graphs_read_weights_that_changed_after_their_capture() -> None:
    made, other = decoder(), decoder(seed=1)
    with_graphs = engine(made, graphs=True)
    before = contents(with_graphs.generate(requests(1)))
    with_graphs.update_weights(other.weights, 1)
    after = contents(with_graphs.generate(requests(1)))
    assert after == contents(engine(decoder(seed=1), graphs=False).generate(requests(1))) != before


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "SmolLM2-135M", "Qwen2.5-1.5B"])
def test_what_is_recorded_is_the_updates(name: str) -> None:
    made = decoder(name)
    batch = engine(made, graphs=True).generate(requests())
    for each in batch.completions:
        if each.sampling.greedy:
            continue
        ids = torch.cat([each.prompt, each.tokens])[:-1].cuda()
        offsets = torch.tensor([0, len(ids)], dtype=torch.int32, device="cuda")
        with torch.no_grad():
            rows = made.hidden(ids, offsets, len(ids))[len(each.prompt) - 1 :]
            found = made.logprobs(rows, each.tokens.cuda(), each.sampling.temperature).cpu()
        assert each.logprobs is not None
        assert torch.equal(found.view(torch.int32), each.logprobs.view(torch.int32))


def test_rows_cut_together_are_cut_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(37, 50000, generator=generator, device="cuda") * 4
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=40, min_p=0.001), Sampling(top_k=99, top_p=0.8)):
        cut = drawing._Cut.of(sampling)
        assert cut is not None
        together = drawing._kept(rows, cut)
        for i in (0, 17, 36):
            assert torch.equal(drawing._kept(rows[i : i + 1], cut)[0], together[i])
            host = drawing._kept(rows[i : i + 1].cpu(), cut)[0]
            assert torch.equal(host, together[i].cpu())
