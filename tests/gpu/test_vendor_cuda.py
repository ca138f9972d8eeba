"""The vendor arm's library kernels beside torch's plain ones, on a GPU: equal but for rounding."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelbraid.models.config import named
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Decoder
from kernelbraid.models.operators import Operators
from kernelbraid.models.vendor import Vendor
from kernelbraid.models.vendor_cuda import VendorCuda, installed
from kernelbraid.rl.records import Sampling
from kernelbraid.rl.requests import EngineSettings, Request, group
from kernelbraid.rl.rollout import Engine

NAMES = ("Qwen3-0.6B", "SmolLM2-135M", "Llama-3.2-1B", "Qwen2.5-1.5B", "Qwen3-MoE-small")
DRIFT, ROUTED = 0.03, 0.25
"""Relative, of bfloat16 through two layers; with a router, which sends a few tokens to other experts."""


def arms() -> list[dict[str, bool]]:
    """What is installed here, and torch's own in any case."""
    found = [{"flash_attention_4": False, "flashinfer": False}]
    if installed("flash_attn.cute"):
        found.append({"flash_attention_4": True, "flashinfer": False})
    if installed("flashinfer"):
        found.append({"flash_attention_4": False, "flashinfer": True})
    return found


def decoder(name: str, made: Operators) -> Decoder:
    config = replace(named(name).small(layers=2, vocab=1024), hidden=256, intermediate=512, tied=False)
    weights = drawn(config, dtype=torch.bfloat16, device="cuda", seed=1)
    weights.head.mul_(8)
    return Decoder(config, weights, 4096, operators=made)


def drift(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def trained(made: Decoder, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Log-probabilities and gradients of packed sequences."""
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(0, 1024, (sum(lengths),), generator=generator, device="cuda", dtype=torch.int32)
    targets = ids.roll(-1)
    targets[::7] = -100
    tensors = {name: each.requires_grad_() for name, each in made.weights.tensors()}
    offsets = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    hidden = made.hidden(ids, offsets, max(lengths))
    found, entropy = made.operators.logprob(hidden, made.weights.head, targets, 0.8, entropy=True)
    assert entropy is not None
    weight = torch.rand(len(ids), generator=generator, device="cuda")
    (found * weight + 0.1 * entropy).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad for name, each in tensors.items() if each.grad is not None}
    return {"logprobs": found.detach(), "entropy": entropy.detach(), **gradients}


@pytest.mark.parametrize("arm", arms(), ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(64, 700, 1, 321), (512, 512, 512)], ids=str)
def test_the_update(name: str, arm: dict[str, bool], lengths: tuple[int, ...]) -> None:
    expected = trained(decoder(name, Vendor()), lengths)
    found = trained(decoder(name, VendorCuda(**arm)), lengths)
    assert found.keys() == expected.keys()
    apart = {each: drift(found[each], expected[each]) for each in expected}
    most = ROUTED if decoder(name, Vendor()).config.experts else DRIFT
    assert max(apart.values()) < most, apart

    class Broken(VendorCuda):
        def swiglu(self, x: Tensor) -> Tensor:
            return super().swiglu(x.roll(1, 0))

    wrong = trained(decoder(name, Broken(**arm)), lengths)
    assert max(drift(wrong[each], expected[each]) for each in expected) > most


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 1024, (n,), generator=generator) for n in (200, 1, 37, 64)]
    return [
        each
        for i, prompt in enumerate(prompts)
        for each in group(prompt, Sampling(max_tokens=40), prompt_index=i, samples=3)
    ]


def engine(made: Decoder, **settings: Any) -> Engine:
    return Engine(made, EngineSettings(**{"cache_tokens": 8192, **settings}), run="r")


@pytest.mark.parametrize("arm", arms(), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_rollout_records_what_torch_gives(name: str, arm: dict[str, bool]) -> None:
    """Tokens are drawn with the arm; torch's packed forward gives them nearly the recorded probabilities."""
    made = VendorCuda(**arm)
    drawing = engine(decoder(name, made))
    batch = drawing.generate(requests())
    assert drawing._buckets is not None and drawing._buckets.steps, "decode ran without CUDA graphs"
    again = drawing.generate(requests())  # from graphs that there are
    plain = engine(decoder(name, made), graphs=False).generate(requests())
    reference = decoder(name, Vendor())
    for some in (batch, again, plain):
        worst = 0.0
        for each in some.completions:
            assert each.logprobs is not None
            worst = max(worst, float((each.logprobs - scored(reference, each)).abs().mean()))
        assert worst < 0.1
    shifted = replace(batch.completions[0], tokens=batch.completions[0].tokens.roll(1))
    assert float((shifted.logprobs - scored(reference, shifted)).abs().mean()) > 0.1  # type: ignore[operator]


def scored(made: Decoder, completion: Any) -> Tensor:
    ids = torch.cat([completion.prompt, completion.tokens])[:-1].cuda()
    offsets = torch.tensor([0, len(ids)], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        rows = made.hidden(ids, offsets, len(ids))[len(completion.prompt) - 1 :]
        return made.logprobs(rows, completion.tokens.cuda(), completion.sampling.temperature).cpu()


@pytest.mark.parametrize("arm", arms(), ids=str)
def test_unread_slots_of_the_cache_may_hold_nan(arm: dict[str, bool]) -> None:
    made = engine(decoder("Qwen3-0.6B", VendorCuda(**arm)))
    for each in (*made._cache.k, *made._cache.v):
        each.fill_(float("nan"))
    batch = made.generate(requests())
    assert all(
        bool(each.logprobs.isfinite().all()) for each in batch.completions if each.logprobs is not None
    )


def test_offsets_cut_whole_sequences() -> None:
    """Attention of packed sequences is that of each alone."""
    generator = torch.Generator("cuda").manual_seed(3)

    def normal(heads: int) -> Tensor:
        return torch.randn(300, heads, 128, generator=generator, device="cuda").bfloat16()

    q, k, v = normal(16), normal(8), normal(8)
    offsets = torch.tensor([0, 130, 131, 300], dtype=torch.int32, device="cuda")
    for arm in arms():
        made = VendorCuda(**arm)
        whole = made.attention(q, k, v, offsets, 169)
        for a, b in pairwise(offsets.tolist()):
            alone = Vendor().attention(q[a:b], k[a:b], v[a:b], offsets.new_tensor([0, b - a]), b - a)
            assert drift(whole[a:b], alone) < 0.01
