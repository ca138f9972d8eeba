"""A language model as proposer with real builds and audits, of a tiny operator."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("pydantic_ai", reason="it is part of the extras llm and dev")

from tests.audit import toy
from tests.search.proposers.endpoint import Endpoint, Use, serving

from kernelbraid.audit import jobs
from kernelbraid.contract import Source
from kernelbraid.ir import proposing, query
from kernelbraid.search import loop
from kernelbraid.search.proposers.llm import LlmProposer
from kernelbraid.search.proposers.llm_settings import LlmSettings
from kernelbraid.search.study import Study
from kernelbraid.search.trial import try_build

DETOUR = "        for _ in range(40):\n            request = request[::-1].copy()\n"
"""Twenty times there and back: the same numbers, later."""
PLACE = "        before = np.zeros(x.shape[1], np.float32)\n"
SLOW = toy.variant((PLACE, DETOUR + PLACE), label="slow root")
ABOUT = {
    "hypothesis": "without the detour",
    "expected_effect": "a fraction of the time",
    "falsified_by": "no gain",
    "functions": ["scaled_sums"],
    "regimes": ["prefill", "decode"],
    "requirements_at_risk": ["sums/1/rerun/prefill"],
}
run_job = partial(jobs.run_job, find=lambda name, device: toy.SUMS)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    def edit(old: str, new: str) -> dict[str, object]:
        return {"base": SLOW.short, "replacements": [{"old": old, "new": new}]}

    def submit_draft(body: dict[str, object]) -> Use:
        draft = json.loads(body["messages"][-1]["content"])["draft"]  # type: ignore[index]
        return Use("submit", {**ABOUT, "base": draft})

    moves = (
        Use("try_build", edit(DETOUR, "        import subprocess\n")),
        Use("try_build", edit(DETOUR, "        request = request @ request\n")),
        Use("try_build", edit(DETOUR, "")),
        submit_draft,
        Use("decline", {"reason": "nothing left"}),
    )
    with serving(*moves) as made:
        yield made


def study_of(folder: Path, endpoint: Endpoint) -> Study:
    settings = LlmSettings.of("stub", base_url=f"{endpoint.url}/v1", retries=0)
    return Study.create(folder, toy.SUMS, SLOW, proposer="llm", llm=settings, minutes=5)


@pytest.mark.slow
def test_a_model_takes_a_study_from_a_slow_root_to_a_promotion(tmp_path: Path, endpoint: Endpoint) -> None:
    with study_of(tmp_path / "s", endpoint) as study:
        proposer = LlmProposer.of(study)
        assert loop.run(study, proposer, run_job=run_job) is loop.Ending.PROPOSER
        assert study.incumbent == toy.root().sha256 and study.summary()["speedup"] > 1.1
        tripped, failed, built = (json.loads(each) for each in endpoint_results(endpoint))
        assert tripped["built"] is False and "tripwire" in tripped["reason"]
        assert failed["built"] is False and "matmul" in failed["reason"] + failed["output"]
        assert built["built"] is True and "block=16" in built["reason"]
        said = query.modification(study.store, study.incumbent)
        assert said is not None and said.requirements_at_risk == ("sums/1/rerun/prefill",)
        (first, *later) = proposing.attempts(study.store)
        assert first.outcome == "proposed" and {each.outcome for each in later} == {"declined"}
        study.store.check()


def endpoint_results(endpoint: Endpoint) -> list[str]:
    """What the drafts of the first conversation came to."""
    return [each["content"] for each in endpoint.requests[3]["messages"] if each["role"] == "tool"]


def test_a_draft_that_cannot_be_an_implementation_is_not_started(tmp_path: Path, endpoint: Endpoint) -> None:
    with study_of(tmp_path / "s", endpoint) as study:
        assert "must define scaled_sums" in try_build(study, Source("x = 1\n"))["reason"]
        assert try_build(study, Source("def f(:\n"))["built"] is False
