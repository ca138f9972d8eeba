"""Tables in plain text, and progress in words."""

import io
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from kernelbraid.audit.orders import Event
from kernelbraid.ir.evidence import Status
from kernelbraid.report.grid import Grid, text
from kernelbraid.report.progress import Watch, budget, described
from kernelbraid.report.table import closing, failure, short_names
from kernelbraid.search.loop import Progress
from kernelbraid.search.study import Study


def test_plain_lines_are_aligned() -> None:
    grid = Grid("title", ("name", "ms"))
    grid.add("a", 1.25)
    grid.add("longer", None)
    assert list(grid.lines()) == ["title", "  name      ms", "  a       1.25", "  longer     -"]


def test_headers_that_are_blank_take_no_line() -> None:
    grid = Grid("", ("", ""))
    grid.add("seconds", "3")
    assert list(grid.lines()) == ["  seconds  3"]


def test_no_rules_and_no_wrapping_off_a_terminal() -> None:
    stream = io.StringIO()
    grid = Grid("", ("name", "value"))
    grid.add("x" * 200, "[bold]not markup[/bold]")
    grid.show(Console(file=stream, width=40))
    assert "[bold]not markup[/bold]" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 2


def test_a_terminal_gets_the_same_cells() -> None:
    stream = io.StringIO()
    grid = Grid("", ("name", "value"))
    grid.add("a", 12345)
    grid.show(Console(file=stream, width=80, force_terminal=True))
    assert "12,345" in stream.getvalue()


def test_cells() -> None:
    cells = [text(each) for each in (None, 1234567, 0.123456, 4321.6, True, "x")]
    assert cells == ["-", "1,234,567", "0.1235", "4,322", "yes", "x"]


def test_short_names_share_their_axes() -> None:
    names, shared = short_names(["decode[batch=4,length=1..9x4,head_dim=64]", "prefill[batch=1,head_dim=64]"])
    assert names == ["decode batch=4 length=1..9x4", "prefill batch=1"]
    assert shared == "head_dim=64"
    assert short_names([]) == ([], "")


def test_progress_in_words() -> None:
    timed = Progress(
        "audited",
        "abc",
        "",
        status=Status.VERIFIED,
        ratio=0.5,
        smallest_gain=0.02,
        audited=3,
        seconds_left=9.0,
    )
    assert described(timed) == "audited abc: bits equal, 0.500 of the incumbent's time, could prove 2.0%"
    assert budget(timed) == "[3 audited, 9 s left]"
    broken = Progress("audited", "abc", "row 3 differs", status=Status.BITS_UNEQUAL, audits_left=2.0)
    assert described(broken) == "audited abc: bits unequal, row 3 differs"
    assert budget(broken) == "[0 audited, 2 left]"
    assert described(Progress("screen", "abc", "paging", fraction=0.5)) == "screen abc: paging (50%)"
    assert math.isinf(Progress("build", "", "").seconds_left)


def test_only_findings_last_off_a_terminal() -> None:
    stream = io.StringIO()
    with Watch(Console(file=stream)) as watch:
        watch(Progress("screen", "abc", "paging"))
        watch(Progress("promoted", "abc", "0.5 of the incumbent's"))
        watch.event(Event("timing", "abc", "1 process"))
        watch.event(Event("done", "abc", "verified", 1.0))
        watch.checking("paging", 0.5)
    assert len(stream.getvalue().splitlines()) == 2


def test_a_failure_names_place_values_distance_and_case() -> None:
    difference = {
        "case": "attention/x",
        "seed": 7,
        "place": "out of request 0",
        "left": "1 (0x3f800000)",
        "right": "2 (0x40000000)",
        "ulp": 8388608,
        "unequal": 3,
    }
    line = failure({"requirement": "attention/1/rerun/decode", "difference": difference})
    for part in ("out of request 0", "0x3f800000", "0x40000000", "8388608 ULP", "seed 7", "case attention/x"):
        assert part in line


def test_closing_table_of_a_study_without_evidence(tmp_path: Path) -> None:
    with Study.create(tmp_path / "study", "attention") as study:
        summary = study.summary()
    lines = shown(summary)
    assert any(line.split()[:2] == ["audited", "0"] for line in lines)
    assert any("stored in" in line and "study" in line for line in lines)
    assert not any("over torch's" in line for line in lines)


def test_closing_table_with_everything_side_by_side(tmp_path: Path) -> None:
    with Study.create(tmp_path / "study", "attention") as study:
        summary = study.summary()
    times = {
        "root_ms": 4.0,
        "best_ms": 2.0,
        "shipped_ms": 1.0,
        "peers": {"torch_sdpa": 2.5, "torch_loop": 2.0},
    }
    rows = [{"workload": row["workload"], **times} for row in summary["workloads"]]
    lines = shown({**summary, "side_by_side": rows, "ended_by": "time"})
    [against] = [line for line in lines if "over torch's" in line]
    assert "root 2.00, best 1.00, shipped 0.50" in against
    header = next(line for line in lines if line.lstrip().startswith("workload"))
    assert header.split()[-6:] == ["root", "best", "shipped", "torch", "best/root", "limit"]


def shown(summary: dict[str, Any]) -> list[str]:
    stream = io.StringIO()
    closing(Console(file=stream), summary)
    return stream.getvalue().splitlines()
