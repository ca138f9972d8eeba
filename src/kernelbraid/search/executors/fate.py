"""Processes that end with the one that started them, however it ends."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def ends_with_its_parent(by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return a `preexec_fn`: the new process gets a signal when the thread that started it ends.

    A search that is killed would otherwise leave its audits behind: they would keep the device busy, and what
    they find would belong to nobody.

    Args:
        by: the signal.
    """
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def begin() -> None:
        prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
        if os.getppid() != parent:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)

    return begin
