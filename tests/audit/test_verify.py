"""Verification in real processes, certificates of this machine, and committed evidence."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.controls.broken import CONTROLS, GOOD

from kernelbraid import ops
from kernelbraid.audit import certificates, partial, verify
from kernelbraid.audit.environment import fingerprint
from kernelbraid.contract import Source
from kernelbraid.ir.evidence import Certificate, Difference, Level, Verdict
from kernelbraid.ops import installed
from kernelbraid.ops.attention.spec import ATTENTION

SCOPE = {"query_heads": 3, "kv_heads": 1, "head_dim": 64}
ROOT = Path(__file__).parents[2] / "examples" / "roots" / "straightforward.py"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def small(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One scope, and a data folder of this test, in which compiled code outlives it."""
    monkeypatch.setattr(verify, "scopes_of", lambda operator: (SCOPE,))
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (compiled / "compiled").mkdir(exist_ok=True)
    (tmp_path / "home" / "compiled").symlink_to(compiled / "compiled")
    yield


def report(**changes: Any) -> verify.Report:
    """What a verification of the shipped source that held everything would say."""
    source = ops.source(ATTENTION)
    held = tuple(Verdict(r.id, True, 3, 100) for r in ATTENTION.contract.requirements)
    made = verify.Report(
        operator=ATTENTION,
        source=source,
        against=None,
        level=Level.FULL,
        seed=1,
        verdicts=held,
        bits_ids=(("query_heads=3,kv_heads=1,head_dim=64,float32", "0123"),),
        untested=(),
        specialisations=("attend",),
        environment=fingerprint(rates=False),
        seconds=1.0,
    )
    return replace(made, **changes)


# ---- in processes


def test_another_implementation_is_verified_against_the_root_and_a_case_is_repeated() -> None:
    told: list[tuple[str, float]] = []
    found = verify.verify(
        ATTENTION,
        level=Level.SMOKE,
        source=Source(GOOD),
        against=Source(ROOT.read_text()),
        seed=3,
        progress=lambda what, fraction: told.append((what, fraction)),
    )
    assert found.held and found.unequal == 0 and found.comparisons > 10_000
    assert any("implementations_agree" in verdict.requirement for verdict in found.verdicts)
    assert told[-1][1] == 1.0 and len(told) == len(found.verdicts)
    document = json.loads(json.dumps(found.to_json()))
    assert document["held"] is True and document["implementation"] == Source(GOOD).sha256
    assert {line["relation"] for line in document["relations"]} >= {"rerun", "decode_equals_prefill"}
    assert len(document["bits_ids"]) == 1

    broken = next(c for c in CONTROLS if c.name == "undeclared_numerics")
    case = (
        "attention/1/implementations_agree/prefill/smoke/float32/3-1-64/256-32-6/none/3/0",
        "attention/1/decode_equals_prefill/decode/smoke/float32/3-1-64/256-32-6/none/3/0",
    )
    _, differs = verify.verify_case(ATTENTION, case[0], source=Source(broken.text))
    assert not differs.held and differs.difference is not None and differs.difference.case == case[0]
    again = verify.verify_case(ATTENTION, case[0], source=Source(broken.text))[1]
    assert again == differs
    assert verify.verify_case(ATTENTION, case[1], source=Source(broken.text))[1].held


@pytest.mark.slow
@pytest.mark.parametrize("name", ["merged_as_they_arrive", "reads_the_page_tail", "nan_payload_leaks"])
def test_a_broken_attention_fails_in_processes_too(name: str) -> None:
    control = next(c for c in CONTROLS if c.name == name)
    found = verify.verify(ATTENTION, level=Level.SCREEN, source=Source(control.text), seed=4)
    failed = {verdict.requirement for verdict in found.verdicts if not verdict.held}
    assert f"attention/1/{control.rejected_by}" in failed
    assert len(found.verdicts) == len(ATTENTION.contract.requirements), "it goes on after a failure"


