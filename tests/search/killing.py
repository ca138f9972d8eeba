"""A study whose search is killed: what is searched, who can be killed, and what the records have to say.

The root does its work sixteen times, so that a candidate is promoted whatever the noise; candidates are
recorded proposals, so that a search that goes on audits the same ones as a search that nobody disturbs.
"""

import itertools
import math
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil

from kernelbraid import ops
from kernelbraid.contract import Source
from kernelbraid.ir import query, survey
from kernelbraid.ir.evidence import ACCEPTED, Level, Status
from kernelbraid.ir.replaying import Recorded
from kernelbraid.search import lineage
from kernelbraid.search.proposers import edits
from kernelbraid.search.study import Study

REPOSITORY = Path(__file__).parents[2]
OPERATOR = ops.get("rms_norm")
AUDITS = 6
GRACE_SECONDS = 60.0
"""Time that a search has to notice that what it needs is gone. After that it hangs."""
LAST_SECONDS = 300.0
"""Time that it takes at most to go on to its end undisturbed."""

SIXTEEN_TIMES = """

_once = rms_norm


def rms_norm(*arguments, **named):
    for _ in range(15):
        _once(*arguments, **named)
    return _once(*arguments, **named)
"""


def new_study(folder: Path) -> None:
    """A study of one small workload and AUDITS candidates, all made from the root."""
    shipped = ops.source(OPERATOR)
    root = Source(shipped.text + SIXTEEN_TIMES, label="sixteen_times.py")
    knobs = edits.declared(shipped, OPERATOR.contract)
    settings = list(itertools.product(*(knob.choices for knob in knobs)))[:AUDITS]
    assert len(settings) == AUDITS
    proposals = []
    for values in settings:
        edit = {knob.name: value for knob, value in zip(knobs, values, strict=True)}
        made = edits.apply(shipped, edit, OPERATOR.contract, label=str(edit))
        proposals.append(Recorded(made, (root.sha256,), "less work", (), (), "", (), "", "test"))
    workload = next(each for each in OPERATOR.grids["study"] if each.phase == "prefill")
    Study.create(
        folder, OPERATOR, root, workloads=[workload], audits=AUDITS, proposer="replay", replay=proposals
    ).close()


