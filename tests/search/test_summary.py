"""The closing numbers, and what becomes of a winner."""

import json
import math
from pathlib import Path

import pytest
from tests.search.fake_audit import ENVIRONMENT, ROOT, WORKLOADS, FakeAudits, new_study

from kernelbraid.ops import installed
from kernelbraid.search import loop, promote
from kernelbraid.search.proposers.knobs import KnobProposer

STABLE = {
    "study": str,
    "operator": str,
    "device": str,
    "root": str,
    "best": str,
    "speedup": float,
    "audited": int,
    "verified": int,
    "rejected": dict,
    "comparisons": int,
    "unequal": int,
    "seconds": float,
}


def test_the_summary_of_a_new_study_says_that_nothing_is_known(tmp_path: Path) -> None:
    with new_study(tmp_path / "s", FakeAudits()) as study:
        found = json.loads(json.dumps(study.summary()))
        assert {name: type(found[name]) for name in STABLE} == STABLE
        assert found["best"] == found["root"] == ROOT.sha256 and found["speedup"] == 1.0
        assert found["audited"] == 0 and found["objective"] is None and found["fastest"] is None


def test_the_summary_of_a_finished_study_adds_up(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, minutes=3) as study:
        loop.run(study, KnobProposer(), run_job=fake)
        found = json.loads(json.dumps(study.summary()))
    assert {name: type(found[name]) for name in STABLE} == STABLE
    assert found["audited"] == found["verified"] + sum(found["rejected"].values())
    objective = found["objective"]
    assert found["speedup"] == pytest.approx(1 / objective["ratio"])
    assert objective["best_ms"] / objective["root_ms"] == pytest.approx(objective["ratio"])
    assert objective["ratio"] < objective["upper"] < 1
    assert [row["workload"] for row in found["workloads"]] == [each.name for each in WORKLOADS]
    assert all(row["ratio"] == pytest.approx(row["best_ms"] / row["root_ms"]) for row in found["workloads"])
    assert [row["regime"] for row in found["regimes"]] == ["prefill", "decode", "update"]
    weighed = math.fsum(row["best_ms"] for row in found["regimes"])
    assert weighed == pytest.approx(objective["best_ms"], rel=0.02)
    assert 0 < found["smallest_gain"] < 1
    assert found["bits"]["changed"] and found["promotions"] >= 1
    assert Path(found["stored"]["records"]).name == "study.db"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is the one that the model's audits name."""
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(promote, "fingerprint", lambda device, rates: ENVIRONMENT)


@pytest.mark.usefixtures("here")
def test_a_winner_is_installed_with_its_certificate_and_removed_again(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=6) as study:
        loop.run(study, KnobProposer(), run_job=fake)
        path, certificate = promote.install(study)
        assert path.read_text() == study.store.source(study.incumbent).text
        assert certificate.implementation == study.incumbent
        assert certificate.contract == study.contract.hash
        assert all(verdict.held for verdict in certificate.verdicts)
        ((axes, bits),) = certificate.bits_ids
        assert axes == "query_heads=9 kv_heads=3 head_dim=64 float32"
        assert bits == study.summary()["bits"]["best"]
        found = installed.active("attention", "cpu", ENVIRONMENT.device)
        assert found is not None and found.sha256 == study.incumbent
    assert promote.uninstall("attention")
    assert installed.active("attention", "cpu", ENVIRONMENT.device) is None
    assert not promote.uninstall("attention")


@pytest.mark.usefixtures("here")
def test_nothing_unproven_is_installed(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake) as study:
        with pytest.raises(ValueError, match="promoted nothing"):
            promote.install(study)
        assert not (tmp_path / "home").exists()


def test_a_winner_of_another_machine_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path / "home"))
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=6) as study:
        loop.run(study, KnobProposer(), run_job=fake)
        with pytest.raises(ValueError, match="was proven on Fake CPU"):
            promote.install(study)
    assert not (tmp_path / "home").exists()
