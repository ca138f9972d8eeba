"""The public sampling: known numbers, frequencies, cuts and ties, independence of the batch, refusals."""

import math

import numpy as np
import pytest
import torch

from kernelbraid import head_logits, logprob, logprob_of_logits, ops, sample
from kernelbraid.ops.problem import ProblemShape
from kernelbraid.ops.sample import cpu, reference, registered

VOCABULARY = 300


def draw(rows, vocabulary=VOCABULARY, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def many(logits, count, **cuts):
    """`count` tokens from one row of logits, each at a position of its own."""
    rows = torch.as_tensor(logits, dtype=torch.float32).expand(count, -1)
    return sample(rows, seeds=17, positions=torch.arange(count), **cuts).numpy()


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_numbers(counter, key, wanted):
    assert reference.philox(counter, key) == wanted
    seed, position, number = (low | high << 32 for low, high in (key, counter[:2], counter[2:]))
    bits = cpu.philox(*(np.uint64(n) for n in (seed, position, number)))
    assert int(bits) == wanted[0] | wanted[1] << 32


def test_the_upper_half_of_a_product():
    rng = np.random.default_rng(0)
    for a, b in rng.integers(0, 2**64, (200, 2), np.uint64).tolist():
        assert int(cpu.high_product(np.uint64(a), np.uint64(b))) == a * b >> 64


@pytest.mark.parametrize("kind", ["normal", "heavy_tailed", "saturated", "non_finite", "signed_zeros"])
@pytest.mark.parametrize("vocabulary", [2, 100, 1000])
def test_tokens_are_those_of_the_rules(kind, vocabulary):
    shape = ProblemShape((("vocabulary", vocabulary),), (50,), (50,), kind)
    problem = ops.get("sample").draw(shape, np.random.default_rng(vocabulary))
    tokens = np.full(50, -1, np.int32)
    cpu.sample(**problem.requests[0], tokens=tokens)
    assert np.array_equal(tokens, reference.reference(problem)["tokens", 0])


def chi_square(tokens, probabilities):
    """The statistic over tokens expected at least five times, in its standard deviations above the mean."""
    expected = np.append(probabilities[probabilities * len(tokens) >= 5], 0) * len(tokens)
    seen = np.append(np.bincount(tokens, minlength=len(probabilities))[probabilities * len(tokens) >= 5], 0)
    expected[-1], seen[-1] = len(tokens) - expected.sum(), len(tokens) - seen.sum()
    expected, seen = expected[expected > 1e-9], seen[expected > 1e-9]
    degrees = len(expected) - 1
    return (((seen - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "min_p": 0.01, "top_k": 30, "top_p": 0.7},
    ],
)
def test_frequencies_are_the_probabilities(cuts):
    logits = draw(1)[0].numpy().astype(np.float64)
    probabilities = np.exp(logits / cuts.get("temperature", 1.0))
    probabilities /= probabilities.max()
    probabilities[probabilities < cuts.get("min_p", 0.0)] = 0
    order = np.argsort(-probabilities, kind="stable")
    probabilities[order[cuts.get("top_k", VOCABULARY) :]] = 0
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= cuts.get("top_p", 1.0) * probabilities.sum()]] = 0
    probabilities /= probabilities.sum()
    tokens = many(logits, 20000, **cuts)
    assert probabilities[tokens].min() > 0
    assert chi_square(tokens, probabilities) < 4


def test_the_statistic_sees_another_temperature():
    logits = draw(1)[0].numpy().astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    assert chi_square(many(logits, 20000, temperature=1.05), probabilities) > 4


def test_a_token_does_not_depend_on_its_batch():
    logits = draw(40)
    columns = {
        "seeds": torch.arange(40) * 7919 - 100,
        "positions": torch.arange(40).flip(0),
        "samples": torch.arange(40) % 3,
        "temperature": torch.linspace(0, 2, 40),
        "top_k": torch.arange(40) * 9,
        "top_p": torch.linspace(0.05, 1, 40),
        "min_p": torch.linspace(0, 0.3, 40),
    }
    together = sample(logits, **columns)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits[order], **{n: c[order] for n, c in columns.items()}), together[order])
    for t in range(40):
        own = {name: column[t].item() for name, column in columns.items()}
        assert sample(logits[t], **own) == together[t]


def test_every_key_gives_numbers_of_its_own():
    logits = torch.zeros(1, 50021)
    tokens = {
        sample(logits, seeds=seed, positions=position, samples=number).item()
        for seed in (0, 1, 1 << 32, -1)
        for position in (0, 1, 77)
        for number in (0, 1, 5)
    }
    assert len(tokens) >= 35  # of 36


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[1.0, 3.0, 3.0, -1.0], [-torch.inf, torch.nan, -5.0, -5.0]])
    assert sample(logits, seeds=1, positions=0, temperature=0).tolist() == [1, 2]
    assert torch.equal(
        sample(draw(9), seeds=3, positions=0, temperature=0, top_k=3, top_p=0.5, min_p=0.1).long(),
        draw(9).argmax(-1),
    )


