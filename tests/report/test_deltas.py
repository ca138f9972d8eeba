"""Sources come back as they were."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kernelbraid.report.deltas import hunks, pack, unpack

LINES = st.lists(st.sampled_from(["", "a", "b", "\u2028", "x = 1\r", "\x0c"]), max_size=30)


@given(st.lists(st.tuples(LINES, st.integers(0, 100)), min_size=1, max_size=8))
def test_unpacking_gives_the_sources_back(drawn: list[tuple[list[str], int]]) -> None:
    sources = [(str(i), "\n".join(lines)) for i, (lines, _) in enumerate(drawn)]
    parents = {str(i): str(pick % i) for i, (_, pick) in enumerate(drawn) if i and pick % 3}
    assert unpack(pack(sources, parents)) == [text for _, text in sources]


def test_edits_take_little_space() -> None:
    text = (Path(__file__).resolve().parents[2] / "examples" / "roots" / "straightforward.py").read_text()
    lines = text.split("\n")
    edited = [*lines[:30], "BLOCK = 1", *lines[31:400], "OTHER = 2", *lines[401:]]
    assert hunks(lines, edited) == [(30, 31, "BLOCK = 1"), (400, 401, "OTHER = 2")]
    longer = [*lines[:50], "inserted", *lines[50:300], *lines[310:]]
    assert sum(len(text or "") for _, _, text in hunks(lines, longer)) < 200


def test_whole_rewrites_are_not_compared_line_by_line() -> None:
    before, after = [f"a {i}" for i in range(9000)], [f"b {i}" for i in range(8000)]
    assert len(hunks(before, after)) == 1
