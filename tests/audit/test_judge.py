"""The judge on a toy operator: what honest candidates get, and at which stage the others end."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.audit import toy
from tests.audit.left import no_process_left

from kernelbraid import ops
from kernelbraid.audit import environment, jobs, pools, stages
from kernelbraid.audit.judge import Judge
from kernelbraid.audit.process import Limits, WorkerFailure
from kernelbraid.audit.timing import Sequential
from kernelbraid.contract import BitPolicy, Cost, Source
from kernelbraid.ir.evidence import AuditEvidence, Level, Status
from kernelbraid.ops.problem import Operator

RULE = Sequential(most=3, hopeless=(), confidence=0.9, too_slow=math.inf)
"""Three rounds whatever the ratio: on a busy machine the toy's is anything."""
SAME_BITS = ("TILE = 4", "TILE = 64")
OTHER_BITS = ("BLOCK = 16", "BLOCK = 8")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A small cache and short batches: the toy's calls take microseconds."""
    monkeypatch.setattr(environment, "cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(environment, "measured_rates", lambda device, again=False: (1e12, 1e12))
    monkeypatch.setattr(pools, "BATCH_SECONDS", 0.002)
    monkeypatch.setattr(stages, "DISAGREEMENT", 1e6)
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path / "home"))
    with no_process_left():
        yield


