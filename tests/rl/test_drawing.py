"""What tokens are drawn from: penalties, biases and cuts, and log-probabilities of exactly that."""

import numpy as np
import pytest
import torch

from kernelbraid.ops.sample.api import sample
from kernelbraid.rl.drawing import Row, _Cut, _exp, _kept, draw, processed_logits
from kernelbraid.rl.records import Sampling

VOCAB = 400


def scores_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(scores: torch.Tensor, **parameters: float) -> list[int]:
    found = processed_logits(scores, Sampling(**parameters), [0], 1)
    stays = ~found.isneginf()
    assert torch.equal(found[stays].view(torch.int32), scores[stays].view(torch.int32))
    return stays.nonzero()[:, 0].tolist()


def drawable(scores: torch.Tensor, **parameters: float) -> set[int]:
    """Tokens that contract `sample` 1 draws in many tries."""
    tries = 6000
    return set(
        sample(
            scores.expand(tries, -1), seeds=3, positions=torch.arange(tries, dtype=torch.int32), **parameters
        ).tolist()
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"top_p": 0.9, "top_k": 12, "temperature": 0.7},
        {"top_p": 0.8, "min_p": 0.02, "top_k": 30, "temperature": 1.4},
        {"top_p": 1e-6},
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_cuts_are_those_of_the_sampler(parameters: dict[str, float], seed: int) -> None:
    scores = scores_of(seed)
    stays = kept(scores, **parameters)
    found = drawable(scores, **parameters)
    assert found <= set(stays)
    weights = torch.softmax(scores[stays] / parameters.get("temperature", 1.0), 0)
    assert {token for token, w in zip(stays, weights.tolist(), strict=True) if w > 0.004} <= found


def test_ties_and_the_extremes() -> None:
    equal = torch.zeros(10)
    assert kept(equal, top_k=3) == [0, 1, 2]
    assert kept(equal, top_p=0.25) == [0, 1, 2]
    assert kept(equal, min_p=1.0) == list(range(10))
    assert kept(torch.tensor([1.0, float("nan"), 2.0, float("-inf")]), top_k=1) == [2]


def test_a_rows_bits_do_not_depend_on_its_neighbours() -> None:
    rows = [
        Row(
            Sampling(temperature=(0.7, 1.0, 0.0)[i % 3], top_p=(0.8, 1.0)[i % 2], presence_penalty=i / 10),
            seed=i,
            sample_index=i,
            ids=[1, 2, i],
            prompt_length=2,
        )
        for i in range(9)
    ]
    scores = torch.stack([scores_of(i) for i in range(9)])
    together = draw(scores, rows)
    for i, row in enumerate(rows):
        alone = draw(scores[i : i + 1], [row])
        for name in ("tokens", "logprobs", "processed"):
            left, right = getattr(alone, name)[0], getattr(together, name)[i]
            assert left == right or (left != left and right != right)


def test_rows_cut_together_are_cut_alone() -> None:
    rows = torch.stack([scores_of(i) for i in range(7)])
    rows[2, 5:9], rows[3], rows[4, 1] = float("nan"), float("-inf"), float("inf")
    for sampling in (
        Sampling(top_p=0.7),
        Sampling(top_k=9, min_p=0.01),
        Sampling(temperature=0.3, top_p=0.5),
    ):
        cut = _Cut.of(sampling)
        assert cut is not None
        together = _kept(rows, cut)
        assert together.any(1).all()
        for i in range(len(rows)):
            assert torch.equal(_kept(rows[i : i + 1], cut)[0], together[i])


def test_exp_is_exact_enough_and_elementwise() -> None:
    x = -torch.rand(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 40
    found = _exp(x)
    assert np.abs(found.numpy() / np.exp(x.numpy()) - 1).max() < 1e-14
    assert torch.equal(_exp(x[3:4]), found[3:4]) and torch.equal(_exp(x[990:]), found[990:])
    assert _exp(torch.tensor([0.0, float("-inf")], dtype=torch.float64)).tolist()[0] == 1.0
    assert _exp(torch.tensor([float("-inf")], dtype=torch.float64)).item() < 1e-300


def test_penalties_and_bias() -> None:
    scores = torch.tensor([2.0, -1.0, 0.5, 3.0, -2.0])
    sampling = Sampling(
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias=((0, 1.0), (4, float("-inf"))),
    )
    found = processed_logits(scores, sampling, [1, 0, 3, 3, 2], 2)
    # 0 and 1 are of the prompt alone, 2 is once and 3 twice in the completion
    assert found.tolist() == [2.0, -2.0, 0.25 - 0.75, 1.5 - 1.25, float("-inf")]


def test_what_is_recorded_is_what_is_drawn_from() -> None:
    scores = scores_of(5)
    row = Row(Sampling(top_k=4, temperature=0.8), 1, 0, [3], 1)
    found = draw(scores[None], [row])
    stays = kept(scores, top_k=4, temperature=0.8)
    wanted = torch.log_softmax(scores[stays].double() / 0.8, 0)[stays.index(found.tokens[0])]
    assert abs(found.processed[0] - wanted) < 1e-5
    whole = torch.log_softmax(scores.double() / 0.8, 0)[found.tokens[0]]
    assert abs(found.logprobs[0] - whole) < 1e-5


def test_a_bias_that_forbids_all_but_one() -> None:
    bias = tuple((i, float("-inf")) for i in range(VOCAB) if i != 17)
    found = draw(scores_of(1)[None], [Row(Sampling(logit_bias=bias), 1, 0, [3], 1)])
    assert found.tokens == [17] and found.processed == [0.0] and found.logprobs[0] < 0
