"""Whole models under torch.compile: the bits of eager calls, in update and rollout."""

from itertools import pairwise

import pytest
import torch
from tests.models.test_relations import decoder

from kernelbraid.models.layer import Paged
from kernelbraid.models.model import Cache, Decoder

MODELS = ("SmolLM2-135M", "Qwen2.5-1.5B", "Qwen3-MoE-small")


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def packed(lengths: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, where sequences begin, and targets."""
    generator = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randint(0, 300, (sum(lengths),), generator=generator) for _ in range(2))
    return ids, torch.tensor((0, *lengths)).cumsum(0).to(torch.int32), targets


def update_of(made: Decoder):
    def update(ids, offsets, targets, longest):
        return made.logprobs(made.hidden(ids, offsets, longest), targets)

    return update


def differentiated(made: Decoder, call, batch, longest: int) -> list[torch.Tensor]:
    """What a call gives, and the gradient of every parameter."""
    for _, tensor in made.weights.tensors():
        tensor.requires_grad_().grad = None
    found = call(*batch, longest)
    found.sum().backward()
    return [found.detach(), *(tensor.grad for _, tensor in made.weights.tensors())]


@pytest.mark.parametrize("name", MODELS)
def test_an_update_has_the_bits_of_eager_calls(name: str) -> None:
    """Of whole graphs, whose sizes may change from call to call: forward, and the gradients of everything."""
    made = decoder(name)
    compiled = torch.compile(update_of(made), backend="aot_eager", fullgraph=True)
    for lengths in ((5, 1, 17), (9, 30), (64,)):
        batch = packed(lengths, seed=len(lengths))
        ours = differentiated(made, compiled, batch, max(lengths))
        theirs = differentiated(made, update_of(made), batch, max(lengths))
        assert len(ours) == len(theirs) > 8
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_an_update_through_inductor() -> None:
    made = decoder("SmolLM2-135M", layers=1)
    batch = packed((5, 1, 17), seed=1)
    compiled = torch.compile(update_of(made), fullgraph=True)
    ours, theirs = (differentiated(made, call, batch, 17) for call in (compiled, update_of(made)))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_rollout_has_the_bits_of_eager_calls_and_of_the_update(name: str) -> None:
    made = decoder(name)
    ids, offsets, _ = packed((21,), seed=3)
    table = torch.arange(3, dtype=torch.int32)[None]

    def roll_out(call) -> torch.Tensor:
        cache = Cache.empty(made.config, 3, 8, made.weights.norm)
        rows = []
        for start, stop in pairwise((0, 12, 19, 20, 21)):
            batch = Paged(
                table,
                torch.tensor([0, stop - start], dtype=torch.int32),
                torch.tensor([stop], dtype=torch.int32),
                stop - start,
                24,
            )
            rows.append(call(ids[start:stop], cache, batch))
        return torch.cat(rows)

    with torch.no_grad():
        eager = roll_out(made.rollout)
        compiled = roll_out(torch.compile(made.rollout, backend="aot_eager", fullgraph=True))
        assert torch.equal(compiled, eager)
        assert torch.equal(eager, made.hidden(ids, offsets, 21))