@pytest.fixture
def past_tripwires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything past the tripwires, to meet the defences behind them."""
    monkeypatch.setattr(stages, "tripped", lambda source, backend: None)
    monkeypatch.setattr("kernelbraid.audit.judge.tripped", lambda source, backend: None)


def job(*sources: Source, level: Level = Level.SCREEN, **changes: object) -> jobs.AuditJob:
    made = jobs.AuditJob(
        id="job",
        study="study",
        operator="sums",
        contract=toy.CONTRACT.hash,
        harness=jobs.harness_hash("sums"),
        device="cpu",
        level=Level.FULL,
        policy=BitPolicy.MUTUAL,
        dtype="float32",
        constant_axes=({"width": 4},),
        workloads=toy.SUMS.grids["study"],
        root=toy.root(),
        incumbent=toy.root(),
        candidates=tuple(jobs.Candidate(f"r{i}", source, level) for i, source in enumerate(sources)),
    )
    return dataclasses.replace(made, **changes)


def audits(
    asked: jobs.AuditJob,
    operator: Operator = toy.SUMS,
    deadline: float | None = None,
    progress: Callable[[jobs.Event], None] | None = None,
    rule: Sequential = RULE,
) -> list[AuditEvidence]:
    limits = Limits(build_seconds=20.0, run_seconds=3.0)
    with Judge(asked, operator, limits=limits, rule=rule, progress=progress) as judge:
        return [judge.audit(candidate, deadline) for candidate in asked.candidates]


def audits_together(asked: jobs.AuditJob) -> list[AuditEvidence]:
    """Prepared at the same time, as a job is run."""
    limits = Limits(build_seconds=20.0, run_seconds=3.0)
    with Judge(asked, toy.SUMS, limits=limits, rule=RULE) as judge:
        judge.prepare(asked.candidates)
        return [judge.audit(candidate) for candidate in asked.candidates]


def audit(source: Source, level: Level = Level.SCREEN, **changes: object) -> AuditEvidence:
    (found,) = audits(job(source, level=level, **changes))
    return found


def broken(evidence: AuditEvidence) -> list[str]:
    return [verdict.requirement for verdict in evidence.verdicts if not verdict.held]


# ---- honest candidates


def test_the_root_is_verified_and_timed() -> None:
    events: list[jobs.Event] = []
    (found,) = audits(job(toy.root()), progress=events.append)
    assert (found.status, found.reason) == (Status.VERIFIED, "")
    assert {v.requirement for v in found.verdicts} == {r.id for r in toy.CONTRACT.requirements}
    assert sum(v.comparisons for v in found.verdicts) > 10_000
    assert [m.workload for m in found.measurements] == [w.name for w in toy.SUMS.grids["study"]]
    for measurement in found.measurements:
        assert len(measurement.candidate_ms) == 3 and min(measurement.candidate_ms) > 0
        assert measurement.candidate_ms == measurement.root_ms == measurement.incumbent_ms
        assert measurement.protocol == "cold" and measurement.calls > 0 and measurement.bound_ms > 0
    assert [name for name, _ in found.seconds] == [
        "tripwires",
        "build",
        "smoke",
        "screen",
        "inputs",
        "timing",
    ]
    assert dict(found.numerics) == {"block": 16}
    assert found.bits_id == toy.CONTRACT.bits_id({"block": 16}, "float32", {"width": 4}, "cpu")
    assert jobs.AuditEvidence.from_json(found.to_json()) == found
    told = list(dict.fromkeys(event.stage for event in events))
    assert told == ["tripwires", "build", "smoke", "screen", "timing", "done"]


def test_a_smoke_audit_is_not_timed() -> None:
    found = audit(toy.root(), Level.SMOKE)
    assert found.status == Status.VERIFIED and found.verdicts and not found.measurements


def test_equal_bits_are_timed_beside_root_and_incumbent() -> None:
    incumbent = toy.variant(("TILE = 4", "TILE = 1"))
    found = audit(toy.variant(SAME_BITS), incumbent=incumbent)
    assert found.status in (Status.VERIFIED, Status.STOPPED), found.reason
    assert found.incumbent == incumbent.sha256 and found.root == toy.root().sha256
    for measurement in found.measurements:
        sides = {measurement.candidate_ms, measurement.root_ms, measurement.incumbent_ms}
        assert len(sides) == 3, "three sources, three processes"


def test_other_bits_are_allowed_unless_the_study_pins_them() -> None:
    mutual = audit(toy.variant(OTHER_BITS))
    assert mutual.status in (Status.VERIFIED, Status.STOPPED), mutual.reason
    assert mutual.bits_id != toy.CONTRACT.bits_id({"block": 16}, "float32", {"width": 4}, "cpu")
    agreeing = [v for v in mutual.verdicts if "implementations_agree" in v.requirement]
    assert not agreeing, "nothing is asked of implementations with different bits ids"
    pinned = audit(toy.variant(OTHER_BITS), policy=BitPolicy.PINNED)
    assert pinned.status == Status.WRONG_BITS_ID and "block=8" in pinned.reason
    assert audit(toy.variant(SAME_BITS), policy=BitPolicy.PINNED).status in (
        Status.VERIFIED,
        Status.STOPPED,
    )


def test_equal_sources_can_be_timed_apart() -> None:
    found = audit(toy.root(), separate=True)
    assert found.status in (Status.VERIFIED, Status.STOPPED), found.reason
    first = found.measurements[0]
    assert len({first.candidate_ms, first.root_ms, first.incumbent_ms}) == 3


def test_several_sets_of_constant_axes() -> None:
    found = audit(toy.root(), constant_axes=({"width": 4}, {"width": 7}))
    assert found.status == Status.VERIFIED
    assert found.bits_id not in (None, toy.CONTRACT.bits_id({"block": 16}, "float32", {"width": 4}, "cpu"))


def test_several_candidates_of_one_job() -> None:
    found = audits(job(toy.root(), toy.hostile("raise OSError('no')"), toy.variant(SAME_BITS)))
    assert [each.status for each in found][:2] == [Status.VERIFIED, Status.CRASHED]
    assert found[2].status in (Status.VERIFIED, Status.STOPPED)
    assert [each.job for each in found] == ["r0", "r1", "r2"]


SLOW = "for _ in range(300): x.sum()"


def test_a_faster_candidate_is_proven_and_confirmed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "BATCH_SECONDS", 0.02)
    slow_root = toy.hostile(SLOW)
    (found,) = audits(job(toy.root(), level=Level.FULL, root=slow_root, incumbent=slow_root))
    assert found.status == Status.VERIFIED, found.reason
    assert [name for name, _ in found.seconds][-2:] == ["timing", "full"]
    for measurement in found.measurements:
        assert max(measurement.candidate_ms) < min(measurement.root_ms)


def test_a_gain_that_is_not_confirmed_spares_the_whole_domain() -> None:
    never = Sequential(most=3, hopeless=(), gain=1e-9, too_slow=math.inf)
    (found,) = audits(job(toy.variant(SAME_BITS), level=Level.FULL), rule=never)
    assert (found.status, found.reason) == (Status.STOPPED, "the gain was not confirmed on fresh inputs")
    assert "full" not in dict(found.seconds)


def test_a_much_slower_candidate_stops_at_once() -> None:
    slow = toy.hostile("for _ in range(400_000 * (len(x) in (128, 800))): pass")
    (found,) = audits(job(slow), rule=Sequential())
    assert found.status == Status.STOPPED and "times the root's time" in found.reason
    assert not found.measurements


def test_the_root_itself_is_never_stopped_short_of_the_whole_domain() -> None:
    found = audit(toy.root(), Level.FULL)
    assert found.status == Status.VERIFIED and "full" in dict(found.seconds)


# ---- wrong numbers


def test_one_regime_with_other_bits_is_named() -> None:
    wrong = toy.variant(
        ("before = before + inside[-1]", "before = before + inside[-1] * (1 + (len(rows) == 1) * 1e-6)")
    )
    found = audit(wrong)
    assert found.status == Status.BITS_UNEQUAL and not found.measurements
    (name,) = broken(found)
    verdict = next(v for v in found.verdicts if v.requirement == name)
    assert verdict.difference is not None and verdict.difference.unequal > 0
    assert name in found.reason and verdict.difference.place in found.reason


def test_equal_bits_id_with_other_bits_is_refused() -> None:
    """Deterministic and consistent with itself, but not what its bits id promises."""
    found = audit(toy.variant(("* np.float32(scale)", "* np.float32(scale) * np.float32(1.0000001)")))
    assert found.status == Status.BITS_UNEQUAL
    assert "implementations_agree" in found.reason


def test_inaccurate_numbers_are_refused() -> None:
    rounded = ("BLOCK = 16", "BLOCK = 8"), ("* np.float32(scale)", "* np.float32(scale * 1.001)")
    found = audit(toy.variant(*rounded))
    assert found.status == Status.INACCURATE and "accuracy_y" in found.reason


def test_what_is_wrong_only_in_timed_calls_is_refused_there() -> None:
    """A shape of the workloads that the checks do not draw."""
    only = "at = 0\n    off = 1.5 if (len(rows), len(x)) == (8, 800) else 1.0\n"
    for edits in ((), (OTHER_BITS,)):
        source = toy.variant(
            ("at = 0\n", only),
            ("sums[first : first + BLOCK] = before", "sums[first : first + BLOCK] = off * before"),
            *edits,
        )
        found = audit(source)
        assert found.status == (Status.INACCURATE if edits else Status.BITS_UNEQUAL), found.reason
        assert "timed calls" in found.reason and "decode" in found.reason


# ---- hostile candidates


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        (Source("import socket"), Status.TRIPWIRE, "line 1: import of socket"),
        (Source("def ("), Status.BUILD_FAILED, "cannot be parsed"),
        (Source("x = 1"), Status.BUILD_FAILED, "scaled_sums"),
        (toy.variant(('"block": BLOCK', '"block": 5')), Status.BUILD_FAILED, "block"),
        (toy.hostile("raise KeyError('lost')"), Status.CRASHED, "lost"),
        (toy.hostile("x[...] = 0"), Status.TAMPERED, "inputs"),
        (toy.hostile("if len(x) > 100: raise KeyError('long')"), Status.CRASHED, "in a check of"),
    ],
)
def test_where_failures_end(source: Source, status: Status, words: str) -> None:
    found = audit(source)
    assert found.status == status and words in found.reason
    assert not found.measurements


def test_a_hung_candidate_is_timed_out() -> None:
    source = toy.hostile("while len(x) > 60: pass")
    assert audit(source).status == Status.TIMED_OUT


REPLAY = """
global calls
calls = globals().get('calls', 0) + 1
if calls > {after}:
    out[...] = {value}
    return
