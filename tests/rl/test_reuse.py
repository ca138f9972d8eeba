"""Which records may stand for a recomputation, and the reason where they may not."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rl.rollouts import SNAPSHOT, batch, completion

from kernelbraid.rl.records import Drawn, Finish, RolloutBatch, Sampling, Snapshot
from kernelbraid.rl.reuse import Decision, Named, Objective, Reason, ReuseError, decide

OBJECTIVE = Objective(Sampling(temperature=0.8))
CUT = Sampling(temperature=0.8, top_p=0.9, top_k=40, min_p=0.02)
PENALISED = Sampling(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3)
BIASED = Sampling(temperature=0.8, logit_bias=((7, -2.0),))
NUMBERS = torch.tensor([-1.0, -2.0, -3.0, -4.0])


def reasons(found: Decision) -> list[str]:
    assert found.reuse == (not found.findings)
    return [each.code for each in found.reasons]


def of(objective: Objective = OBJECTIVE, against: Snapshot = SNAPSHOT, **changes: Any) -> list[str]:
    """Reasons against one changed completion beside a good one."""
    good = completion(0, 0)
    if objective.named == Named.PROCESSED:
        good = replace(good, sampling=objective.sampling, processed_logprobs=NUMBERS)
    return reasons(decide(RolloutBatch(0, (good, completion(0, 1, **changes))), objective, against))


def test_records_of_the_snapshot_are_reused() -> None:
    found = decide(batch(), OBJECTIVE, SNAPSHOT)
    assert found == Decision(True) and found.explain() == ""
    assert decide(batch(), OBJECTIVE, SNAPSHOT, "require").reuse
    assert decide(RolloutBatch(0, ()), OBJECTIVE, SNAPSHOT).reuse


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"logprobs": None}, ["no_logprobs"]),
        ({"logprobs": torch.tensor([-1.0, math.nan, -1.0, -1.0])}, ["not_finite"]),
        ({"logprobs": torch.tensor([-1.0, -math.inf, -1.0, -1.0])}, ["not_finite"]),
        ({"as_drawn": False}, ["not_as_drawn"]),
        ({"sampling": Sampling(temperature=0.7)}, ["temperature"]),
        ({"sampling": Sampling(temperature=0)}, ["greedy"]),
        ({"snapshot": replace(SNAPSHOT, version=2)}, ["stale_version"]),
        ({"snapshot": replace(SNAPSHOT, version=4)}, ["stale_version"]),
        ({"drawn": (Drawn(0, 3), Drawn(1, 4))}, ["mixed_versions"]),
        ({"prefix_version": 2}, ["mixed_versions"]),
        ({"snapshot": replace(SNAPSHOT, bits_id="b" * 12)}, ["bits_id"]),
        ({"snapshot": replace(SNAPSHOT, dtype="bfloat16")}, ["dtype"]),
        ({"snapshot": replace(SNAPSHOT, device="sm_90")}, ["device"]),
        ({"snapshot": replace(SNAPSHOT, run="second")}, ["other_run"]),
        (
            {"snapshot": replace(SNAPSHOT, version=2, bits_id="b" * 12), "logprobs": None},
            ["no_logprobs", "stale_version", "bits_id"],
        ),
        # what changes nothing
        ({"finish": Finish.LENGTH}, []),
        ({"finish": Finish.ABORTED}, []),
        ({"finish": Finish.STOP_STRING, "sampling": Sampling(temperature=0.8, stop=("\n",))}, []),
        ({"sampling": Sampling(temperature=0.8, max_tokens=7, stop_tokens=(3,))}, []),
        ({"values": None}, []),
        ({"drawn": (Drawn(0, 3), Drawn(4, 4))}, []),
        # the objective names the whole distribution: what was cut or changed before drawing does not matter
        ({"sampling": CUT}, []),
        ({"sampling": PENALISED}, []),
        ({"sampling": BIASED, "processed_logprobs": NUMBERS}, []),
    ],
)
def test_whole_distribution(changes: dict[str, Any], wanted: list[str]) -> None:
    assert of(**changes) == wanted


@pytest.mark.parametrize(
    ("named", "changes", "wanted"),
    [
        (CUT, {"sampling": CUT, "processed_logprobs": NUMBERS}, []),
        (CUT, {"sampling": CUT, "processed_logprobs": NUMBERS, "logprobs": None}, []),
        (CUT, {"sampling": CUT}, ["no_processed_logprobs"]),
        (CUT, {"sampling": CUT, "processed_logprobs": NUMBERS / 0}, ["not_finite"]),
        (CUT, {"sampling": replace(CUT, top_p=0.95), "processed_logprobs": NUMBERS}, ["truncation"]),
        (CUT, {"sampling": replace(CUT, top_k=41), "processed_logprobs": NUMBERS}, ["truncation"]),
        (CUT, {"sampling": replace(CUT, min_p=0.0), "processed_logprobs": NUMBERS}, ["truncation"]),
        (CUT, {"sampling": replace(CUT, temperature=1.0), "processed_logprobs": NUMBERS}, ["temperature"]),
        (CUT, {}, ["truncation"]),
        (PENALISED, {"sampling": PENALISED, "processed_logprobs": NUMBERS}, []),
        (PENALISED, {"sampling": CUT, "processed_logprobs": NUMBERS}, ["truncation", "penalties"]),
        (BIASED, {"sampling": BIASED, "processed_logprobs": NUMBERS}, []),
        (BIASED, {"sampling": PENALISED, "processed_logprobs": NUMBERS}, ["penalties", "logit_bias"]),
        (Sampling(temperature=0.8), {}, []),
        (Sampling(temperature=0.8), {"logprobs": None}, ["no_logprobs"]),
    ],
)
def test_processed_distribution(named: Sampling, changes: dict[str, Any], wanted: list[str]) -> None:
    assert of(Objective(named, Named.PROCESSED), **changes) == wanted


def test_temperatures_are_compared_as_they_are_used() -> None:
    objective = Objective(Sampling(temperature=0.1 + 0.2))
    good = RolloutBatch(0, (completion(sampling=Sampling(temperature=0.3)),))
    assert 0.1 + 0.2 != 0.3 and decide(good, objective, SNAPSHOT).reuse


def test_values_of_ppo() -> None:
    objective = replace(OBJECTIVE, values=True)
    assert of(objective) == []
    assert of(objective, values=None) == ["no_values"]
    assert of(objective, values=NUMBERS * math.nan) == ["not_finite"]


def test_completions_without_tokens_have_nothing_to_reuse() -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    stale = replace(SNAPSHOT, version=1, bits_id="other")
    assert of(tokens=nothing, logprobs=None, values=None, snapshot=stale) == []


def test_resumed_runs_need_the_identity_of_the_weights() -> None:
    resumed = replace(SNAPSHOT, run="second", version=0, weights="hash 1")
    assert of(against=resumed) == ["other_run"]
    known = replace(SNAPSHOT, weights="hash 1")
    both = RolloutBatch(0, (completion(snapshot=known),))
    assert decide(both, OBJECTIVE, resumed).reuse, "the same weights, whatever a version counts"
    assert reasons(decide(both, OBJECTIVE, replace(resumed, weights="hash 2"))) == ["weights"]
    mixed = RolloutBatch(0, (completion(snapshot=known, drawn=(Drawn(0, 3), Drawn(1, 4))),))
    assert reasons(decide(mixed, OBJECTIVE, resumed)) == ["mixed_versions"]
    assert reasons(decide(both, OBJECTIVE, replace(SNAPSHOT, weights="hash 2"))) == ["weights"]


def test_modes() -> None:
    stale = batch(snapshot=replace(SNAPSHOT, version=2))
    assert reasons(decide(stale, OBJECTIVE, SNAPSHOT, "auto")) == ["stale_version"]
    assert reasons(decide(batch(), OBJECTIVE, SNAPSHOT, "never")) == ["asked"]
    with pytest.raises(ReuseError, match="reuse of log-probabilities is required and not valid: Tokens were"):
        decide(stale, OBJECTIVE, SNAPSHOT, "require")
    with pytest.raises(ReuseError) as caught:
        decide(stale, OBJECTIVE, SNAPSHOT, "require")
    assert caught.value.decision.reasons == (Reason.STALE_VERSION,)
    with pytest.raises(ValueError, match="reuse must be one of auto, require, never, got 'yes'"):
        decide(stale, OBJECTIVE, SNAPSHOT, "yes")
    with pytest.raises(ValueError, match="temperature of an objective must be above 0"):
        Objective(Sampling(temperature=0))
    with pytest.raises(ValueError, match="named must be one of whole, processed, got 'both'"):
        Objective(named="both")  # type: ignore[arg-type]


def test_explanations_for_people_and_machines() -> None:
    found = decide(batch(snapshot=replace(SNAPSHOT, version=2), values=None), OBJECTIVE, SNAPSHOT)
    assert found.explain() == (
        "Tokens were drawn under another version of the weights. 6 completions, the first is number 0: "
        "recorded 2, wanted 3."
    )
    one = decide(batch(prompts=1, samples=1, as_drawn=False), OBJECTIVE, SNAPSHOT)
    assert one.explain().endswith("tokenised again. It is completion number 0.")
    assert json.loads(json.dumps(found.document())) == {"reuse": False, "reasons": {"stale_version": 6}}
    codes = [each.code for each in Reason]
    assert len(set(codes)) == len(codes) and all(each.sentence.endswith(".") for each in Reason)


def test_every_reason_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
    assert not [each.code for each in Reason if f"`{each.code}`" not in page]
