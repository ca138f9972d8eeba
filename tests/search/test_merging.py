"""Two modifications composed."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.search import fake_audit
from tests.search.fake_audit import FakeAudits
from typer.testing import CliRunner

from kernelbraid.cli import app
from kernelbraid.contract import Source
from kernelbraid.ir import query
from kernelbraid.search import merging
from kernelbraid.search.merging import Conflict, three_way
from kernelbraid.search.proposers import external

BASE = list("abcdefgh")
LINES = st.lists(st.sampled_from("abcde"), max_size=12)


def text(parts: object) -> str:
    return "".join("<conflict>" if isinstance(each, Conflict) else "".join(each) for each in parts)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ours", "theirs", "merged"),
    [
        ("abXdefgh", "abcdefYh", "abXdefYh"),
        ("abcdefgh", "acdefgh", "acdefgh"),
        ("Xabcdefgh", "abcdefghY", "XabcdefghY"),
        ("abXdefgh", "abXdefgh", "abXdefgh"),
        ("abXdefgh", "abYdefgh", "ab<conflict>defgh"),
        ("", "abcdefgh", ""),
        ("abcdefgh", "abcdZZefgh", "abcdZZefgh"),
        ("abdefgh", "abCdefgh", "ab<conflict>defgh"),
        ("abXdefgh", "abcYefgh", "abXYefgh"),
        ("abXZefgh", "abYdefgh", "ab<conflict>Zefgh"),
    ],
)
def test_three_way(ours: str, theirs: str, merged: str) -> None:
    assert text(three_way(BASE, list(ours), list(theirs))) == merged


@given(LINES, LINES)
def test_a_side_that_changed_nothing_takes_the_other(base: list[str], other: list[str]) -> None:
    assert text(three_way(base, base, other)) == "".join(other)
    assert text(three_way(base, other, base)) == "".join(other)
    assert text(three_way(base, other, other)) == "".join(other)


@given(LINES, LINES, LINES)
def test_sides_may_change_places(base: list[str], ours: list[str], theirs: list[str]) -> None:
    swapped = text(three_way(base, theirs, ours))
    assert text(three_way(base, ours, theirs)) == swapped


def child(**knobs: object) -> str:
    found = fake_audit.ROOT.text
    for name, value in knobs.items():
        old = next(line for line in found.splitlines() if line.startswith(f"{name} = "))
        found = found.replace(old, f"{name} = {value!r}".replace("'", '"'), 1)
    return found


@pytest.fixture
def family(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A root and three children of it, audited: two of different knobs, one of the first one's again."""
    fake = FakeAudits()
    folder = tmp_path / "study"
    fake_audit.new_study(folder, fake).close()
    with fake_audit.reopened(folder, fake) as study:
        study.store.request_audit(study.root, fake_audit.Level.SCREEN)
        from kernelbraid.search import audits

        audits.run(study, study.store.pending(), run_job=fake)
    found = {}
    for name, knobs in (
        ("scores", {"SCORES": "vectorised"}),
        ("values", {"VALUES": "keys_by_4"}),
        ("other", {"SCORES": "vectorised_by_4"}),
    ):
        document = external.submit(
            folder,
            Source(child(**knobs)),
            parents=[fake_audit.ROOT.sha256],
            hypothesis=name,
            audit=True,
            run_job=fake,
        )
        found[name] = document["implementation"]
    return folder, found


def test_two_children_are_composed_and_submitted_with_both_as_parents(
    family: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, found = family
    merged = external.merge(folder, found["scores"][:12], found["values"])
    assert merged["base"] == fake_audit.ROOT.sha256 and not merged["conflicts"]
    assert merged["text"] == child(SCORES="vectorised", VALUES="keys_by_4")
    document = external.submit(
        folder,
        Source(merged["text"]),
        parents=merged["parents"],
        hypothesis="both gains together",
        audit=True,
        run_job=FakeAudits(),
    )
    with fake_audit.reopened(folder, FakeAudits()) as study:
        steps = query.lineage(study.store, document["implementation"])
        assert len(steps) == 4, "the root, both parents and the child"
        assert merging.merge(study, document["implementation"], found["other"]).base == study.root


def test_conflicts_are_told_and_no_text_is_given(family: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, found = family
    output = tmp_path / "merged.py"
    result = CliRunner().invoke(
        app, ["merge", str(folder), found["scores"], found["other"], "-o", str(output)]
    )
    document = json.loads(result.stdout)
    assert result.exit_code == 1 and document["text"] is None and not output.exists()
    (conflict,) = document["conflicts"]
    assert conflict["ours"] == ['SCORES = "vectorised"\n']
    assert conflict["theirs"] == ['SCORES = "vectorised_by_4"\n']
    line = fake_audit.ROOT.text.splitlines().index('SCORES = "key_by_key"') + 1
    assert conflict["line"] == line


def test_what_cannot_be_merged(family: tuple[Path, dict[str, str]]) -> None:
    folder, found = family
    with pytest.raises(ValueError, match="nothing to merge"):
        external.merge(folder, found["scores"], fake_audit.ROOT.sha256)
    with pytest.raises(ValueError, match="nothing to merge"):
        external.merge(folder, found["scores"], found["scores"])
    rejected = external.submit(
        folder,
        Source(child(EXP2_DEGREE=4)),
        parents=[fake_audit.ROOT.sha256],
        hypothesis="fewer terms",
        audit=True,
        run_job=FakeAudits(),
    )
    with pytest.raises(ValueError, match="only verified implementations are merged"):
        external.merge(folder, found["scores"], rejected["implementation"])
