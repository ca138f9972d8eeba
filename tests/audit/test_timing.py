"""The statistics of timing: quantiles, bounds, and how often identical sources are told apart."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from kernelbraid.audit import timing
from kernelbraid.audit.timing import Sequential, Step

T_TABLE = {
    (0.95, 1): 6.313752,
    (0.95, 2): 2.919986,
    (0.95, 7): 1.894579,
    (0.999, 1): 318.308839,
    (0.999, 2): 22.327125,
    (0.999, 3): 10.214532,
    (0.999, 5): 5.893430,
    (0.999, 7): 4.785290,
    (0.975, 30): 2.042272,
}


@pytest.mark.parametrize(("probability", "freedom"), T_TABLE)
def test_quantiles_of_students_t(probability: float, freedom: int) -> None:
    found = timing.student_quantile(probability, freedom)
    assert found == pytest.approx(T_TABLE[probability, freedom], rel=1e-6)


def test_the_bound_of_known_numbers() -> None:
    candidate, baseline = (0.9, 0.81, 0.9), (1.0, 1.0, 1.0)
    logs = np.log(candidate)
    width = 22.327125 * logs.std(ddof=1) / math.sqrt(3)
    ratio, upper, lower = timing.bound(candidate, baseline)
    assert ratio == pytest.approx(math.exp(logs.mean()))
    assert upper == pytest.approx(math.exp(logs.mean() + width), rel=1e-6)
    assert lower == pytest.approx(math.exp(logs.mean() - width), rel=1e-6)


def test_pairing_removes_what_both_sides_share() -> None:
    drift = np.array([1.0, 1.5, 0.8, 1.2])
    ratio, upper, _ = timing.bound(tuple(0.9 * drift), tuple(drift))
    assert ratio == pytest.approx(0.9) and upper == pytest.approx(0.9)


def test_one_pair_proves_nothing() -> None:
    assert timing.bound((0.5,), (1.0,)) == (0.5, math.inf, 0.0)
    assert timing.smallest_gain((0.5,), (1.0,)) == 1.0


def test_the_smallest_gain_is_the_one_whose_bound_just_holds() -> None:
    noise = np.array([1.0, 1.01, 0.99, 1.02])
    gain = timing.smallest_gain(tuple(noise), (1.0,) * 4)
    scaled = noise / math.exp(np.log(noise).mean()) * (1 - gain)
    assert timing.bound(tuple(scaled), (1.0,) * 4)[1] == pytest.approx(timing.GAIN)


def test_totals_are_weighted_by_process() -> None:
    assert timing.totals((1.0, 10.0), ((1.0, 2.0), (0.5, 0.25))) == (6.0, 4.5)


@pytest.mark.parametrize(
    ("candidate", "baseline"), [((), ()), ((1.0,), ()), ((0.0,), (1.0,)), ((1.0,), (math.nan,))]
)
def test_impossible_latencies_are_refused(candidate: tuple[float, ...], baseline: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="latencies"):
        timing.bound(candidate, baseline)


@pytest.mark.parametrize(
    ("ratios", "step"),
    [
        ((1.01,), Step.CONTINUE),
        ((1.03,), Step.HOPELESS),
        ((1.01, 1.01), Step.HOPELESS),
        ((1.01, 0.98), Step.CONTINUE),
        ((1.0, 1.0), Step.CONTINUE),
        ((0.6, 0.61, 0.605), Step.PROVEN),
        ((0.95, 0.97, 0.96), Step.CONTINUE),
        ((0.999, 0.998, 0.999), Step.UNDECIDED),
        ((1.0, 1.0, 1.0), Step.UNDECIDED),
        ((0.9, 1.05, 0.98), Step.UNDECIDED),
        ((0.97, 0.99) * 4, Step.UNDECIDED),
        ((0.97, 0.975) * 4, Step.PROVEN),
    ],
)
def test_steps(ratios: tuple[float, ...], step: Step) -> None:
    assert Sequential().after(ratios, (1.0,) * len(ratios)) == step


@pytest.mark.parametrize(
    ("ratios", "step"),
    [
        ((0.49,), Step.CONTINUE),
        ((0.53,), Step.CONTINUE),
        ((0.55,), Step.HOPELESS),
        ((0.505, 0.505), Step.CONTINUE),
        ((0.52, 0.52), Step.HOPELESS),
        ((0.49, 0.50), Step.CONTINUE),
        ((0.49, 0.50, 0.495), Step.PROVEN),
        ((0.49, 0.50, 0.7), Step.UNDECIDED),
        ((0.40, 0.50, 0.59), Step.CONTINUE),
    ],
)
def test_a_candidate_behind_another_one_is_timed_no_further(ratios: tuple[float, ...], step: Step) -> None:
    assert Sequential().after(ratios, (1.0,) * len(ratios), to_beat=0.5) == step


Noise = Callable[[np.random.Generator, int], np.ndarray]


def quiet(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(0, 0.003, n)


def loud(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(0, 0.06, n)


def outliers(rng: np.random.Generator, n: int) -> np.ndarray:
    """Mostly 0.3%, one process in six 9% slow: the shape that fooled statistics over calls."""
    return rng.normal(0, 0.003, n) + 0.09 * (rng.random(n) < 1 / 6)


def heavy(rng: np.random.Generator, n: int) -> np.ndarray:
    return 0.01 * rng.standard_t(2, n)


def mixed(rng: np.random.Generator, n: int) -> np.ndarray:
    """A spread of its own for each trial, between 0.3% and 6%, and one process in six 9% slow."""
    spread = math.exp(rng.uniform(math.log(0.003), math.log(0.06)))
    return rng.normal(0, spread, n) + 0.09 * (rng.random(n) < 1 / 6)


def promoted(noise: Noise, ratio: float, trials: int, seed: int) -> float:
    """Share of trials in which the rule calls a candidate of that true ratio proven."""
    rng = np.random.default_rng(seed)
    rule, proven = Sequential(), 0
    for _ in range(trials):
        candidate = ratio * np.exp(noise(rng, rule.most))
        incumbent = np.exp(noise(rng, rule.most))
        for n in range(1, rule.most + 1):
            step = rule.after(tuple(candidate[:n].tolist()), tuple(incumbent[:n].tolist()))
            if step is not Step.CONTINUE:
                proven += step is Step.PROVEN
                break
    return proven / trials


@pytest.mark.parametrize("noise", [quiet, loud, outliers, heavy, mixed])
def test_identical_sources_are_rarely_told_apart(noise: Noise) -> None:
    """At most 1% of A/A trials end as proven, the promotion's second run not counted."""
    assert promoted(noise, 1.0, 3000, seed=1) <= 0.01


@pytest.mark.parametrize(("noise", "gain"), [(quiet, 0.03), (outliers, 0.35), (loud, 0.4)])
def test_real_gains_are_proven(noise: Noise, gain: float) -> None:
    assert promoted(noise, 1 - gain, 400, seed=2) >= 0.8
