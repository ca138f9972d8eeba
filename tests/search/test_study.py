"""A study is made whole or not at all, and refuses what it cannot search."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.search.fake_audit import OPERATOR, ROOT, WORKLOADS, FakeAudits, new_study, reopened

from kernelbraid.contract import BitPolicy, Source, Workload
from kernelbraid.search.study import DEFAULT_PATIENCE, Study, constant_axes

FORWARD_ONLY = replace(OPERATOR, regimes=("prefill", "decode"))


def test_a_new_study_holds_what_it_was_given(tmp_path: Path) -> None:
    with new_study(tmp_path / "s", FakeAudits(), minutes=3, audits=20, policy="pinned", seed=7) as study:
        record = study.store.study
        assert (record.operator, record.device, record.dtype) == ("attention", "cpu", "float32")
        assert (record.minutes, record.audits, record.patience, record.seed) == (3, 20, DEFAULT_PATIENCE, 7)
        assert record.policy is BitPolicy.PINNED and record.workloads == WORKLOADS
        assert record.constant_axes == ({"query_heads": 9, "kv_heads": 3, "head_dim": 64},)
        assert study.root == study.incumbent == ROOT.sha256
        assert study.store.source(study.root).text == ROOT.text
        assert study.standings() == {}
    with reopened(tmp_path / "s", FakeAudits()) as study:
        assert study.workloads == WORKLOADS
        study.require_current()


def test_by_default_the_operators_study_grid_is_timed(tmp_path: Path) -> None:
    with new_study(tmp_path / "s", FakeAudits(), workloads=None) as study:
        assert study.workloads == OPERATOR.grids["study"]
        assert {each.phase for each in study.workloads} == set(OPERATOR.regimes) - {"backward"}


def test_the_root_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "root.py"
    file.write_text(ROOT.text)
    with new_study(tmp_path / "s", FakeAudits(), root=file) as study:
        assert study.root == ROOT.sha256
        assert study.store.implementation(study.root).label == "root.py"


NO_NUMERICS = Source(ROOT.text.replace("def numerics", "def other"))
OUTSIDE = Source(ROOT.text.replace("(256, 512, 1024, 2048)", "(256, 512, 1024, 1000)"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"operator": "atention"}, "unknown operator 'atention'"),
        ({"device": "tpu"}, "device must be cpu or cuda"),
        ({"device": "cuda"}, "device cuda"),
        ({"policy": "loose"}, "policy must be one of pinned, mutual"),
        ({"proposer": "oracle"}, "proposer must be one of knobs, external"),
        ({"dtype": "float8"}, "dtype must be one of float32"),
        ({"minutes": 0}, "minutes must be positive"),
        ({"minutes": float("nan")}, "minutes must be positive"),
        ({"audits": -1}, "audits must be positive"),
        ({"patience": 0}, "patience must be positive"),
        ({"workloads": ()}, "workloads must name at least one"),
        ({"workloads": (Workload("decode", (("batch", 1),)),)}, "must give the constant axis query_heads"),
        (
            {"operator": FORWARD_ONLY, "workloads": (Workload("backward", WORKLOADS[0].axes),)},
            "no regime backward",
        ),
        ({"root": Path("/nowhere/root.py")}, "cannot read the implementation"),
        ({"root": Source("def attention(:")}, "not valid Python"),
        ({"root": NO_NUMERICS}, "must define numerics"),
        ({"root": OUTSIDE}, "numeric knob CHUNK must stay within"),
    ],
)
def test_bad_arguments_are_named_and_leave_nothing(
    tmp_path: Path, given: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {"operator": "attention", "root": ROOT, "workloads": WORKLOADS, **given}
    with pytest.raises(ValueError, match=message):
        Study.create(tmp_path / "s", **arguments)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "root.py"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        new_study(tmp_path / "s", FakeAudits(), root=file)
    assert [each.name for each in tmp_path.iterdir()] == ["root.py"]


def test_a_folder_in_use_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "mine").write_text("precious")
    with pytest.raises(ValueError, match="exists already"):
        new_study(tmp_path / "s", FakeAudits())
    assert [each.name for each in (tmp_path / "s").iterdir()] == ["mine"]


def test_opening_what_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no study"):
        Study.open(tmp_path / "nothing")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "study.db").write_text("not a database")
    with pytest.raises(ValueError, match="damaged or no database"):
        Study.open(tmp_path / "s")


def test_a_study_of_other_judging_code_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelbraid.audit import jobs

    new_study(tmp_path / "s", FakeAudits()).close()
    monkeypatch.setattr(jobs, "harness_hash", lambda operator: "f" * 64)
    with Study.open(tmp_path / "s") as study, pytest.raises(ValueError, match="another state of the judging"):
        study.require_current()


def test_constant_axes_are_listed_once() -> None:
    other = Workload("decode", (("query_heads", 32), ("kv_heads", 8), ("head_dim", 128)))
    assert len(constant_axes(OPERATOR, (*WORKLOADS, other, *WORKLOADS))) == 2
    with pytest.raises(ValueError, match="head_dim must be one of"):
        constant_axes(
            OPERATOR, (Workload("decode", (("query_heads", 1), ("kv_heads", 1), ("head_dim", 80))),)
        )
