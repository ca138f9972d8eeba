"""Where audits run: this machine, a command, or the machines of a Ray cluster.

An executor is called as `jobs.run_job` is, and leaves a results file. What it has to say beside that travels
as events, so that whoever watches a study's audits writes it down.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kernelbraid.audit import jobs

QUEUED = "queue"
"""Stage of an event: `data["seconds"]` went by waiting for a device, which no budget counts."""
LOST = "lost"
"""Stage of an event: a machine went away; the requests of `data["requests"]` are run again elsewhere."""


class Executor(Protocol):
    """What runs a job: `jobs.run_job`, an executor of this package, an audit command, or a stand-in.

    The time limit counts what audits take and not what they wait for. Only evidence of this job is appended
    to `results`; what is answered there already is not run again.
    """

    def __call__(
        self,
        job: jobs.AuditJob,
        results: Path,
        *,
        minutes: float | None = None,
        progress: Callable[[jobs.Event], None] | None = None,
    ) -> Path: ...


def devices_of(executor: Executor) -> int:
    """Return how many comparisons an executor can run at a time: one a device."""
    return int(getattr(executor, "devices", 1))


def queued(seconds: float) -> jobs.Event:
    """Return the event that tells of waiting."""
    return jobs.Event(QUEUED, "", "waiting for the device", None, {"seconds": seconds})


def lost(requests: Sequence[str], reason: str) -> jobs.Event:
    """Return the event that tells of a machine that went away."""
    return jobs.Event(LOST, "", reason, None, {"requests": list(requests), "reason": reason})
