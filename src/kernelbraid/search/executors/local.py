"""Audits on this machine, one comparison a device at a time, whichever process asks."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kernelbraid.audit import jobs
from kernelbraid.ops.installed import home
from kernelbraid.search.executors import queued

POLL_SECONDS = 0.25
"""How often a busy device is looked at."""


class LocalExecutor:
    """Runs a job here, and holds its device from the first build to the last timing.

    Studies, agents and travelling audits of one user on one machine take turns: two comparisons at once would
    slow each other. The lock goes away with the process that holds it.

    Args:
        folder: of the locks; by default in the user's data folder.
    """

    devices = 1

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def __call__(
        self,
        job: jobs.AuditJob,
        results: Path,
        *,
        minutes: float | None = None,
        progress: Callable[[jobs.Event], None] | None = None,
    ) -> Path:
        """Wait for the device, then do as `jobs.run_job`; the time limit begins when the device is free."""
        with holding(job.device, self._folder, progress):
            return jobs.run_job(job, results, minutes=minutes, progress=progress)


@contextmanager
def holding(
    device: str, folder: Path | None = None, progress: Callable[[jobs.Event], None] | None = None
) -> Iterator[None]:
    """Hold a device of this machine; told of waiting, `progress` may raise to give up.

    Args:
        device: `cpu` or `cuda`; of several GPUs, those that CUDA_VISIBLE_DEVICES names.
        folder: of the locks; by default in the user's data folder.
        progress: told how many seconds went by waiting.

    Raises:
        RuntimeError: the lock cannot be made.
    """
    path = (folder or home() / "locks") / f"{_name(device)}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        _acquire(lock, progress)
    except OSError as error:
        raise RuntimeError(f"cannot lock the device by {path}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, progress: Callable[[jobs.Event], None] | None) -> None:
    since = time.monotonic()
    while True:
        try:
            lock.acquire(timeout=POLL_SECONDS)
            return
        except Timeout:
            now = time.monotonic()
            if progress is not None:
                progress(queued(now - since))
            since = now


def _name(device: str) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if device == "cuda" else ""
    kept = "".join(letter if letter.isalnum() or letter in "-," else "_" for letter in visible)
    return f"{device}-{kept}" if kept else device