class Search:
    """A study that the command line searches, in a process of its own."""

    def __init__(self, folder: Path, home: Path, *options: str) -> None:
        self.folder, self._options = folder, options
        paths = [str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {
            **os.environ,
            "KERNELBRAID_HOME": str(home),
            "PYTHONPATH": os.pathsep.join(paths),
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
        }
        self._output = folder.with_name(f"{folder.name}.txt")
        self._process: subprocess.Popen[bytes] | None = None
        self._running_since = 0.0
        self.ran_seconds = 0.0
        """Time that controllers were there, all of them together."""
        self._rows: dict[str, Counter[tuple[object, ...]]] = {}

    def start(self) -> psutil.Process:
        """Start, or go on; returns the controller."""
        if self._process is None or self._process.poll() is not None:
            self._ended()
            command = [sys.executable, "-m", "kernelbraid", "resume", str(self.folder), "--no-compare"]
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    [*command, *self._options], env=self._environment, stdout=output, stderr=output
                )
            self._running_since = time.monotonic()
        return psutil.Process(self._process.pid)

    def wait(self, seconds: float) -> int:
        """Exit code of the controller; one that does not end in time hangs, and that is a failure."""
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"the search hangs, {seconds:.0f} s after the kill: {self.said()}") from None
        finally:
            self._process.wait()
            self._ended()

    def _ended(self) -> None:
        if self._running_since:
            self.ran_seconds += time.monotonic() - self._running_since
            self._running_since = 0.0

    def finish(self) -> None:
        """Go on until it ends by itself; a kill may still be felt once: an audit whose root was killed."""
        for _ in range(3):
            self.start()
            if self.wait(LAST_SECONDS) == 0:
                return
        raise AssertionError(f"the search does not end: {self.said()}")

    def ended(self) -> int | None:
        """Exit code of the controller; None while it runs."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._ended()
        return code

    def said(self) -> str:
        return self._output.read_text(errors="replace")[-2000:]

    def check(self) -> None:
        """Nothing that was recorded is gone, nothing is there twice, and sums are those of the parts."""
        rows = _rows(self.folder / "study.db")
        for table, before in self._rows.items():
            assert not before - rows[table], f"rows of {table} were lost or changed"
        self._rows = rows
        with Study.open(self.folder) as study, study.store.read():
            study.store.check()
            audits = query.audits(study.store)
            assert len({each.request for each in audits}) == len(audits), "a request was answered twice"
            ledger = [each for each in survey.usage(study.store) if each.purpose == "audit"]
            assert Counter(each.implementation for each in ledger) == Counter(
                each.implementation for each in audits
            ), "an audit was charged twice, or never"
            taken = math.fsum(seconds for each in audits for _, seconds in each.seconds)
            assert math.isclose(math.fsum(each.device_seconds for each in ledger), taken, abs_tol=1e-6)
            spent = study.budget.spent("search") + study.budget.spent("closing")
            assert spent <= self.ran_seconds + self._so_far(), "time was charged twice"
            assert study.budget.audited <= AUDITS
            decided = [(each.screen_audit, each.full_audit) for each in query.promotions(study.store)]
            assert len(set(decided)) == len(decided), "the same evidence was decided on twice"

    def _so_far(self) -> float:
        return time.monotonic() - self._running_since if self._running_since else 0.0


def outcome(folder: Path) -> dict[str, str]:
    """What became of each candidate: `accepted`, with its bits, `killed`, or how it was rejected."""
    found = {}
    with Study.open(folder) as study:
        assert not study.store.pending() and not lineage.settle(study), "something is left to do"
        assert study.budget.audited == AUDITS
        left = [*(folder / "jobs").iterdir(), *(folder / "results").iterdir()]
        assert not left, "a job was left behind"
        assert study.incumbent != study.root, "a candidate does a sixteenth of the work"
        granted = query.promotions(study.store, granted=True)
        for each in granted:
            full = query.evidence(study.store, each.full_audit or "")
            assert full is not None and full.level is Level.FULL and full.status is Status.VERIFIED
            assert full.implementation == each.implementation
        assert [each.implementation for each in granted][-1] == study.incumbent
        for sha256, standing in study.standings().items():
            if sha256 != study.root:
                by_hand = standing.status is Status.CRASHED and "SIGKILL" in standing.evidence.reason
                accepted = f"accepted {standing.evidence.bits_id}"
                found[sha256] = (
                    "killed" if by_hand else accepted if standing.status in ACCEPTED else str(standing.status)
                )
    return found


def _rows(database: Path) -> dict[str, Counter[tuple[object, ...]]]:
    """Every row of every table; none is ever changed or removed."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
        names = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: Counter(opened.execute(f'SELECT * FROM "{name}"')) for name in names}


# Who can be killed

Victims = Callable[[psutil.Process], list[psutil.Process]]


def controller(root: psutil.Process) -> list[psutil.Process]:
    return [root]


def audit_run(root: psutil.Process) -> list[psutil.Process]:
    """The audit of a command, or of a part of a job on a cluster."""
    return _below(root, "kernelbraid", "audit", "run")


def worker(root: psutil.Process) -> list[psutil.Process]:
    """Processes that run a source."""
    return _below(root, "audit/worker.py")


def cluster_worker(root: psutil.Process) -> list[psutil.Process]:
    return _below(root, "ray::_called")


def cluster_node(root: psutil.Process) -> list[psutil.Process]:
    return _below(root, "raylet/raylet")


def cluster_head(root: psutil.Process) -> list[psutil.Process]:
    return _below(root, "gcs_server")


def _below(root: psutil.Process, *words: str) -> list[psutil.Process]:
    found = []
    with suppress(psutil.Error):
        for each in root.children(recursive=True):
            with suppress(psutil.Error):
                line = " ".join(each.cmdline())
                if each.status() != psutil.STATUS_ZOMBIE and all(word in line for word in words):
                    found.append(each)
    return found


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether processes ended within so many seconds; those that have not are killed."""
    deadline = time.monotonic() + seconds
    while (left := list(filter(_alive, processes))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for each in left:
        with suppress(psutil.Error):
            each.kill()
    return not left


def _alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended may wait for long to be reaped by whoever inherited it."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