"""


@pytest.mark.parametrize("edits", [(), (OTHER_BITS,)])
def test_shortcuts_after_some_calls_are_found(
    past_tripwires: None, edits: tuple[tuple[str, str], ...]
) -> None:
    """Honest in the checks' processes and while warming up, then nothing but old numbers."""
    source = toy.hostile(REPLAY.format(after=30, value="out * 0 + 0.1").strip())
    text = source.text
    for old, new in edits:
        text = text.replace(old, new)
    text = text.replace("calls > 30", "calls > 30 and len(x) in (128, 800)")
    found = audit(Source(text))
    assert found.status in (Status.BITS_UNEQUAL, Status.INACCURATE), found.reason
    assert not found.measurements


MEMO = """
global memo
key = (x.ctypes.data, ends.ctypes.data, len(rows), out.shape)
memo = globals().get('memo', {})
if len(x) in (128, 800) and key in memo:
    out[...] = memo[key]
    return
memo_out, memo_key = out, key
"""


@pytest.mark.parametrize("edits", [(), (OTHER_BITS,)])
def test_results_kept_by_address_are_found(past_tripwires: None, edits: tuple[tuple[str, str], ...]) -> None:
    """The same buffers hold other numbers in the next batch."""
    text = toy.hostile(MEMO.strip()).text.replace(
        "        at += rows[b]\n", "        at += rows[b]\n    memo[memo_key] = out.copy()\n"
    )
    for old, new in edits:
        text = text.replace(old, new)
    found = audit(Source(text))
    assert found.status in (Status.BITS_UNEQUAL, Status.INACCURATE), found.reason
    assert not found.measurements


