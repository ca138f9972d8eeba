"""Finding, measuring and ending every process that a worker started, however far it ran from its parent.

While a judge is alive it is a child subreaper: a descendant whose parent ends (a daemon, a double fork, a new
session) becomes a child of the judge, which finds it there.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


def children(pid: int) -> list[int]:
    """Direct children of a process, ended but unreaped ones included; none if it is gone."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/{pid}/task/{task}/children", "rb") as file,
            ):
                found += map(int, file.read().split())
        if found or os.path.exists(f"/proc/{pid}/task/{pid}/children"):
            return found
    except (FileNotFoundError, ProcessLookupError):
        return []
    with contextlib.suppress(psutil.Error):  # a kernel without the children file
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, nearest first."""
    found: list[int] = []
    level = children(pid)
    while level:
        found += level
        level = [grandchild for child in level for grandchild in children(child)]
    return found


def resident(pid: int) -> int:
    """Resident memory of a process and everything below it, bytes."""
    total = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * _PAGE
    return total


class Household:
    """The judge's children: workers it knows, and strays that a worker left behind.

    The subreaper setting is held while any worker lives, and put back after the last.
    """

    def __init__(self) -> None:
        self._workers: set[int] = set()
        self.running: set[int] = set()
        """Workers that have been asked something; the others stand still."""
        self._before: set[int] = set()
        self._setting: int | None = None
        self.starting = threading.RLock()
        """Held while a worker starts, so that it is known before anybody asks for strays."""

    def enter(self) -> None:
        """Call before a worker is started."""
        if self._setting is None:
            setting = ctypes.c_int()
            _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(setting), 0, 0, 0)
            if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
                raise RuntimeError("cannot become a child subreaper, which ending a worker's daemons needs")
            self._setting = setting.value
            self._before = set(children(os.getpid()))

    def add(self, pid: int) -> None:
        """Know a started worker."""
        self._workers.add(pid)

    def leave(self, pid: int = 0) -> None:
        """Forget an ended worker; with the last one the strays end and the process's own setting is back."""
        with self.starting:
            self._workers.discard(pid)
            self.running.discard(pid)
            if not self._workers and self._setting is not None:
                self.sweep(lambda _: True)
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, self._setting, 0, 0, 0)
                self._setting = None

    def strays(self) -> list[int]:
        """Children of the judge that it did not start: orphans of some worker.

        A worker leads a session of its own and no process can join another session, so children in the
        judge's session are somebody else's business.
        """
        session = os.getsid(0)
        found = []
        with self.starting:
            present = children(os.getpid())
        for pid in present:
            if pid not in self._workers and pid not in self._before:
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(pid) != session:
                        found.append(pid)
        return found

    def sweep(self, ours: Callable[[int], bool]) -> int:
        """End and reap the strays that `ours` accepts, with everything below them; returns how many."""
        total = 0
        for strays in _until_empty(lambda: [pid for pid in self.strays() if ours(pid)]):
            total += len(strays)
            for pid in strays:
                end_tree(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        return total


def end_tree(pid: int) -> None:
    """Kill a process and everything below it; the caller reaps it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # what stands still cannot fork away
    for below in _until_empty(lambda: [each for each in descendants(pid) if alive(each)]):
        for each in below:
            _kill(each)
    _kill(pid)


def _until_empty(listing: Callable[[], list[int]], seconds: float = 5.0) -> Iterator[list[int]]:
    deadline = time.monotonic() + seconds
    while (found := listing()) and time.monotonic() < deadline:
        yield found
        time.sleep(0.001)


def alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


HOUSEHOLD = Household()
"""One per process, as the subreaper setting is."""
