"""What a study may spend and has spent, over all its processes: seconds of searching, audited candidates."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import func, select

from kernelbraid.ir.evidence import Level
from kernelbraid.ir.schema import Audit, Usage
from kernelbraid.ir.store import Store

FLUSH_SECONDS = 2.0
"""A killed process loses at most about so much of the time it spent."""


SEARCH = "search"
CLOSING = "closing"


class Budget:
    """Time and audits of one study.

    Seconds count while a process searches, and are written down as they pass: a killed search does not get
    them back. Two things are written down apart and count against nothing: waiting for a machine, and the
    full audit that confirms the best candidate once a search has ended.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._purpose: str | None = None
        self._since = 0.0
        self._free = 0.0
        with store.read() as session:
            sums = session.execute(
                select(Usage.purpose, func.sum(Usage.wall_seconds)).group_by(Usage.purpose)
            )
            self._recorded = {purpose: float(seconds) for purpose, seconds in sums}

    @contextmanager
    def spending(self, purpose: str) -> Iterator[None]:
        """Count the time inside as spent on `purpose`, SEARCH or CLOSING, and not on what it interrupts."""
        self.flush(0.0)
        before, self._purpose, self._since = self._purpose, purpose, self._clock()
        try:
            yield
        finally:
            self.flush(0.0)
            self._purpose, self._since = before, self._clock()

    def flush(self, least: float = FLUSH_SECONDS) -> None:
        """Write down the seconds that passed, if there are at least `least`."""
        if self._purpose is None:
            return
        now = self._clock()
        passed = now - self._since
        if self._free > 0:
            free = min(passed, self._free)
            self._free -= free
            self._since += free
            passed -= free
        if passed >= least and passed > 0:
            self._store.record_usage(Usage(purpose=self._purpose, wall_seconds=passed))
            self._recorded[self._purpose] = self._recorded.get(self._purpose, 0.0) + passed
            self._since = now

    def waited(self, seconds: float) -> None:
        """Leave seconds of waiting for a device out of what is spent: they are written down apart."""
        self._store.record_usage(Usage(purpose="queue", queue_seconds=seconds))
        if self._purpose is not None:
            self._free += seconds

    def spent(self, purpose: str) -> float:
        """Seconds spent on a purpose so far."""
        passing = max(0.0, self._clock() - self._since - self._free) if purpose == self._purpose else 0.0
        return self._recorded.get(purpose, 0.0) + passing

    @property
    def seconds(self) -> float:
        """Seconds spent searching."""
        return self.spent(SEARCH)

    @property
    def seconds_left(self) -> float:
        minutes = self._store.study.minutes
        return math.inf if minutes is None else max(0.0, 60.0 * minutes - self.seconds)

    @property
    def audited(self) -> int:
        """Candidates audited at `screen`, whatever came of it; the root is none."""
        with self._store.read() as session:
            screens = select(func.count(Audit.implementation.distinct())).where(
                Audit.level == Level.SCREEN, Audit.implementation != self._store.study.root
            )
            return session.scalar(screens) or 0

    @property
    def audits_left(self) -> float:
        limit = self._store.study.audits
        return math.inf if limit is None else max(0, limit - self.audited)

    @property
    def proposer_calls(self) -> int:
        """Times that a proposer was asked for candidates."""
        with self._store.read() as session:
            return session.scalar(select(func.sum(Usage.proposer_calls))) or 0

    @property
    def proposer_calls_left(self) -> float:
        limit = self._store.study.proposer_calls
        return math.inf if limit is None else max(0, limit - self.proposer_calls)
