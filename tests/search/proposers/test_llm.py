"""A language model as proposer, against an endpoint that speaks the real protocols over HTTP."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic_ai", reason="it is part of the extras llm and dev")

from tests.search.fake_audit import OPERATOR, ROOT, FakeAudits, new_study, reopened
from tests.search.proposers.endpoint import Answer, Endpoint, Say, Use, serving

from kernelbraid.ir import proposing, query
from kernelbraid.search import loop, prompts
from kernelbraid.search.proposers import Proposal, ProposerSpent, edits
from kernelbraid.search.proposers import llm as proposer
from kernelbraid.search.proposers.llm import LlmProposer
from kernelbraid.search.proposers.llm_settings import LlmSettings
from kernelbraid.search.study import Study
from kernelbraid.search.travel import proposer_of

FAST = edits.apply(ROOT, {"SCORES": "vectorised"}, OPERATOR.contract)
ABOUT = {
    "hypothesis": "vector code for the scores",
    "expected_effect": "a third less",
    "falsified_by": "no gain in prefill",
    "functions": ["scores"],
    "regimes": ["prefill", "decode"],
    "requirements_at_risk": [],
}
EDIT = {"base": ROOT.short, "replacements": [{"old": '"key_by_key"\nVALUES', "new": '"vectorised"\nVALUES'}]}
SUBMIT_EDIT = Use("submit", {**ABOUT, **EDIT})
SUBMIT_TEXT = Use("submit", {**ABOUT, "source": FAST.text})


@contextmanager
def study_of(
    folder: Path, endpoint: Endpoint, *, api: str = "openai", audited: bool = True, **given: Any
) -> Iterator[tuple[Study, FakeAudits]]:
    """A study whose root is audited and whose model is the endpoint."""
    limits = {name: given.pop(name) for name in list(given) if name in LlmSettings.__slots__}
    base = endpoint.url + ("/v1" if api == "openai" else "")
    settings = LlmSettings.of("stub", api=api, base_url=base, **{"retries": 0, **limits})
    fake = FakeAudits()
    with new_study(folder, fake, proposer="llm", llm=settings, **given) as study:
        if audited:
            from kernelbraid.search.proposers.external import External

            loop.run(study, External(), run_job=fake)
        yield study, fake


def proposed(study: Study) -> Proposal:
    (found,) = proposer_of(study).propose(study, 4)
    return found


@pytest.mark.parametrize("api", ["openai", "anthropic"])
@pytest.mark.parametrize("move", [SUBMIT_EDIT, SUBMIT_TEXT], ids=["edit", "text"])
def test_a_candidate_comes_with_all_that_a_modification_says(tmp_path: Path, api: str, move: Use) -> None:
    with serving(move) as endpoint, study_of(tmp_path / "s", endpoint, api=api) as (study, _):
        found = proposed(study)
        assert found.source.text == FAST.text and found.parents == (ROOT.sha256,)
        assert found.functions == ("scores",) and found.regimes == ("prefill", "decode")
        assert found.expected_effect == "a third less" and found.falsified_by == "no gain in prefill"
        assert found.proposer == "llm:stub"
        (request,) = endpoint.requests
        assert request["path"] == ("/v1/chat/completions" if api == "openai" else "/v1/messages")
        assert ROOT.sha256 in json.dumps(request["messages"]) and "QUERY_TILE" in json.dumps(
            request["messages"]
        )
        spent = proposing.spent(study.store)
        assert (spent.calls, spent.tokens_in, spent.tokens_out, spent.tokens) == (1, 1000, 200, 1200)
        assert spent.money is None and spent.unreported == 0
        assert [each.outcome for each in proposing.attempts(study.store)] == ["proposed"]
        assert query.totals(study.store).tokens_in == 1000


READ = {
    "read_contract": ({}, "attention"),
    "read_requirements": ({}, "attention/1/accuracy_out/prefill"),
    "read_source": ({"implementation": ROOT.short, "first_line": 3, "last_line": 3}, "CHUNK = 1024"),
    "read_outlook": ({}, "opportunities"),
    "read_evidence": ({"implementation": ROOT.short}, "verdicts"),
    "merge": ({"ours": ROOT.short, "theirs": ROOT.short}, "nothing to merge"),
    "read_lineage": ({"implementation": ROOT.short}, ROOT.sha256),
    "read_output": ({"implementation": ROOT.short}, "nothing was printed"),
}


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_tools_read_what_the_study_knows(tmp_path: Path, api: str) -> None:
    uses = [Use(name, arguments) for name, (arguments, _) in READ.items()]
    with serving(*uses, SUBMIT_EDIT) as endpoint, study_of(tmp_path / "s", endpoint, api=api) as (study, _):
        proposed(study)
        for result, (_, expected) in zip(endpoint.results, READ.values(), strict=True):
            assert expected in result
        assert proposing.spent(study.store).calls == len(READ) + 1


def test_without_evidence_the_model_sees_the_contract_and_one_source(tmp_path: Path) -> None:
    moves = (
        Use("read_source", {"implementation": ROOT.short}),
        Use("read_source", {"implementation": FAST.short}),
        Use("submit", {**ABOUT, **EDIT, "parents": [FAST.short]}),
        Use("submit", {**ABOUT, **EDIT, "opportunity": 1}),
        SUBMIT_EDIT,
    )
    with serving(*moves) as endpoint, study_of(tmp_path / "s", endpoint, evidence="none") as (study, _):
        assert study.store.study.arm == "no-evidence"
        proposed(study)
        tools = {each["function"]["name"] for each in endpoint.requests[0]["tools"]}
        assert tools == {
            "read_contract",
            "read_requirements",
            "read_source",
            "try_build",
            "submit",
            "decline",
        }
        asked = json.dumps(endpoint.requests[0]["messages"])
        assert "ratio_to_root" not in asked and "read_outlook" not in asked
        assert "no implementation" in endpoint.results[1] and "no implementation" in endpoint.results[2]
        assert "the parent must be" in endpoint.results[3]


def test_a_wrong_submission_comes_back_to_be_mended(tmp_path: Path) -> None:
    replacement = {"old": "no such text", "new": ""}
    moves = (
        Use("submit", {**ABOUT, "source": "x = 1"}),
        Use("submit", {**ABOUT, "source": ROOT.text + "# the same\n"}),
        Use("submit", {**ABOUT, "base": ROOT.short, "replacements": [replacement]}),
        Use("submit", {**ABOUT, **EDIT, "requirements_at_risk": ["nonsense"]}),
        SUBMIT_EDIT,
    )
    with serving(*moves) as endpoint, study_of(tmp_path / "s", endpoint) as (study, _):
        assert proposed(study).source.text == FAST.text
        for result, expected in zip(
            endpoint.results,
            ("must define", "layout and comments", "occurs 0 times", "nonsense"),
            strict=True,
        ):
            assert expected in result
        assert len(query.implementations(study.store)) == 1 and study.store.pending() == []


@pytest.mark.parametrize(
    ("moves", "reason"),
    [
        ([Use("decline", {"reason": "it is fast enough"})], "it is fast enough"),
        ([Say("I would rather not")] * 5, "Exceeded maximum output retries"),
        ([Say("", finish="content_filter")], "ontent filter"),
        ([Use("submit", {**ABOUT, **EDIT}, cut=40, finish="length")] * 5, "token limit"),
        ([Use("submit", {**ABOUT, **EDIT}, cut=40)] * 5, "Exceeded maximum output retries"),
        ([Answer(200, "this is no JSON")], "JSON"),
        ([Answer(200, '{"choices": []}')], "Invalid response"),
        ([Answer(500, '{"error": {"message": "broken"}}')], "500"),
        ([Answer(429, '{"error": {"message": "slow down"}}')], "429"),
        ([Answer(400, '{"error": {"message": "no tools here"}}')], "no tools here"),
        ([Use("read_contract")] * 8, "within the calls"),
        ([Use("no_such_tool")] * 5, "no_such_tool"),
    ],
    ids=[
        "declined", "text", "refused", "truncated", "malformed", "no-json", "empty", "500", "429", "400",
        "endless", "tool",
    ],
)  # fmt: skip
def test_an_attempt_in_vain_costs_a_call_and_not_the_study(
    tmp_path: Path, moves: list[Any], reason: str
) -> None:
    with (
        serving(*moves, SUBMIT_EDIT) as endpoint,
        study_of(tmp_path / "s", endpoint, calls=8) as (study, _),
    ):
        before = study.budget.proposer_calls
        assert proposed(study).source.text == FAST.text
        vain, last = proposing.attempts(study.store)
        assert last.outcome == "proposed"
        assert vain.outcome == ("declined" if moves == [Use("decline", {"reason": reason})] else "failed")
        assert reason in vain.reason and "\n" not in vain.reason
        assert study.budget.proposer_calls == before + 1
        study.store.check()


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_rate_limits_and_server_errors_are_waited_for(tmp_path: Path, api: str) -> None:
    moves = (Answer(429, "{}", {"Retry-After": "1"}), Answer(503), Answer(500), SUBMIT_EDIT)
    with serving(*moves) as endpoint, study_of(tmp_path / "s", endpoint, api=api, retries=4) as it:
        study, _ = it
        start = time.monotonic()
        proposed(study)
        assert len(endpoint.requests) == 4 and time.monotonic() - start > 1
        assert proposing.spent(study.store).calls == 1
        assert [each.outcome for each in proposing.attempts(study.store)] == ["proposed"]


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_usage_that_nobody_reports_stays_unknown(tmp_path: Path, api: str) -> None:
    moves = (Use("read_contract"), Use("submit", {**ABOUT, **EDIT}, usage=None))
    given = {"max_tokens": 100_000, "price_in": 1.0, "price_out": 10.0}
    if api == "anthropic":
        moves = (Use("submit", {**ABOUT, **EDIT}, usage=None),)
    with serving(*moves) as endpoint, study_of(tmp_path / "s", endpoint, api=api, **given) as (study, _):
        try:
            proposed(study)
        except ProposerSpent:
            assert api == "anthropic"  # its protocol demands usage: an answer without it is malformed
        spent = proposing.spent(study.store)
        assert spent.unreported >= 1 and spent.tokens > 16_000
        if api == "openai":
            assert (spent.tokens_in, spent.tokens_out) == (1000, 200)
            assert spent.money_reported == pytest.approx((1000 + 2000) / 1e6)
            assert spent.money is not None and spent.money > 0.16
        else:
            assert spent.tokens_in is None and query.totals(study.store).tokens_in is None


def test_no_call_is_made_that_might_exceed_the_tokens(tmp_path: Path) -> None:
    with (
        serving(Use("read_contract", usage=(9000, 300))) as endpoint,
        study_of(tmp_path / "s", endpoint, max_tokens=30_000, answer_tokens=600) as (study, _),
    ):
        with pytest.raises(ProposerSpent, match="of 30,000 tokens are spent"):
            proposed(study)
        spent = proposing.spent(study.store)
        assert 0 < spent.tokens <= 30_000 and spent.calls == len(endpoint.requests) < 4
        assert all(each["max_completion_tokens"] <= 600 for each in endpoint.requests)


def test_no_call_is_made_that_might_cost_too_much(tmp_path: Path) -> None:
    given = {"max_money": 0.05, "price_in": 2.0, "price_out": 20.0, "answer_tokens": 1000}
    with (
        serving(Use("read_requirements")) as endpoint,
        study_of(tmp_path / "s", endpoint, **given) as (study, _),
    ):
        with pytest.raises(ProposerSpent, match=r"of \$0.05 are spent"):
            proposed(study)
        spent = proposing.spent(study.store)
        assert spent.money is not None and 0 < spent.money <= 0.05
        assert spent.money == pytest.approx(len(endpoint.requests) * (1000 * 2 + 200 * 20) / 1e6)
        with pytest.raises(ProposerSpent):  # so it is in the next process
            proposed(study)
        assert len(endpoint.requests) == spent.calls


def test_no_call_is_made_when_the_time_is_over(tmp_path: Path) -> None:
    with serving(SUBMIT_EDIT) as endpoint, study_of(tmp_path / "s", endpoint, minutes=0.15) as it:
        study, fake = it
        fake.now += 4.0
        study.budget.flush()
        assert loop.run(study, proposer_of(study), run_job=fake) is loop.Ending.TIME
        assert endpoint.requests == []


def test_an_answer_that_takes_longer_than_the_search_may_is_dropped(tmp_path: Path) -> None:
    def slow(body: object) -> Use:
        time.sleep(1)
        return SUBMIT_EDIT

    with serving(slow) as endpoint, study_of(tmp_path / "s", endpoint, minutes=6.1 / 60) as (study, _):
        with pytest.raises(ProposerSpent, match="the model did not answer in time"):
            proposed(study)
        assert proposing.spent(study.store).unreported == proposer.MOST_FAILURES


def test_a_refusal_of_the_other_protocol_costs_an_attempt(tmp_path: Path) -> None:
    moves = (Say("", finish="refusal"), SUBMIT_TEXT)
    with serving(*moves) as endpoint, study_of(tmp_path / "s", endpoint, api="anthropic") as (study, _):
        assert proposed(study).source.text == FAST.text
        assert [each.outcome for each in proposing.attempts(study.store)] == ["failed", "proposed"]


def test_money_without_a_price_is_refused(tmp_path: Path) -> None:
    with (
        serving(SUBMIT_EDIT) as endpoint,
        study_of(tmp_path / "s", endpoint, max_money=1.0) as (study, _),
        pytest.raises(ValueError, match=r"the price of stub .* is unknown: give --price-in"),
    ):
        proposed(study)
    assert endpoint.requests == []


def test_a_call_that_was_cut_off_is_charged(tmp_path: Path) -> None:
    with (
        serving(SUBMIT_EDIT) as endpoint,
        study_of(tmp_path / "s", endpoint, max_tokens=60_000) as (study, _),
    ):
        proposing.begin_call(study.store, 59_000, None)
        with pytest.raises(ProposerSpent, match="59,000 of 60,000"):
            proposed(study)
        assert endpoint.requests == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(401, '{"error": {"message": "bad key"}}'), "refuses the key in KERNELBRAID_API_KEY"),
        (Answer(404, '{"error": {"message": "no such model"}}'), "knows no model stub"),
        (Answer(402, '{"error": {"message": "pay"}}'), "no credit left"),
    ],
    ids=["key", "model", "credit"],
)
def test_what_no_attempt_mends_is_one_clear_sentence(tmp_path: Path, answer: Answer, message: str) -> None:
    with (
        serving(answer) as endpoint,
        study_of(tmp_path / "s", endpoint) as (study, fake),
        pytest.raises(RuntimeError, match=message),
    ):
        loop.run(study, proposer_of(study), run_job=fake)
    with reopened(tmp_path / "s", FakeAudits()) as study:
        study.store.check()
        assert proposing.spent(study.store).tokens == 0


def test_an_endpoint_that_is_down_is_one_clear_sentence(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = Endpoint([])
        nowhere.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with (
            study_of(tmp_path / "s", nowhere) as (study, _),
            pytest.raises(RuntimeError, match="cannot be reached: start the endpoint or check --base-url"),
        ):
            proposed(study)


def test_attempts_in_vain_end_a_search(tmp_path: Path) -> None:
    with serving(Use("decline", {"reason": "no idea"})) as endpoint, study_of(tmp_path / "s", endpoint) as it:
        study, fake = it
        told: list[loop.Progress] = []
        ending = loop.run(study, proposer_of(study), progress=told.append, run_job=fake)
        assert ending is loop.Ending.PROPOSER
        assert "5 attempts in a row came to nothing, the last: no idea" in told[-1].message
        assert len(proposing.attempts(study.store)) == proposer.MOST_FAILURES


def test_the_study_limits_how_often_the_model_is_asked(tmp_path: Path) -> None:
    with (
        serving(Use("decline", {"reason": "no idea"})) as endpoint,
        study_of(tmp_path / "s", endpoint, proposer_calls=3) as (study, fake),
    ):
        before = study.budget.proposer_calls
        assert loop.run(study, proposer_of(study), run_job=fake) is loop.Ending.CALLS
        assert before + len(proposing.attempts(study.store)) == 3 == study.budget.proposer_calls


def knob(**settings: int | str) -> Use:
    source = edits.apply(ROOT, settings, OPERATOR.contract)
    return Use("submit", {**ABOUT, "hypothesis": str(settings), "source": source.text})


def test_a_study_goes_from_the_root_to_a_promotion(tmp_path: Path) -> None:
    moves = (
        knob(EXP2_DEGREE=4),
        Use("read_outlook"),
        knob(SCORES="vectorised"),
        Use("decline", {"reason": "done"}),
    )
    with serving(*moves) as endpoint, study_of(tmp_path / "s", endpoint, audited=False) as (study, fake):
        assert loop.run(study, proposer_of(study), run_job=fake) is loop.Ending.PROPOSER
        assert study.incumbent == FAST.sha256
        assert "inaccurate" in json.dumps(endpoint.requests[2]["messages"])
        assert FAST.sha256 in json.dumps(endpoint.requests[3]["messages"])  # the next parent
        said = query.modification(study.store, FAST.sha256)
        assert said is not None and said.proposer == "llm:stub" and said.functions == ("scores",)
        summary = json.loads(json.dumps(study.summary()))
        assert summary["model"]["calls"] == len(endpoint.requests) and summary["model"]["model"] == "stub"
        assert summary["model"]["attempts"] == {"proposed": 2, "declined": 5}
        study.store.check()


def test_prompts_are_kept_in_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(SUBMIT_EDIT) as endpoint, study_of(tmp_path / "s", endpoint) as (study, _):
        kept = proposing.settings(study.store)
        assert kept is not None and dict(kept.prompts) == prompts.shipped()
        monkeypatch.setattr(prompts, "shipped", lambda: {name: "changed" for name in prompts.NAMES})
        found = proposer_of(study)
        assert isinstance(found, LlmProposer) and found._prompts == dict(kept.prompts)
        proposed(study)
        assert kept.prompts["rules"].splitlines()[0] in json.dumps(endpoint.requests[0]["messages"])


def test_keys_are_read_from_the_environment_and_kept_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-vendor")
    monkeypatch.setenv("KERNELBRAID_API_KEY", "very-secret")
    with serving(SUBMIT_EDIT) as endpoint, study_of(tmp_path / "s", endpoint) as (study, _):
        proposed(study)
        assert endpoint.requests[0]["key"] == "very-secret"
    assert b"very-secret" not in b"".join(each.read_bytes() for each in (tmp_path / "s").glob("study.db*"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "needs a model: give --model"),
        ({"model": " "}, "model must name"),
        ({"model": "m", "api": "soap"}, "api must be one of"),
        ({"model": "m", "base_url": "localhost:8000"}, "must be an address"),
        ({"model": "m", "base_url": "http://me:secret@host/v1"}, "no user or password"),
        ({"model": "m", "max_tokens": 0}, "max_tokens must be above 0"),
        ({"model": "m", "max_money": float("nan")}, "max_money must be above 0"),
        ({"model": "m", "price_in": 1.0}, "go together"),
        ({"model": "m", "evidence": "some"}, "evidence must be one of"),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlmSettings.of(given.pop("model"), **given)


def test_the_api_and_the_key_follow_from_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    claude = LlmSettings.of("claude-sonnet-4-5")
    assert (claude.api, claude.key_variable) == ("anthropic", "ANTHROPIC_API_KEY")
    with pytest.raises(
        ValueError, match=r"no key for https://api.anthropic.com: set the variable ANTHROPIC_"
    ):
        claude.key()
    local = LlmSettings.of("qwen3", base_url="http://localhost:11434/v1")
    assert (local.api, local.key_variable, local.key()) == ("openai", "KERNELBRAID_API_KEY", None)