@pytest.mark.slow
def test_the_shipped_implementation_holds_a_screen_of_every_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = verify.verify(ATTENTION, level=Level.SCREEN)
    assert [verdict.difference for verdict in found.verdicts if not verdict.held] == []
    assert found.untested == () and found.unequal == 0
    assert len(found.bits_ids) == len(verify.scopes_of(ATTENTION)) > 8


def test_an_implementation_that_does_not_build_is_one_clear_error() -> None:
    with pytest.raises(RuntimeError, match=r"mine\.py does not build"):
        verify.verify(ATTENTION, level=Level.SMOKE, source=Source("raise ImportError('no')", label="mine.py"))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="cuda"):
        verify.verify(dataclasses.replace(ATTENTION, backend="cuda"))
    with pytest.raises(ValueError, match="device must be cpu or cuda"):
        verify.verify(dataclasses.replace(ATTENTION, backend="tpu"))


def test_scopes_are_those_of_the_workloads_and_the_stated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    scopes = verify.scopes_of(ATTENTION)
    groups = {scope["query_heads"] // scope["kv_heads"] for scope in scopes}
    assert groups >= {1, 3, 4, 5, 6, 7, 8}
    assert {scope["head_dim"] for scope in scopes} == {64, 128}
    assert len({tuple(sorted(scope.items())) for scope in scopes}) == len(scopes)


# ---- which sources


def test_the_source_in_use_is_the_installed_winner() -> None:
    assert verify.in_use(ATTENTION) == ops.source(ATTENTION)
    winner = Source("# mine\n")
    device = installed.cpu_model()
    installed.install("attention", winner, architecture="cpu", device=device, contract="c", record={})
    assert verify.in_use(ATTENTION).sha256 == winner.sha256


def test_the_second_implementation_of_a_checkout_is_a_root() -> None:
    found = verify.second_implementation(ATTENTION)
    assert found is not None and found.sha256 == Source(ROOT.read_text()).sha256


def test_numerics_are_set_in_a_source_and_nothing_else_changes() -> None:
    text = "CHUNK = 1024\nKEY_BLOCK = 64\n    CHUNK = 7\nOTHER_CHUNK = 1\n"
    changed = verify.with_numerics(Source(text), {"chunk": 256, "key_block": 32, "exp2_degree": 5})
    assert changed.text == "CHUNK = 256\nKEY_BLOCK = 32\n    CHUNK = 7\nOTHER_CHUNK = 1\n"


# ---- certificates of this machine


def test_a_certificate_is_written_and_found_while_it_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    assert certificates.local_certificate(ATTENTION) is None
    path = certificates.write_local(report())
    found = certificates.local_certificate(ATTENTION)
    assert found is not None and found == Certificate.loads(path.read_text())
    assert found.file == "cpu.py" and found.contract == ATTENTION.contract.hash
    assert path.is_relative_to(installed.home()) and [p.name for p in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(certificates, "harness_hash", lambda operator: "another")
    assert certificates.local_certificate(ATTENTION) is None


def test_a_certificate_speaks_of_what_is_in_use() -> None:
    certificates.write_local(report())
    device = installed.cpu_model()
    installed.install("attention", Source("#\n"), architecture="cpu", device=device, contract="c", record={})
    assert certificates.local_certificate(ATTENTION) is None


def test_a_spoilt_certificate_is_none() -> None:
    path = certificates.write_local(report())
    path.write_text(path.read_text()[:100])
    assert certificates.local_certificate(ATTENTION) is None


def test_no_certificate_for_a_failure_or_a_screen() -> None:
    difference = Difference("case", 1, "place", "1", "2", 1, 1)
    failed = Verdict("attention/1/rerun/decode", False, 1, 1, None, difference)
    with pytest.raises(ValueError, match="rerun/decode does not hold"):
        certificates.certificate(report(verdicts=(failed,)))
    with pytest.raises(ValueError, match="full"):
        certificates.certificate(report(level=Level.SCREEN))
    assert report(verdicts=(failed,)).unequal == 1 and not report(verdicts=(failed,)).held


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "home" / "certificates").write_text("in the way")
    with pytest.raises(RuntimeError, match="cannot write"):
        certificates.write_local(report())


# ---- committed evidence


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    folder = tmp_path / "evidence"
    (folder / "cpu").mkdir(parents=True)
    (folder / "cpu" / "attention.certificate.json").write_text(certificates.certificate(report()).dumps())
    document = {
        "operator": "attention",
        "contract": ATTENTION.contract.hash,
        "environment": {"architecture": "cpu"},
        "rows": [{"implementation": ops.source(ATTENTION).sha256, "verified": True}],
    }
    (folder / "cpu" / "attention.bench.json").write_text(json.dumps(document))
    return folder


def test_current_evidence_matches(evidence: Path) -> None:
    found = certificates.check_evidence(evidence)
    assert found == {"certificates": 1, "benchmarks": 1, "mismatched": 0, "problems": []}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("contract", "0" * 64, "contract"),
        ("implementation", "0" * 64, "no longer the source"),
        ("harness", "0" * 64, "judge has changed"),
        ("verdicts", [], "every requirement"),
        ("file", "gone.py", "unreadable"),
        ("operator", "convolution", "unreadable"),
    ],
)
def test_a_certificate_that_does_not_match(evidence: Path, field: str, value: Any, reason: str) -> None:
    path = evidence / "cpu" / "attention.certificate.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    found = certificates.check_evidence(evidence)
    assert (found["certificates"], found["mismatched"]) == (1, 1)
    [problem] = found["problems"]
    assert problem["file"] == "cpu/attention.certificate.json" and reason in problem["reason"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("contract", "0" * 64, "contract"),
        ("rows", [{"implementation": "0" * 64, "verified": True}], "no longer the source"),
        ("rows", [{"implementation": "0" * 64, "verified": False}], "not verified"),
        ("rows", [{}], "unreadable"),
        ("environment", {"architecture": "sm_90"}, "sm_90"),
    ],
)
def test_a_benchmark_that_does_not_match(evidence: Path, field: str, value: Any, reason: str) -> None:
    path = evidence / "cpu" / "attention.bench.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    found = certificates.check_evidence(evidence)
    assert (found["benchmarks"], found["mismatched"]) == (1, 1)
    assert reason in found["problems"][0]["reason"]


