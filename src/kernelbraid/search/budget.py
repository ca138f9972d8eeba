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


class Budget:
    """Time and audits of one study.

    Seconds count while a process searches, and are written down as they pass: a killed search does not get
    them back. Waiting for a machine is written down apart and counts against nothing.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._since: float | None = None
        with store.read() as session:
            self._recorded = float(session.scalar(select(func.sum(Usage.wall_seconds))) or 0.0)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Count the time inside."""
        self._since = self._clock()
        try:
            yield
        finally:
            self.flush(0.0)
            self._since = None

    def flush(self, least: float = FLUSH_SECONDS) -> None:
        """Write down the seconds that passed, if there are at least `least`."""
        if self._since is None:
            return
        now = self._clock()
        passed = now - self._since
        if passed >= least and passed > 0:
            self._store.record_usage(Usage(purpose="search", wall_seconds=passed))
            self._recorded += passed
            self._since = now

    @property
    def seconds(self) -> float:
        """Seconds spent searching."""
        return self._recorded + (0.0 if self._since is None else self._clock() - self._since)

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
