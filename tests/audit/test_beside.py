"""Implementations and peers side by side."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.audit import toy

from kernelbraid.audit import beside, pools
from kernelbraid.audit.beside import SideBySide
from kernelbraid.audit.measure import ContenderFailure
from kernelbraid.contract import Source, Workload
from kernelbraid.ir.evidence import Environment
from kernelbraid.ops.problem import Peer, Program

PEERS = (
    toy.ROOT
    + "\ngood = scaled_sums\n\n\ndef bad(x, ends, rows, scale, out):\n    raise ImportError('no library')\n"
)
HERE = Environment("cpu", "some CPU", 1, 1.0, 1 << 20, (), 1e12, 1e12)


def timed(
    workload: Workload, rng: np.random.Generator, variants: int, pool_bytes: int, *, contiguous: bool
) -> Program:
    made = toy.timed(workload, rng, variants, pool_bytes, contiguous=contiguous)
    return (
        replace(made, calls=tuple(replace(c, entry_point="peer") for c in made.calls)) if contiguous else made
    )


SUMS = replace(
    toy.SUMS, timed=timed, peers=(Peer("good", "good", ("decode",)), Peer("bad", "bad", ("decode",)))
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SideBySide:
    monkeypatch.setattr(beside.ops, "source", lambda operator, file=None: Source(PEERS))
    monkeypatch.setattr(beside, "PROCESSES", 1)
    monkeypatch.setattr(pools, "BATCH_SECONDS", 0.002)
    return SideBySide(SUMS, {"ours": toy.root()}, HERE, tmp_path, confirm="ours")


def test_a_peer_that_fails_is_left_out_and_told(run: SideBySide) -> None:
    (row,) = run.rows([toy.workload("decode", 8, 100)], ("warm",))
    assert set(row.ms) == {"ours", "good"} and min(row.ms.values()) > 0
    (place,) = run.left_out
    assert place.startswith("bad (width ") and "no library" in run.left_out[place]


def test_a_peer_that_fails_for_some_axes_is_measured_for_others(
    run: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    picky = PEERS.replace(
        "raise ImportError('no library')", "assert x.shape[1] < 8; good(x, ends, rows, scale, out)"
    )
    monkeypatch.setattr(run, "_peer_file", Source(picky))
    narrow, wide = (toy.workload("decode", 8, 100, width=width) for width in (4, 8))
    rows = list(run.rows([wide, narrow, narrow], ("warm", "cold")))
    assert [(row.workload, row.protocol) for row in rows] == [
        *((wide, "warm"), (wide, "cold")),
        *((narrow, protocol) for protocol in ("warm", "warm", "cold", "cold")),
    ]
    found = {row.workload: set(row.ms) for row in rows}
    assert found == {narrow: {"ours", "good", "bad"}, wide: {"ours", "good"}}
    assert list(run.left_out) == ["bad (width 8)"]


def test_a_source_that_fails_ends_the_run(run: SideBySide) -> None:
    run.sources["ours"] = toy.hostile(
        "calls.append(1)\nif len(calls) > 4: raise KeyError('lost')", top="calls = []"
    )
    with pytest.raises(ContenderFailure, match=r"ours: .*lost"):
        list(run.rows([toy.workload("decode", 8, 100)], ("cold",)))