def test_evidence_in_another_architectures_folder_does_not_match(evidence: Path) -> None:
    shutil.move(evidence / "cpu", evidence / "sm_90")
    assert certificates.check_evidence(evidence)["mismatched"] == 2


def test_torn_evidence_is_a_mismatch_and_a_missing_folder_an_error(evidence: Path, tmp_path: Path) -> None:
    (evidence / "cpu" / "attention.bench.json").write_text("{")
    (evidence / "cpu" / "attention.certificate.json").write_text("[]")
    assert certificates.check_evidence(evidence)["mismatched"] == 2
    with pytest.raises(ValueError, match="no folder of evidence"):
        certificates.check_evidence(tmp_path / "nowhere")


def test_another_schedule_of_a_source_keeps_its_numerics() -> None:
    text = (
        "BLOCK = 16\nTILE = 4\nMODE = 'a'\nALONE = 1\n"
        "KNOBS = {'BLOCK': ('numeric', (8, 16)), 'TILE': ('schedule', (4, 64)),"
        " 'MODE': ('schedule', ('b', 'a')), 'ALONE': ('schedule', (1,))}\n"
    )
    found = verify.with_other_schedule(Source(text, "x"))
    assert found is not None and found.label == "x, another schedule"
    assert found.text.splitlines()[:4] == ["BLOCK = 16", "TILE = 64", "MODE = 'b'", "ALONE = 1"]
    assert verify.with_other_schedule(Source("BLOCK = 16\n")) is None


