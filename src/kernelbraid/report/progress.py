"""Progress on standard error: a status line on a terminal, and a lasting line for each finding."""

import math
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.status import Status as StatusLine

from kernelbraid.audit.orders import Event
from kernelbraid.ir.evidence import ACCEPTED, Status

if TYPE_CHECKING:  # following a job must not load the study database
    from kernelbraid.search.loop import Progress

LASTING = ("proposer", "proposed", "audited", "promoted", "refused", "interrupted")
"""Stages of a search whose line stays; the others only show on a terminal while they last."""
SECONDS_BETWEEN_LINES = 20.0
"""How often a verification says where it is, where no terminal shows it."""


class Watch:
    """Follows a search, or a job, and tells a person; use it as a context manager.

    `watch(progress)` takes what a search tells, `watch.event(event)` what a job tells.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._status: StatusLine | None = None
        self._next = time.monotonic() + SECONDS_BETWEEN_LINES
        if self._console.is_terminal:
            self._status = self._console.status("starting")

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, progress: "Progress") -> None:
        """Show what a search does."""
        text = described(progress)
        if progress.stage in LASTING:
            self._keep(f"{budget(progress)} {text}")
        elif self._status is not None:
            self._status.update(f"{budget(progress)} {text}")

    def event(self, event: Event) -> None:
        """Show what a job does."""
        text = f"{event.stage} {event.candidate}: {event.message}{_share(event.fraction)}"
        if event.stage == "done":
            self._keep(text)
        elif self._status is not None:
            self._status.update(text)

    def checking(self, what: str, fraction: float) -> None:
        """Show what a verification checks."""
        if self._status is not None:
            self._status.update(f"{what}{_share(fraction)}")
        elif time.monotonic() > self._next:
            self._next = time.monotonic() + SECONDS_BETWEEN_LINES
            self._keep(f"{what}{_share(fraction)}")

    def _keep(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def budget(progress: "Progress") -> str:
    """What was audited and what is left, in brackets."""
    parts = [f"{progress.audited} audited"]
    if math.isfinite(progress.audits_left):
        parts.append(f"{progress.audits_left:.0f} left")
    if math.isfinite(progress.seconds_left):
        parts.append(f"{progress.seconds_left:.0f} s left")
    return f"[{', '.join(parts)}]"


def described(progress: "Progress") -> str:
    """Stage, candidate, and what is known: bits, latency against the incumbent, what could be proven."""
    text = f"{progress.stage} {progress.candidate}".rstrip()
    if progress.status is None:
        return f"{text}: {progress.message}{_share(progress.fraction)}" if progress.message else text
    found = [_bits(progress.status)]
    if progress.ratio is not None:
        found.append(f"{progress.ratio:.3f} of the incumbent's time")
    if progress.smallest_gain is not None:
        found.append(f"could prove {100 * progress.smallest_gain:.1f}%")
    if progress.message:
        found.append(progress.message)
    return f"{text}: {', '.join(found)}"


def _bits(status: Status) -> str:
    if status in ACCEPTED:
        return "bits equal"
    return str(status.value).replace("_", " ")


def _share(fraction: float | None) -> str:
    return "" if fraction is None else f" ({100 * fraction:.0f}%)"
