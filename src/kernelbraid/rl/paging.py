"""Pages of the cache: who holds them, and which hold the start of a prompt that others may share.

A page is free, held by one or more requests, or kept: held by nobody, but its contents are known and may be
shared until the page is needed. Only full pages of prompts are shared, so that nobody writes into a page that
another request reads.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np


def prefix_keys(prompt: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """Identity of what each shareable page of a prompt holds: all tokens up to its end.

    The last token is never shared: its hidden state draws the first new one.

    Args:
        prompt: token ids.
        page_size: tokens of a page.

    Returns:
        One SHA-256 a full page, each over the one before and the page's tokens.
    """
    keys, key = [], b""
    for start in range(0, (len(prompt) - 1) // page_size * page_size, page_size):
        tokens = np.asarray(prompt[start : start + page_size], dtype="<i4")
        key = hashlib.sha256(key + tokens.tobytes()).digest()
        keys.append(key)
    return tuple(keys)


class Pages:
    """Counts who holds each page of a cache.

    Args:
        count: pages of the cache.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders = [0] * count
        self._free = deque(range(count))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        """Pages that requests hold."""
        return self.count - self.available

    def take(self, count: int) -> list[int]:
        """Pages for one request; of kept pages, the one released first gives way first.

        Raises:
            RuntimeError: there are fewer; nothing was taken.
        """
        if count > self.available:
            raise RuntimeError(f"{count} pages were asked for, {self.available} are available")
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._kept.popitem(last=False)
                self._forget(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the pages of the longest known prefix, in order."""
        shared = [self._page_of[key] for key in keys[: self.known(keys)]]
        for page in shared:
            self._kept.pop(page, None)
            self._holders[page] += 1
        return shared

    def known(self, keys: Sequence[bytes]) -> int:
        """How many pages `share` would find."""
        return next((i for i, key in enumerate(keys) if key not in self._page_of), len(keys))

    def publish(self, page: int, key: bytes) -> None:
        """Let others share a page that holds what `key` names; an equal page that is known already stays."""
        assert self._holders[page] > 0, "only a page that is held can be published"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Give up pages of one request, the last one first: the start of a prefix is kept longest."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} was released twice"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Share nothing that is known now: the weights changed."""
        self._free.extend(self._kept)
        self._kept.clear()
        self._key_of.clear()
        self._page_of.clear()

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the counts are exactly those of the requests' page tables."""
        counts = [0] * self.count
        for table in tables:
            assert len(set(table)) == len(table), "a request holds a page twice"
            for page in table:
                counts[page] += 1
        assert counts == self._holders, "a page was leaked or freed while held"
        free = [*self._free, *self._kept]
        assert len(set(free)) == len(free), "a page is free twice"
        assert set(free) == {page for page, holders in enumerate(counts) if not holders}
        assert {key: page for page, key in self._key_of.items()} == self._page_of
        assert set(self._kept) <= set(self._key_of) and not set(self._free) & set(self._key_of)