def test_a_gpu_operator_has_a_second_implementation() -> None:
    operator = ops.get("attention", "cuda")
    second, shipped = verify.second_implementation(operator), ops.source(operator)
    assert second is not None and second.sha256 != shipped.sha256
    changed = [
        (ours, theirs)
        for ours, theirs in zip(shipped.text.splitlines(), second.text.splitlines(), strict=True)
        if ours != theirs
    ]
    assert len(changed) >= 5 and all(" = " in ours for ours, _ in changed)


def processes() -> list[psutil.Process]:
    """All below this one but Python's own tracker of resources, which lives as long as this one."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if not any("resource_tracker" in word for word in each.cmdline())]


def test_scopes_may_be_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = (SCOPE, {**SCOPE, "query_heads": 2}, {**SCOPE, "query_heads": 1})
    monkeypatch.setattr(verify, "scopes_of", lambda operator: scopes)
    monkeypatch.setattr(verify, "scopes_together", lambda backend: 2)
    fractions: list[float] = []
    found = verify.verify(
        ATTENTION,
        level=Level.SMOKE,
        source=Source(GOOD),
        seed=1,
        progress=lambda _, fraction: fractions.append(fraction),
    )
    assert found.held and len(found.bits_ids) == 3 and len(set(dict(found.bits_ids).values())) == 3
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1.0)
    assert all(verdict.cases % 3 == 0 for verdict in found.verdicts)
    assert not processes(), "a verification left processes behind"


def test_one_scope_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "scopes_of", lambda operator: (SCOPE, {**SCOPE, "query_heads": 2}))
    monkeypatch.setattr(verify, "scopes_together", lambda backend: 2)
    broken = Source(GOOD + "\n_numerics = numerics\n\n\ndef numerics(axes):\n"
                    "    return _numerics(axes) if axes['query_heads'] != 2 else {}\n")  # fmt: skip
    with pytest.raises(RuntimeError, match="does not build"):
        verify.verify(ATTENTION, level=Level.SCREEN, source=broken)
    assert not processes(), "a verification left processes behind"


def test_an_interrupted_verification_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = (SCOPE, {**SCOPE, "query_heads": 2}, {**SCOPE, "query_heads": 1})
    monkeypatch.setattr(verify, "scopes_of", lambda operator: scopes)

    def run(stop_at: float, source: str = GOOD, seed: int | None = None) -> tuple[verify.Report, list[str]]:
        told: list[str] = []

        def progress(what: str, fraction: float) -> None:
            told.append(what.split(":")[0])
            if fraction > stop_at:
                raise KeyboardInterrupt

        level, given = Level.SMOKE, Source(source)
        return verify.verify(
            ATTENTION, level=level, source=given, seed=seed, resume=True, progress=progress
        ), told

    with pytest.raises(KeyboardInterrupt):
        run(0.5, seed=11)
    kept = installed.home() / "verifying"
    assert len(list(kept.glob("*/*.json"))) == 1
    other, told = run(2.0, GOOD + "\n# another source\n", seed=11)
    assert len(set(told)) == 3, "what was found of one source is nothing about another"
    found, told = run(2.0, seed=12)
    assert set(told) == {f"query_heads={n},kv_heads=1,head_dim=64,float32" for n in (2, 1)}
    assert found.held and found.seed == 11 and len(found.bits_ids) == 3
    assert found.comparisons == other.comparisons
    assert not list(kept.iterdir()), "a verification that is done leaves nothing"


def test_a_damaged_record_of_a_scope_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = partial.Finished("subject")
    part = partial.Part("scope", "bits", (Verdict("r", True, 1, 5),), {"x": "why"}, ("kernel",))
    finished.keep(part)
    assert finished.find("scope") == part and finished.find("other") is None
    (path,) = finished.folder.glob("*.json")
    path.write_text(path.read_text()[:-5])
    assert finished.find("scope") is None
