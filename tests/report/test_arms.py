"""The plot of an ablation says what its document says."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kernelbraid.report import arms
from kernelbraid.report.arms import COLOURS, drawn, objective, seconds, write


def arm(*trajectories: list[float], spent: tuple[float, ...] = (10.0, 14.0)) -> dict[str, Any]:
    repeats = [{"trajectory": t, "seconds": s} for t, s in zip(trajectories, spent, strict=True)]
    return {"repeats": repeats}


def document() -> dict[str, Any]:
    return {
        "operator": "attention",
        "repeats": 2,
        "arms": {"full": arm([1.0, 0.5], [1.0, 0.5]), "best-of-n": arm([1.0, 0.9], [1.0, 0.4])},
    }


def test_curves_and_intervals() -> None:
    found = document()["arms"]
    assert objective(found["full"]) == [(1.0, 1.0, 1.0), pytest.approx((0.5, 0.5, 0.5))]
    mean, low, high = objective(found["best-of-n"])[1]
    assert mean == pytest.approx(0.6) and low < 0.4 and high > 0.9, "one degree of freedom is wide"
    assert seconds(found["full"]) == pytest.approx((12.0, 12.0 - 25.41, 12.0 + 25.41), abs=0.02)


def test_repeats_that_ended_early_count_while_they_last() -> None:
    assert [each[0] for each in objective(arm([1.0], [0.25, 0.1]))] == pytest.approx([0.5, 0.1])


def test_the_file_is_one_svg_with_a_line_an_arm(tmp_path: Path) -> None:
    write(document(), tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    root = ElementTree.fromstring(text)
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [each.get("stroke") for each in lines] == list(COLOURS[:2])
    ends = [int(re.split(r"[ ,]", each.get("points") or "")[-1]) for each in lines]
    assert ends[0] > ends[1], "0.5 stands lower than 0.6"
    words = {each.text for each in root.iter() if each.text}
    assert {"full", "best-of-n", "seconds of search, a study"} <= words


def test_nothing_is_refused(tmp_path: Path) -> None:
    empty = {"operator": "attention", "repeats": 2, "arms": {"full": {"repeats": []}}}
    with pytest.raises(ValueError, match="nothing to draw"):
        write(empty, tmp_path / "plot.svg")
    assert not list(tmp_path.iterdir())
    assert "&lt;" in drawn({**document(), "operator": "<b>"})
    assert arms.CONFIDENCE == 0.95
