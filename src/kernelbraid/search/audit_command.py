"""Audits by a command, usually on another host: `ssh gpu kernelbraid audit run {job} -o {results}`."""

import contextlib
import os
import shlex
import signal
import string
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kernelbraid.audit import jobs
from kernelbraid.search.executors.fate import ends_with_its_parent

PLACES = ("job", "results", "minutes")
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
"""Time that a command has to end after it was asked to."""
GUARD = """trap 'kill -9 0' USR1
{{
{command}
}} &
wait $!"""
"""The shell that runs a command ends the whole of it when the search has been killed."""
MOST_OUTPUT = 4000
"""Characters kept of what a command printed, from the end."""


class AuditCommandFailed(RuntimeError):  # noqa: N818 - an interrupted audit
    """The command gave no results: the audit is repeated."""

    def __init__(self, reason: str, output: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.output = output


class AuditCommand:
    """Runs a job by a shell command, in place of `jobs.run_job`.

    Args:
        template: the command; `{job}` and `{results}` stand for the paths of the job file and of the results
            file, quoted for a shell, and `{minutes}`, if it occurs, for the time limit (a large number where
            there is none). A brace of its own is written twice.

    Raises:
        ValueError: a placeholder is missing or unknown.
    """

    def __init__(self, template: str) -> None:
        try:
            named = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        except ValueError as error:
            raise ValueError(f"the audit command is no template: {error}") from error
        if unknown := named - set(PLACES):
            raise ValueError(f"the audit command may name {', '.join(PLACES)}, got {sorted(unknown)}")
        if missing := {"job", "results"} - named:
            raise ValueError(f"the audit command must name {{{'} and {'.join(sorted(missing))}}}")
        self.template = template

    def __call__(
        self,
        job: jobs.AuditJob,
        results: Path,
        *,
        minutes: float | None = None,
        progress: Callable[[jobs.Event], None] | None = None,
    ) -> Path:
        """Run the command until it ends or the time is over, and return the path of the results.

        Raises:
            AuditCommandFailed: it failed, or left no results of this job.
        """
        path = results.with_name(f"{job.id}.job.json")
        jobs.write_job(job, path)
        try:
            with tempfile.TemporaryFile() as output:
                code = self._run(self._command(path, results, minutes), output.fileno(), minutes, progress)
                output.seek(0)
                printed = output.read().decode(errors="replace")[-MOST_OUTPUT:]
        finally:
            path.unlink(missing_ok=True)
        if code is None:
            return results
        if code != 0:
            last = printed.strip().splitlines()[-1:] or ["it printed nothing"]
            raise AuditCommandFailed(f"the audit command ended with {code}: {last[0]}", printed)
        self._check(job, results, printed)
        return results

    def _command(self, job: Path, results: Path, minutes: float | None) -> str:
        return self.template.format(
            job=shlex.quote(str(job)),
            results=shlex.quote(str(results)),
            minutes=f"{1e6 if minutes is None else minutes:.3f}",
        )

    def _run(
        self,
        command: str,
        output: int,
        minutes: float | None,
        progress: Callable[[jobs.Event], None] | None,
    ) -> int | None:
        """The exit code; None where the time was over first."""
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        process = subprocess.Popen(
            GUARD.format(command=command),
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ends_with_its_parent(signal.SIGUSR1),
        )
        try:
            while (code := process.poll()) is None:
                if deadline is not None and time.monotonic() > deadline:
                    return None
                if progress is not None:
                    progress(jobs.Event("command", "", "the audit command runs", None, {}))
                time.sleep(POLL_SECONDS)
            return code
        finally:
            _end(process)

    def _check(self, job: jobs.AuditJob, results: Path, printed: str) -> None:
        try:
            found = jobs.read_results(results)
        except ValueError as error:
            results.unlink(missing_ok=True)
            raise AuditCommandFailed(f"the audit command left no results: {error}", printed) from error
        if found.header.get("job_hash") != job.hash:
            results.unlink()
            raise AuditCommandFailed("the audit command left the results of another job", printed)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command and what it started."""
    for each in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, each)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return