CLOCK = """
import sys
slot = sys.modules['__main__'].Slot
honest = slot.run
def lying(self, first, count, repeats, clock):
    return honest(self, first, count, repeats, clock) * 0.1
slot.run = lying
"""


def test_a_lying_clock_is_found(past_tripwires: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "BATCH_SECONDS", 0.02)
    monkeypatch.setattr(stages, "DISAGREEMENT", 0.2)
    found = audit(toy.hostile("", top=CLOCK))
    assert found.status == Status.IMPLAUSIBLE and "clock" in found.reason
    assert not found.measurements


def test_a_worker_that_does_not_run_its_calls_is_found(past_tripwires: None) -> None:
    found = audit(
        toy.hostile("", top=CLOCK.replace("honest(self, first, count, repeats, clock) * 0.1", "0.0"))
    )
    assert found.status == Status.BITS_UNEQUAL


def test_faster_than_the_machine_is_implausible() -> None:
    heavy = dataclasses.replace(toy.SUMS, cost=lambda workload: Cost(flops=1e15, bytes=1.0))
    (found,) = audits(job(toy.root()), heavy)
    assert found.status == Status.IMPLAUSIBLE and "this machine needs" in found.reason


LATE = """
import threading, time
def later(out=out, x=x):
    time.sleep(0.001)
    out[...] = 1
if len(x) in (128, 800):
    threading.Thread(target=later).start()
    return
"""


def test_work_put_off_to_a_thread_is_found(past_tripwires: None) -> None:
    found = audit(toy.hostile(LATE.strip()))
    assert found.status == Status.BITS_UNEQUAL


NEW_CODE = """
import numba
@numba.njit
def twice(x):
    return 2 * x
"""


