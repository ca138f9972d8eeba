"""What a test leaves behind."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def no_process_left() -> Iterator[None]:
    """Whatever the block starts ends with it; what ran before may stay: Python's resource tracker."""
    before = set(psutil.Process().children())
    yield
    assert not set(psutil.Process().children()) - before, "processes were left behind"