def test_ties_go_to_the_lower_index():
    assert set(many(torch.zeros(10), 500, top_k=3)) == {0, 1, 2}
    assert set(many(torch.zeros(10), 500, top_p=0.25)) == {0, 1, 2}
    assert set(many([0.0, 1.0, 1.0, 1.0, -0.0], 500, top_k=4)) == {0, 1, 2, 3}
    assert set(many([0.0, 2.0, 0.0, 0.0, 0.0], 2000, top_k=3, top_p=0.7)) <= {0, 1, 2}


def test_limits_of_cuts():
    logits = draw(64)
    key = {"seeds": 5, "positions": torch.arange(64)}
    all_kept = sample(logits, **key)
    for same in ({"top_k": VOCABULARY}, {"top_k": VOCABULARY + 5}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(sample(logits, **key, **same), all_kept)
    best = logits.argmax(-1).int()
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert torch.equal(sample(logits, **key, **one), best)


def test_logits_that_are_not_finite():
    inf, nan = torch.inf, torch.nan
    assert set(many([nan, 0.0, -inf, 0.0], 200)) == {1, 3}
    assert set(many([1.0, inf, 0.0, inf], 200)) == {1, 3}
    assert set(many([-inf, -inf, nan], 20)) == {0}
    assert set(many([nan, nan], 20, temperature=0)) == {0}
    assert set(many([-inf, 0.0, 0.0, nan], 200, top_k=3, top_p=0.99)) == {1, 2}
    assert set(many([3e38, 1.0, 3e38], 200, temperature=0.1)) == {0, 2}


def test_what_is_sampled_has_the_log_probability_that_training_sees():
    """One rollout step: logits, a token, its log-probability; then the update's, without logits."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (20, VOCABULARY))
    logits = head_logits(x, weight)
    tokens = sample(logits, seeds=8, positions=torch.arange(20), temperature=0.7)
    rollout = logprob_of_logits(logits, tokens, temperature=0.7)
    assert torch.equal(rollout, logprob(x, weight, tokens, temperature=0.7))


def test_shapes_and_strides():
    logits = draw(24)
    positions = torch.arange(24)
    tokens = sample(logits, seeds=1, positions=positions)
    assert tokens.dtype == torch.int32
    folded = sample(logits.view(2, 3, 4, -1), seeds=1, positions=positions.view(2, 3, 4))
    assert torch.equal(folded, tokens.view(2, 3, 4))
    wide = torch.full((24, 2 * VOCABULARY), torch.nan)
    wide[:, :VOCABULARY] = logits
    assert torch.equal(sample(wide[:, :VOCABULARY], seeds=1, positions=positions), tokens)
    twice = positions.repeat_interleave(2)
    assert torch.equal(sample(logits, seeds=1, positions=twice[::2]), tokens)
    assert sample(logits[:0], seeds=1, positions=0).shape == (0,)
    assert torch.equal(sample(logits.requires_grad_(), seeds=1, positions=positions), tokens)


def test_registration():
    rows = 6
    column = torch.ones(rows)
    integers = torch.arange(rows, dtype=torch.int32)
    given = (column, integers, column * 0.9, column * 0.01, integers.long(), integers, integers)
    torch.library.opcheck(registered.sample, (draw(rows), *given))
    function = torch.compile(
        lambda x, p: sample(x, seeds=1, positions=p, top_p=0.9), fullgraph=True, backend="aot_eager"
    )
    positions = torch.arange(rows)
    wanted = sample(draw(rows), seeds=1, positions=positions, top_p=0.9)
    assert torch.equal(function(draw(rows), positions), wanted)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": draw(3).double()}, "logits must be torch.float32"),
        ({"logits": draw(3).t()}, "positions must have the rows' shape"),
        ({"logits": draw(3)[:, :1]}, "vocabulary must be between 2"),
        ({"logits": "x"}, "logits must be a torch tensor"),
        ({"logits": draw(3).to("meta"), "positions": 0}, "logits is on meta"),
        ({"positions": torch.tensor([0, -1, 2])}, "positions must lie between 0 and"),
        ({"positions": torch.tensor([0.0, 1.0, 2.0])}, "positions must be integers"),
        ({"positions": 1 << 31}, "positions must lie between 0 and"),
        ({"seeds": 1.5}, "seeds must be an int"),
        ({"samples": -1}, "samples must lie between 0"),
        ({"temperature": -0.5}, "temperature must lie between 0 and"),
        ({"temperature": float("nan")}, "temperature must lie between"),
        ({"temperature": torch.tensor([1.0, -1.0, 1.0])}, "temperature must lie between 0 and"),
        ({"top_k": -1}, "top_k must lie between 0"),
        ({"top_k": 2.0}, "top_k must be an int"),
        ({"top_p": 0.0}, "top_p must lie between"),
        ({"top_p": 1.5}, "top_p must lie between"),
        ({"top_p": torch.ones(2)}, "top_p must have the rows' shape"),
        ({"min_p": -0.1}, "min_p must lie between 0 and 1"),
        ({"penalties": 1.1}, "penalties is not part of contract sample/1"),
        ({"generator": torch.Generator()}, "generator is not part of contract sample/1"),
    ],
)
def test_refusals(changed, message):
    given = {"logits": draw(3), "seeds": 1, "positions": torch.arange(3)} | changed
    with pytest.raises(ValueError, match=message):
        sample(given.pop("logits"), **given)
