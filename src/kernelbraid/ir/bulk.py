"""Reading thousands of records at once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_objects() -> Iterator[None]:
    """Hold Python's cyclic garbage collector while many objects are made that all stay.

    It would look through all of them again and again and find nothing, which takes as long as making them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
