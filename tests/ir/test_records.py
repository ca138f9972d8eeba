"""Records as they travel and as they are stored: nothing is lost on the way."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects import sqlite

from kernelbraid.contract import REGIMES, Workload
from kernelbraid.ir.columns import FLOATS, PAIRS, TEXTS, WORKLOADS, AnyFloat, WideInt
from kernelbraid.ir.evidence import (
    AuditEvidence,
    Certificate,
    Difference,
    Environment,
    Launch,
    Level,
    Measurement,
    Status,
    Verdict,
)
from kernelbraid.ir.store import tree_hash

words = st.text(max_size=8)
amounts = st.floats(allow_nan=False)
times = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=2, max_size=2).map(tuple)
differences = st.builds(
    Difference, words, st.integers(0, 1 << 130), words, words, words, st.none() | st.integers(), st.integers()
)
verdicts = st.builds(
    Verdict,
    words,
    st.booleans(),
    st.integers(0),
    st.integers(0),
    st.none() | amounts,
    st.none() | differences,
)
measurements = st.builds(
    Measurement,
    workload=words,
    phase=st.sampled_from(REGIMES),
    weight=amounts,
    limit=amounts,
    protocol=st.sampled_from(("cold", "warm")),
    candidate_ms=times,
    root_ms=times,
    incumbent_ms=times,
    calls=st.integers(1, 1 << 40),
    bound_ms=amounts,
)
environments = st.builds(
    Environment,
    architecture=words,
    device=words,
    cores=st.integers(1, 512),
    memory_gib=amounts,
    cache_bytes=st.integers(0),
    versions=st.lists(st.tuples(words, words), max_size=3).map(tuple),
    flops=amounts,
    bandwidth=amounts,
)


launches = st.builds(
    Launch,
    workload=words,
    kernel=words,
    count=amounts,
    blocks=st.integers(0, 1 << 31),
    threads=st.integers(1, 1024),
    resident=st.integers(0, 1 << 20),
)


@st.composite
def evidences(draw: st.DrawFn) -> AuditEvidence:
    status = draw(st.sampled_from(list(Status)))
    found = tuple(draw(st.lists(verdicts, min_size=1, max_size=3)))
    accepted = status in (Status.VERIFIED, Status.STOPPED)
    if accepted:
        found = tuple(v for v in found if v.held) or (Verdict("r", True, 1, 1),)
    return AuditEvidence(
        job=draw(words),
        implementation=draw(words),
        root=draw(words),
        incumbent=draw(words),
        level=draw(st.sampled_from(list(Level))),
        status=status,
        reason=draw(words),
        bits_id=draw(st.none() | words),
        numerics=tuple(draw(st.lists(st.tuples(words, st.integers()), max_size=2))),
        verdicts=found,
        measurements=tuple(draw(st.lists(measurements, max_size=2))) if accepted else (),
        specialisations=tuple(draw(st.lists(words, max_size=2))),
        seconds=tuple(draw(st.lists(st.tuples(words, amounts), max_size=2))),
        seed=draw(st.integers(0, 1 << 130)),
        environment=draw(environments),
        harness=draw(words),
        output=draw(words),
        started=draw(amounts),
        launches=tuple(draw(st.lists(launches, max_size=2))) if accepted else (),
    )


@given(evidences())
def test_evidence_survives_json(evidence: AuditEvidence) -> None:
    assert AuditEvidence.from_json(json.loads(json.dumps(evidence.to_json()))) == evidence


def stored(kind: Any, value: Any) -> Any:
    dialect = sqlite.dialect()
    return kind.process_result_value(kind.process_bind_param(value, dialect), dialect)


@given(
    st.lists(words).map(tuple),
    st.lists(st.floats(allow_nan=False)).map(tuple),
    st.lists(st.tuples(words, st.integers() | st.floats(allow_nan=False, allow_infinity=False))).map(tuple),
    st.integers(),
)
def test_columns_keep_values(texts: Any, floats: Any, pairs: Any, wide: int) -> None:
    assert stored(TEXTS, texts) == texts
    assert stored(FLOATS, floats) == floats
    assert stored(PAIRS, pairs) == pairs
    assert stored(WideInt(), wide) == wide


@given(st.floats())
def test_floats_keep_their_bits(value: float) -> None:
    found = stored(AnyFloat(), value)
    assert math.isnan(found) if math.isnan(value) else found.hex() == value.hex()


axes = st.lists(
    st.tuples(words, st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3).map(tuple)), max_size=3
)


@given(st.lists(st.builds(Workload, st.sampled_from(REGIMES), axes.map(tuple)), max_size=3).map(tuple))
def test_workloads_keep_their_axes(workloads: tuple[Workload, ...]) -> None:
    assert stored(WORKLOADS, workloads) == workloads


@pytest.mark.parametrize(
    "spoil", [{"level": "all"}, {"verdicts": 3}, {"numerics": [[1]]}, {"environment": {}}]
)
def test_malformed_evidence_is_a_value_error(spoil: dict[str, Any]) -> None:
    good = {
        **AuditEvidence(
            "j", "i", "r", "r", Level.SMOKE, Status.CRASHED, "", None, (), (), (), (), (), 1,
            Environment("cpu", "d", 1, 1.0, 1, ()), "h",
        ).to_json()
    }  # fmt: skip
    AuditEvidence.from_json(good)
    with pytest.raises(ValueError):
        AuditEvidence.from_json({**good, **spoil})
    with pytest.raises(ValueError):
        AuditEvidence.from_json({key: value for key, value in good.items() if key != "job"})


def test_a_damaged_certificate_is_a_value_error() -> None:
    for text in ("", "{}", "[1]", '{"operator": "attention"}'):
        with pytest.raises(ValueError, match="not a certificate"):
            Certificate.loads(text)


def test_layout_and_comments_do_not_change_the_tree() -> None:
    assert tree_hash("x = 1\n") == tree_hash("# one\nx  =  1")
    assert tree_hash("x = 1\n") != tree_hash("x = 2\n")
    assert tree_hash("x = (\n") != tree_hash("x = ( \n")
    assert tree_hash("x = " + "(" * 100_000)
    assert tree_hash("x = '\\d'\n")  # an invalid escape only warns


def test_travelling_records_need_no_database() -> None:
    probe = "import sys, kernelbraid.ir.evidence; assert not {'sqlalchemy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True)
