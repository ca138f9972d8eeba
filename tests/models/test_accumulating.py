"""Gradients that are added in token order: the cut of a batch changes none of their bits."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernelbraid.models.accumulating import TOKEN_BLOCK, Accumulating
from kernelbraid.models.config import Experts, ModelConfig
from kernelbraid.models.load import drawn, from_state, to_state
from kernelbraid.models.model import Decoder, ModelWeights
from kernelbraid.models.operators import UNIFIED, Operators
from kernelbraid.models.vendor import Vendor

SIZES = (96, 32, 48, 2, 2, 1, 64, 1e4)
DENSE = ModelConfig(*SIZES, tied=True, qk_norm=True, qkv_bias=True)
SPARSE = ModelConfig(*SIZES, experts=Experts(count=4, top_k=2, intermediate=32, renormalize=True))
LENGTHS = (64, 128, 192, 64)
WHOLE = [[0, 1, 2, 3]]


def made(config: ModelConfig) -> ModelWeights:
    weights = drawn(config, dtype=torch.float32, seed=1)
    for _, each in weights.tensors():
        each.requires_grad_(True)
    return weights


def backward(
    config: ModelConfig,
    weights: ModelWeights,
    operators: Operators,
    cuts: Sequence[Sequence[int]],
    *,
    lengths: Sequence[int] = LENGTHS,
    checkpoint: bool = False,
) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(0, config.vocab, (n,), generator=generator, dtype=torch.int32) for n in lengths
    ]
    model = Decoder(config, weights, 256, operators, checkpoint)
    found = []
    for cut in cuts:
        chosen = [sequences[i] for i in cut]
        sizes = torch.tensor([0, *(len(each) for each in chosen)], dtype=torch.int32)
        hidden = model.hidden(torch.cat(chosen), sizes.cumsum(0, dtype=torch.int32), max(lengths))
        scores = model.logprobs(hidden, torch.cat([each.roll(-1) for each in chosen]))
        (scores * scores).sum().backward()  # type: ignore[no-untyped-call]
        found.append(scores.detach())
    return torch.cat(found)


def bits(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.clone().view(torch.int32) for name, each in gradients.items()}


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_the_cut_changes_no_bit(config: ModelConfig) -> None:
    weights = made(config)
    whole = Accumulating(weights)
    scores = backward(config, weights, whole, WHOLE)
    wanted = bits(whole.gradients())
    for cuts, checkpoint in (([[0], [1], [2], [3]], False), ([[0, 1], [2, 3]], True)):
        parts = Accumulating(weights)
        again = backward(config, weights, parts, cuts, checkpoint=checkpoint)
        assert torch.equal(again.view(torch.int32), scores.view(torch.int32))
        assert [name for name, each in bits(parts.gradients()).items() if not each.equal(wanted[name])] == []
    assert all(each.grad is None for _, each in weights.tensors())
    assert torch.equal(backward(config, weights, UNIFIED, WHOLE).view(torch.int32), scores.view(torch.int32))


def test_a_cut_inside_a_block_is_seen() -> None:
    """The negative control: sequences that do not fill their blocks give other bits when cut."""
    weights, lengths = made(DENSE), (40, 70, 90)
    assert all(n % TOKEN_BLOCK for n in lengths)
    found = []
    for cuts in ([[0, 1, 2]], [[0], [1], [2]]):
        operators = Accumulating(weights)
        backward(DENSE, weights, operators, cuts, lengths=lengths)
        found.append(bits(operators.gradients()))
    assert any(not found[0][name].equal(found[1][name]) for name in found[0])


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_near_autograd_and_torch(config: ModelConfig) -> None:
    weights = made(config)
    adding = Accumulating(weights)
    backward(config, weights, adding, WHOLE)
    for operators in (UNIFIED, Vendor()):
        for _, each in weights.tensors():
            each.grad = None
        backward(config, weights, operators, WHOLE)
        for name, each in weights.tensors():
            assert each.grad is not None
            found = adding.gradients()[name]
            assert float((each.grad - found).abs().max()) <= 1e-4 * float(found.abs().max()), name


def test_zero_begins_anew() -> None:
    weights = made(DENSE)
    operators = Accumulating(weights)
    backward(DENSE, weights, operators, WHOLE)
    one = bits(operators.gradients())
    operators.zero()
    backward(DENSE, weights, operators, WHOLE)
    assert all(each.equal(one[name]) for name, each in bits(operators.gradients()).items())


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_state_dict_and_back(config: ModelConfig) -> None:
    weights = drawn(config, dtype=torch.float32)
    again = from_state(config, to_state(config, weights), dtype=torch.float32)
    pairs = list(zip(weights.tensors(), again.tensors(), strict=True))
    assert pairs and all(one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in pairs)
