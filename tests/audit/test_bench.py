"""Benchmark documents: what a file keeps, and when a check may be taken from a certificate."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelbraid import ops
from kernelbraid.audit import bench
from kernelbraid.audit.beside import Row, SideBySide


def document(grid: str, implementation: str = "a" * 64, **environment: object) -> dict[str, Any]:
    row = {"grid": grid, "implementation": implementation, "ours_ms": 1.0}
    here = {"architecture": "cpu", "device": "some CPU", "versions": {"python": "3"}, "flops": 1.0}
    return {
        "operator": "toy",
        "contract": "c" * 64,
        "environment": here | environment,
        "commit": grid,
        "rows": [row, row],
        "skipped": [],
        "failed_peers": {},
    }


def grids(path: Path) -> list[str]:
    return [row["grid"] for row in json.loads(path.read_text())["rows"]]


def test_a_file_keeps_the_rows_of_other_grids(tmp_path: Path) -> None:
    path = bench.write(document("one"), tmp_path)
    assert path == tmp_path / "cpu" / "toy.bench.json" and grids(path) == ["one", "one"]
    bench.write(document("two", flops=2.0), tmp_path)
    assert grids(path) == ["one", "one", "two", "two"]
    bench.write(document("one"), tmp_path)
    assert grids(path) == ["two", "two", "one", "one"], "a grid that is measured again replaces its rows"
    assert json.loads(path.read_text())["commit"] == "one"


@pytest.mark.parametrize(
    "other",
    [
        document("two", implementation="b" * 64),
        document("two", device="another CPU"),
        document("two", versions={"python": "4"}),
        document("two") | {"contract": "d" * 64},
    ],
)
def test_rows_of_another_subject_go(tmp_path: Path, other: dict[str, Any]) -> None:
    bench.write(document("one"), tmp_path)
    assert grids(bench.write(other, tmp_path)) == ["two", "two"]


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    path = bench.write(document("one"), tmp_path)
    path.write_text("{")
    assert grids(bench.write(document("two"), tmp_path)) == ["two", "two"]


@pytest.mark.parametrize("certified", [True, False])
def test_a_certificate_of_the_source_stands_for_the_check(
    certified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = ops.get("attention")
    shipped = ops.source(operator).sha256
    other = SimpleNamespace(implementation=shipped if certified else "b" * 64)
    screened: list[object] = []
    monkeypatch.setattr(bench, "local_certificate", lambda _: other)
    monkeypatch.setattr(bench, "_screened", lambda run, workloads: screened.append(workloads) or True)
    monkeypatch.setattr(SideBySide, "rows", lambda *_, **__: iter(()))
    assert bench.bench(operator, "cpu-decode")["rows"] == []
    assert bool(screened) is not certified


def test_rows_are_written_as_they_come_and_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    operator, wanted = ops.get("attention"), []
    count = len(operator.grids["cpu-decode"])

    def rows(run: SideBySide, workloads: list[Any], protocols: tuple[Any, ...], tell: object) -> Any:
        for protocol, workload in product(protocols, workloads):
            wanted.append((workload.name, protocol))
            if len(wanted) == count + 3:
                raise KeyboardInterrupt
            yield Row(workload, protocol, {bench.OURS: 1.0}, {}, 0.1)

    monkeypatch.setattr(SideBySide, "rows", rows)
    monkeypatch.setattr(bench, "_screened", lambda run, workloads: True)
    monkeypatch.setattr(bench, "local_certificate", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        bench.bench(operator, "cpu-decode", folder=tmp_path)
    path = next(tmp_path.glob("*/attention.bench.json"))
    before = json.loads(path.read_text())["rows"]
    assert len(before) == count + 2
    document = bench.bench(operator, "cpu-decode", folder=tmp_path, resume=True)
    assert len(set(wanted)) == 2 * count and len(wanted) == 2 * count + 1  # one was lost on the way
    assert document["rows"][: len(before)] == before and len(document["rows"]) == 2 * count
    assert json.loads(path.read_text())["rows"] == document["rows"]
    bench.bench(operator, "cpu-decode", folder=tmp_path)
    assert len(wanted) == 4 * count + 1, "without resuming every row is measured"
