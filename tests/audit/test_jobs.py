"""Job and results files: what goes in comes out, and nothing half-written stays."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.audit import toy

from kernelbraid.audit import jobs, orders
from kernelbraid.audit.judge import Judge
from kernelbraid.contract import BitPolicy, Workload
from kernelbraid.ir.evidence import AuditEvidence, Environment, Level, Status, Verdict

HERE = Environment("cpu", "test", 2, 8.0, 1 << 20, (("python", "3.11"),))


def a_job(**changes: object) -> jobs.AuditJob:
    job = jobs.AuditJob(
        id="job-1",
        study="study",
        operator="sums",
        contract=toy.CONTRACT.hash,
        harness=jobs.harness_hash("sums"),
        device="cpu",
        level=Level.FULL,
        policy=BitPolicy.MUTUAL,
        dtype="float32",
        constant_axes=({"width": 4},),
        workloads=(
            *toy.SUMS.grids["study"],
            Workload("decode", (("length", (3, 4)), ("batch", 2)), 2.0, 1.5),
        ),
        root=toy.root(),
        incumbent=toy.variant(("TILE = 4", "TILE = 1"), label="incumbent"),
        candidates=(
            jobs.Candidate("r1", toy.root(), Level.SCREEN),
            jobs.Candidate("r2", toy.variant(("TILE = 4", "TILE = 64")), Level.FULL),
        ),
    )
    return dataclasses.replace(job, **changes)


def evidence(job: jobs.AuditJob, request: str, status: Status = Status.VERIFIED) -> AuditEvidence:
    return AuditEvidence(
        job=request,
        implementation=job.root.sha256,
        root=job.root.sha256,
        incumbent=job.incumbent.sha256,
        level=Level.SCREEN,
        status=status,
        reason="",
        bits_id="0",
        numerics=(("block", 16),),
        verdicts=(Verdict("sums/1/rerun/prefill", True, 3, 100),),
        measurements=(),
        specialisations=(),
        seconds=(("build", 0.1),),
        seed=1,
        environment=HERE,
        harness=job.harness,
    )


class Answers:
    """Stands in for the judge: answers requests at once, and may fail at one."""

    def __init__(self, fail_at: str = "", status: Status = Status.VERIFIED) -> None:
        self.asked: list[str] = []
        self.fail_at = fail_at
        self.status = status

    def __call__(self, job: jobs.AuditJob, *_: object, **__: object) -> "Answers":
        self.job = job
        return self

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None: ...

    def prepare(self, candidates: object, deadline: object) -> None: ...

    def audit(self, candidate: jobs.Candidate, deadline: float | None) -> AuditEvidence:
        if candidate.request == self.fail_at:
            raise KeyboardInterrupt
        self.asked.append(candidate.request)
        return evidence(self.job, candidate.request, self.status)


def run_with(
    answers: Answers, job: jobs.AuditJob, path: Path, monkeypatch: pytest.MonkeyPatch, **more: float
) -> None:
    monkeypatch.setattr(jobs, "Judge", answers)
    jobs.run_job(job, path, find=lambda name, backend: toy.SUMS, **more)  # type: ignore[arg-type]


# ---- job files


def test_a_job_comes_back_as_it_was(tmp_path: Path) -> None:
    jobs.write_job(a_job(), tmp_path / "new" / "job.json")
    read = jobs.read_job(tmp_path / "new" / "job.json")
    assert read == a_job() and read.hash == a_job().hash
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["job.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not a job file"),
        (lambda text: "[]", "is not a job file of this version"),
        (lambda text: text.replace("TILE = 64", "TILE = 63"), "corrupt"),
        (lambda text: text.replace("audit job 1", "audit job 0"), "of this version"),
        (lambda text: "\0", "is not a job file"),
    ],
)
def test_changed_job_files_are_refused(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    path = tmp_path / "job.json"
    jobs.write_job(a_job(), path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message):
        jobs.read_job(path)


def test_a_consistent_file_that_is_no_job_is_refused(tmp_path: Path) -> None:
    body = a_job().to_json()
    del body["root"]
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"format": orders.FORMAT, "hash": orders.content_hash(body), "job": body}))
    with pytest.raises(ValueError, match="not an audit job"):
        jobs.read_job(path)


def test_a_job_for_other_judging_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.write_job(a_job(harness="0" * 64), tmp_path / "job.json")
    with pytest.raises(ValueError, match="another version of the judging code"):
        jobs.read_job(tmp_path / "job.json")
    with pytest.raises(ValueError, match="another version of the judging code"):
        run_with(Answers(), a_job(harness="0" * 64), tmp_path / "results.jsonl", monkeypatch)
    assert not (tmp_path / "results.jsonl").exists()


def test_a_missing_job_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the job file .*: No such file or directory"):
        jobs.read_job(tmp_path / "none.json")


def test_a_job_file_is_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.json"
    jobs.write_job(a_job(), path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match=r"cannot write the job file .*No space left"):
        jobs.write_job(a_job(id="job-2"), path)
    assert jobs.read_job(path).id == "job-1"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="cannot write the job file"):
        jobs.write_job(a_job(), tmp_path / "file" / "job.json")
    with pytest.raises(RuntimeError, match="cannot write the results file"):
        jobs.ResultsWriter(a_job(), tmp_path / "file" / "results.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workloads": ()}, "at least one workload"),
        ({"constant_axes": ()}, "constant axes"),
        ({"level": Level.SCREEN}, "level"),
        ({"candidates": (jobs.Candidate("r", toy.root(), Level.SMOKE),) * 2}, "twice"),
    ],
)
def test_impossible_jobs(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_job(**changes)


def test_the_harness_hash_covers_what_judges_and_no_implementation() -> None:
    assert len(jobs.harness_hash("attention")) == 64
    assert jobs.harness_hash("attention") != jobs.harness_hash("rms_norm")
    package = Path(orders.__file__).parents[1]
    assert not orders._implementation_side("spec") and not orders._implementation_side("lowering")
    for file in (package / "ops").glob("*/cpu.py"):
        assert orders._implementation_side(file.stem)


def test_judging_code_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "results.jsonl", a_job()

    class Editing(Answers):
        def audit(self, candidate: jobs.Candidate, deadline: float | None) -> AuditEvidence:
            monkeypatch.setattr(jobs, "harness_hash", lambda operator: "0" * 64)
            return super().audit(candidate, deadline)

    with pytest.raises(RuntimeError, match="judging code was changed"):
        run_with(Editing(), asked, path, monkeypatch)
    assert jobs.read_results(path).evidence == ()


# ---- results


def test_every_request_is_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, first = tmp_path / "results.jsonl", Answers(fail_at="r2")
    with pytest.raises(KeyboardInterrupt):
        run_with(first, a_job(), path, monkeypatch)
    second, third = Answers(), Answers()
    run_with(second, a_job(), path, monkeypatch)
    run_with(third, a_job(), path, monkeypatch)
    assert (first.asked, second.asked, third.asked) == (["r1"], ["r2"], [])
    read = jobs.read_results(path)
    assert [each.job for each in read.evidence] == ["r1", "r2"]
    assert read.evidence[0] == evidence(a_job(), "r1")
    assert read.header["job"] == "job-1" and read.header["harness"] == jobs.harness_hash("sums")


@pytest.mark.parametrize("cut", [1, 10, 10_000])
def test_a_torn_last_line_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    run_with(Answers(), a_job(), path, monkeypatch)
    content = path.read_bytes()
    last = content.splitlines(keepends=True)[-1]
    path.write_bytes(content[: -min(cut, len(last))])
    assert [each.job for each in jobs.read_results(path).evidence] == ["r1"]
    again = Answers()
    run_with(again, a_job(), path, monkeypatch)
    assert again.asked == ["r2"]
    assert path.read_bytes() == content


def test_a_torn_header_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"format": "kernelbr')
    run_with(Answers(), a_job(), path, monkeypatch)
    assert len(jobs.read_results(path).evidence) == 2


def test_results_of_another_job_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    run_with(Answers(), a_job(), path, monkeypatch)
    before = path.read_bytes()
    for other in (a_job(id="job-2"), a_job(policy=BitPolicy.PINNED)):
        with pytest.raises(ValueError, match="results of another job"):
            run_with(Answers(), other, path, monkeypatch)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"hello\n", b"{}\n", b"[1]\nx\n"])
def test_files_that_are_no_results(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a results file"):
        jobs.read_results(path)


def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"one\ntwo\n")
    with pytest.raises(ValueError, match="is not a results file"):
        jobs.ResultsWriter(a_job(), path)
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_malformed_line_before_the_last_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    run_with(Answers(), a_job(), path, monkeypatch)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:40] + b"\n" + lines[2])
    with pytest.raises(ValueError, match="line 2"):
        jobs.read_results(path)
    path.write_bytes(lines[0] + lines[1].replace(b'"verified"', b'"great"') + lines[2])
    with pytest.raises(ValueError, match="line 2"):
        jobs.read_results(path)


def test_an_interrupted_audit_leaves_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    run_with(Answers(status=Status.INTERRUPTED), a_job(), path, monkeypatch)
    assert jobs.read_results(path).evidence == ()


def test_no_audit_begins_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers()
    run_with(answers, a_job(), tmp_path / "results.jsonl", monkeypatch, minutes=-1.0)
    assert answers.asked == []


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    with (
        jobs.ResultsWriter(a_job(), tmp_path / "results.jsonl"),
        pytest.raises(ValueError, match="another run is writing"),
    ):
        jobs.ResultsWriter(a_job(), tmp_path / "results.jsonl")


def test_a_full_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    with jobs.ResultsWriter(a_job(), path) as writer:
        writer.append(evidence(a_job(), "r1"))
        before = path.read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RuntimeError, match="No space left on device"):
            writer.append(evidence(a_job(), "r2"))
        assert path.read_bytes() == before and writer.answered == {"r1"}


def test_another_contract_and_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match="another state of the contract"):
        Judge(a_job(contract="0"), toy.SUMS)
    with pytest.raises(ValueError, match="device cuda"):
        Judge(a_job(device="cuda"), toy.SUMS)
    with pytest.raises(ValueError, match="must be cpu or cuda"):
        Judge(a_job(device="tpu"), toy.SUMS)


def test_running_jobs_needs_neither_database_nor_pydantic() -> None:
    code = """
    import sys
    import kernelbraid.audit.jobs
    print([name for name in ("sqlalchemy", "pydantic", "torch", "numba") if name in sys.modules])
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """Killed without a chance to clean up, in the middle of the second audit."""
    script = f"""
    import sys, time
    from pathlib import Path
    sys.path[:0] = {[os.path.abspath("src"), os.path.abspath(".")]!r}
    from kernelbraid.audit import jobs
    from tests.audit import test_jobs, toy
    class Slow(test_jobs.Answers):
        def audit(self, candidate, deadline):
            if candidate.request == "r2":
                print("now", flush=True)
                time.sleep(60)
            return super().audit(candidate, deadline)
    jobs.Judge = Slow()
    results = Path({str(tmp_path / "results.jsonl")!r})
    jobs.run_job(test_jobs.a_job(), results, find=lambda name, backend: toy.SUMS)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "now\n"
    process.kill()
    process.communicate()
    assert [each.job for each in jobs.read_results(tmp_path / "results.jsonl").evidence] == ["r1"]
    with jobs.ResultsWriter(a_job(), tmp_path / "results.jsonl") as writer:
        assert writer.answered == {"r1"}