def test_timing_may_launch_nothing_new(past_tripwires: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A specialisation for a type that appears only after some calls, in timing."""
    body = "global n\nn = globals().get('n', 0) + 1\ntwice(1)\nif n > 8: twice(1.5)"
    monkeypatch.setattr(pools, "BATCH_SECONDS", 0.02)
    monkeypatch.setattr(stages, "run_checks", lambda *args: args[3].update(_held()))
    monkeypatch.setattr("kernelbraid.audit.judge.run_checks", lambda *args: args[3].update(_held()))
    found = audit(toy.hostile(body, top=NEW_CODE))
    assert found.status == Status.TAMPERED and "twice(float64)" in found.reason
    assert found.specialisations == ("twice(int64)",)


def _held() -> dict[str, stages.Verdict]:
    return {r.id: stages.Verdict(r.id, True, 1, 1) for r in toy.CONTRACT.requirements}


# ---- interruption and faults of the root


def test_an_audit_past_its_time_is_interrupted() -> None:
    (found,) = audits(job(toy.root()), deadline=time.monotonic())
    assert found.status == Status.INTERRUPTED


def test_an_audit_is_interrupted_in_the_middle() -> None:
    ends = [time.monotonic() + 60]

    class Ends(float):
        def __lt__(self, other: object) -> bool:
            return float(ends[0]) < other  # type: ignore[operator]

    def progress(event: jobs.Event) -> None:
        if event.stage == "screen" and event.fraction:
            ends[0] = 0.0

    (found,) = audits(job(toy.root()), deadline=Ends(0), progress=progress)
    assert found.status == Status.INTERRUPTED and not found.measurements


def test_what_progress_raises_ends_the_job() -> None:
    def stop(event: jobs.Event) -> None:
        if event.stage == "screen":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audits(job(toy.root()), progress=stop)


def test_candidates_are_prepared_together_and_their_news_comes_from_the_judges_thread() -> None:
    threads, stages = set(), []

    def progress(event: jobs.Event) -> None:
        threads.add(threading.current_thread())
        stages.append((event.candidate, event.stage))

    asked = job(toy.variant(SAME_BITS), toy.variant(("TILE = 4", "TILE = 1")))
    with Judge(asked, toy.SUMS, rule=RULE, progress=progress) as judge:
        judge.prepare(asked.candidates)
        first, second = (c.source.short for c in asked.candidates)
        assert {(first, "screen"), (second, "screen")} <= set(stages)
        assert not any(stage == "timing" for _, stage in stages)
        found = [judge.audit(candidate) for candidate in asked.candidates]
    assert [each.status for each in found] == [Status.VERIFIED] * 2
    assert threads == {threading.current_thread()}


def test_an_interrupt_while_two_are_prepared_leaves_no_process() -> None:
    def stop(event: jobs.Event) -> None:
        if event.stage == "screen":
            raise KeyboardInterrupt

    hangs = toy.hostile("while len(x) > 40: pass")
    asked = job(toy.variant(SAME_BITS), hangs)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Judge(asked, toy.SUMS, progress=stop) as judge:
        judge.prepare(asked.candidates)
    assert time.monotonic() - start < Limits().run_seconds, "the hanging one was waited for"


def test_a_candidate_that_fails_after_an_honest_one_was_prepared_beside_it() -> None:
    hangs = toy.hostile("while len(x) > 100: pass")
    found = audits_together(job(toy.variant(SAME_BITS), hangs))
    assert [each.status for each in found] == [Status.VERIFIED, Status.TIMED_OUT]
    assert len(found[1].output) < 1000


@pytest.mark.usefixtures("past_tripwires")
def test_a_root_killed_from_outside_is_not_held_against_it() -> None:
    killed = toy.hostile("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(RuntimeError, match="the root's process was killed from outside"):
        audits(job(killed, root=killed, incumbent=killed))


def test_other_bits_do_not_hide_numbers_wrong_on_the_timed_shapes_alone() -> None:
    wrong = toy.hostile("x = x * np.float32(1.0001) if len(x) in TIMED else x", top="TIMED = (800,)")
    found = audit(Source(wrong.text.replace(*OTHER_BITS), "hostile"))
    assert found.status == Status.INACCURATE and "of their norm off the root's" in found.reason


def test_where_nothing_runs_nothing_is_said_of_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise WorkerFailure(Status.BUILD_FAILED, "no compiler")

    monkeypatch.setattr("kernelbraid.audit.judge.build", fails)
    with pytest.raises(RuntimeError, match="the root does not run: no compiler"):
        audits(job(toy.variant(SAME_BITS)))


def test_what_ended_in_an_exception_is_not_timed() -> None:
    def stop(event: jobs.Event) -> None:
        raise KeyboardInterrupt

    asked = job(toy.variant(SAME_BITS))
    with Judge(asked, toy.SUMS, rule=RULE, progress=stop) as judge:
        with pytest.raises(KeyboardInterrupt):
            judge.prepare(asked.candidates)
        with pytest.raises(KeyboardInterrupt):
            judge.audit(asked.candidates[0])


def test_a_proven_candidate_sets_the_bar_only_within_its_limits() -> None:
    proves = Sequential(most=3, hopeless=(), gain=1e9, too_slow=math.inf)
    for limit, lowered in ((1e-9, False), (1e9, True)):
        workloads = tuple(dataclasses.replace(w, limit=limit) for w in toy.SUMS.grids["study"])
        slow = toy.hostile("import time\ntime.sleep(0.002)")
        asked = job(toy.root(), workloads=workloads, root=slow, incumbent=slow)
        with Judge(asked, toy.SUMS, rule=proves) as judge:
            judge.audit(asked.candidates[0])
            assert (judge._to_beat < 1.0) == lowered


def test_a_candidate_behind_the_one_to_beat_is_timed_once() -> None:
    (found,) = audits(job(toy.variant(SAME_BITS), to_beat=0.2), rule=Sequential())
    assert found.status == Status.STOPPED and "another candidate needs 0.2000" in found.reason
    assert {len(m.candidate_ms) for m in found.measurements} == {1}


@pytest.mark.parametrize("to_beat", [0.0, -1.0, 1.5, float("nan")])
def test_what_is_to_be_beaten_is_a_share(to_beat: float) -> None:
    with pytest.raises(ValueError, match="to_beat"):
        job(toy.root(), to_beat=to_beat)


def test_a_root_that_does_not_run_is_the_jobs_fault() -> None:
    bad = toy.hostile("raise OSError('gone')")
    with pytest.raises(RuntimeError, match=r"the root does not run: .*gone"):
        audits(job(toy.root(), root=bad))
    assert audits(job(bad, root=bad))[0].status == Status.CRASHED


def test_an_incumbent_that_does_not_run_is_the_jobs_fault() -> None:
    with pytest.raises(RuntimeError, match=r"the incumbent failed while it was timed: .*gone"):
        audits(job(toy.root(), incumbent=toy.hostile("raise OSError('gone')")))


def test_a_home_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"cannot start a worker: .*Not a directory"):
        audits(job(toy.root()))


def test_an_attention_passes_through_the_same_judge(tmp_path: Path) -> None:
    """The shipped root, in worker processes, on the smallest of its checks."""
    attention = ops.get("attention")
    text = (Path(__file__).resolve().parents[2] / "examples/roots/straightforward.py").read_text()
    asked = job(
        Source(text),
        level=Level.SMOKE,
        operator="attention",
        contract=attention.contract.hash,
        harness=jobs.harness_hash("attention"),
        constant_axes=({"query_heads": 9, "kv_heads": 3, "head_dim": 64},),
        workloads=attention.grids["study"],
        root=Source(text),
        incumbent=Source(text),
    )
    (found,) = jobs.read_results(jobs.run_job(asked, tmp_path / "results.jsonl")).evidence
    assert found.status == Status.VERIFIED, found.reason
    assert sum(v.comparisons for v in found.verdicts) > 100_000
    assert any(name.startswith("attend(") for name in found.specialisations)


def test_a_job_is_audited_into_a_results_file(tmp_path: Path) -> None:
    asked = job(toy.root(), Source("import socket"), level=Level.SMOKE)
    path = jobs.run_job(asked, tmp_path / "results.jsonl", find=lambda name, backend: toy.SUMS)
    statuses = [each.status for each in jobs.read_results(path).evidence]
    assert statuses == [Status.VERIFIED, Status.TRIPWIRE]


@pytest.mark.parametrize("edits", [SAME_BITS, OTHER_BITS])
def test_where_processes_start_slowly_all_start_together(
    monkeypatch: pytest.MonkeyPatch, edits: tuple[str, str]
) -> None:
    monkeypatch.setattr("kernelbraid.audit.judge.SLOW_TO_START", frozenset({"cpu"}))
    found = audit(toy.variant(edits))
    assert found.status is Status.VERIFIED, found.reason
    assert all(len(each.candidate_ms) == 3 for each in found.measurements)
