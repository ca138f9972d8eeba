"""Audits that travel: a job goes in, and a results file comes out, one line of evidence an audit.

A local audit is the same thing in one place. Results are appended and synced line by line, so that a run that
ends at any moment loses at most the audits it was at, and the next run goes on from there.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from kernelbraid import ops
from kernelbraid.audit.judge import PREPARED_TOGETHER, Judge
from kernelbraid.audit.orders import (
    AuditJob,
    Candidate,
    Event,
    check_harness,
    harness_hash,
    read_job,
    write_job,
)
from kernelbraid.audit.process import Limits
from kernelbraid.ir.evidence import AuditEvidence, Status
from kernelbraid.ops.problem import Operator

__all__ = [
    "AuditJob",
    "Candidate",
    "Event",
    "Results",
    "ResultsWriter",
    "harness_hash",
    "read_job",
    "read_results",
    "run_job",
    "write_job",
]

FORMAT = "kernelbraid audit results 1"


@dataclass(frozen=True, slots=True)
class Results:
    """A results file as read."""

    header: Mapping[str, Any]
    """The job's id and hash, its study and its harness hash."""
    evidence: tuple[AuditEvidence, ...]


def run_job(
    job: AuditJob,
    results: Path,
    *,
    minutes: float | None = None,
    progress: Callable[[Event], None] | None = None,
    limits: Limits | None = None,
    find: Callable[[str, str], Operator] = ops.get,
) -> Path:
    """Audit a job's candidates on this machine and return the path of the results.

    Requests that `results` answers already are skipped. An audit that the time limit cuts short leaves none.

    Args:
        job: what to audit; `read_job` reads one from a file.
        results: file to append to, one evidence a line.
        minutes: time limit; unlimited by default.
        progress: called with every step; what it raises ends the run.
        limits: of each worker.
        find: looks the operator up by name and backend.

    Raises:
        ValueError: the job is for other code or another contract, the device is not there, or `results`
            belongs to another job or another run.
        RuntimeError: the results cannot be written, the root or the incumbent does not run, or the judging
            code changed meanwhile.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    check_harness(job)
    operator = find(job.operator, job.device)
    with ResultsWriter(job, results) as writer:
        waiting = [c for c in job.candidates if c.request not in writer.answered]
        if not waiting:
            return results
        with Judge(job, operator, progress=progress, limits=limits) as judge:
            for first in range(0, len(waiting), PREPARED_TOGETHER):
                together = waiting[first : first + PREPARED_TOGETHER]
                if deadline is not None and time.monotonic() > deadline:
                    break
                judge.prepare(together, deadline)
                for candidate in together:
                    evidence = judge.audit(candidate, deadline)
                    if evidence.status is Status.INTERRUPTED:
                        return results
                    if harness_hash(job.operator) != job.harness:
                        raise RuntimeError(
                            "the judging code was changed during an audit, which is not recorded: restore it "
                            "and run the job again"
                        )
                    writer.append(evidence)
    return results


class ResultsWriter:
    """Appends evidence to a results file, one synced line an audit.

    Opening it drops a last line that was cut off, and refuses the file of another job.

    Args:
        job: whose results.
        path: the file, made if it is not there.

    Raises:
        ValueError: the file is no results file, belongs to another job, or another run is writing to it.
        RuntimeError: the file cannot be written.
    """

    def __init__(self, job: AuditJob, path: Path) -> None:
        self.path = path
        self._requests = {candidate.request for candidate in job.candidates}
        header = {
            "format": FORMAT,
            "job": job.id,
            "job_hash": job.hash,
            "study": job.study,
            "harness": job.harness,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(path, "ab+")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._lock()
            self.answered = self._resume(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def append(self, evidence: AuditEvidence) -> None:
        """Write one audit's evidence and sync it to disk; a request is answered once."""
        assert evidence.job in self._requests and evidence.job not in self.answered, evidence.job
        assert evidence.status is not Status.INTERRUPTED, "an interrupted audit is repeated, not recorded"
        self._write({"evidence": evidence.to_json()})
        self.answered.add(evidence.job)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another run is writing to {self.path}: wait for it, or name another file"
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error

    def _resume(self, header: Mapping[str, Any]) -> set[str]:
        """Cut off a torn line, write the header of a new file, and list what is answered."""
        self._file.seek(0)
        lines, whole = _whole_lines(self._file.read())
        if not lines:
            self._truncate(0)
            self._write(header)
            return set()
        found = _parsed(lines, self.path)
        for key in ("job", "job_hash"):
            if found.header.get(key) != header[key]:
                raise ValueError(f"{self.path} holds the results of another job: name another file")
        self._truncate(whole)
        return {evidence.job for evidence in found.evidence}

    def _truncate(self, size: int) -> None:
        try:
            self._file.truncate(size)
        except OSError as error:
            raise self._unwritable(error) from error

    def _write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> RuntimeError:
        return RuntimeError(f"cannot write the results file {self.path}: {error.strerror or error}")


def read_results(path: Path) -> Results:
    """Read a results file; a last line that was cut off is left out.

    Raises:
        ValueError: there is no such file, it is no results file, or a line before the last is malformed.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the results file {path}: {error.strerror or error}") from error
    return _parsed(_whole_lines(content)[0], path)


def _whole_lines(content: bytes) -> tuple[list[bytes], int]:
    """Lines, without a last one that was cut off, and their size."""
    lines = content.splitlines(keepends=True)
    if lines and not _is_record(lines[-1]):
        lines.pop()
    return lines, sum(map(len, lines))


def _is_record(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _parsed(lines: list[bytes], path: Path) -> Results:
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not _is_record(line):
            raise ValueError(f"{path} is not a results file: line {number} is malformed")
        records.append(json.loads(line))
    if not records or records[0].get("format") != FORMAT:
        raise ValueError(f"{path} is not a results file of this version ({FORMAT})")
    evidence = []
    for number, record in enumerate(records[1:], 2):
        try:
            evidence.append(AuditEvidence.from_json(record["evidence"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} of {path} is malformed: {error}") from error
    return Results(records[0], tuple(evidence))
