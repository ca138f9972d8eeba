"""Which requests take part in a step, with how many tokens, on which pages.

Decoding requests come first, one token each; chunks of prompts fill the rest of the step. Requests are
admitted in the order of their arrival, once there are pages for everything that they hold. Where a decoding
request finds no page, the youngest running one gives up its pages and is computed again later.
"""

import bisect
from array import array
from dataclasses import dataclass, field

from kernelbraid.rl.paging import Pages, prefix_keys
from kernelbraid.rl.records import Drawn, Snapshot
from kernelbraid.rl.requests import EngineSettings, Request, Statistics
from kernelbraid.rl.stops import TextWatch


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way."""

    request: Request
    number: int
    """In the order of arrival."""
    seed: int
    ids: list[int]
    """Prompt and tokens drawn so far."""
    watch: TextWatch | None = None
    keys: tuple[bytes, ...] = ()
    pages: "array[int]" = field(default_factory=lambda: array("i"))
    computed: int = 0
    """Tokens whose keys are in the cache, or will be after the step that is planned."""
    published: int = 0
    cache_version: int | None = None
    """The oldest version that keys in its pages were computed under."""
    snapshot: Snapshot | None = None
    """Of the first token."""
    prefix_version: int | None = None
    drawn: list[Drawn] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def decodes(self) -> bool:
        """Whether only the token drawn last is to be computed."""
        return len(self.ids) > self.prompt_length and self.computed == len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `end` of a request, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int
    decodes: bool

    @property
    def draws(self) -> bool:
        """Whether the step draws the request's next token."""
        return self.end == len(self.sequence.ids)


class Schedule:
    """Waiting and running requests, each in the order of arrival."""

    def __init__(self, settings: EngineSettings, statistics: Statistics) -> None:
        self.settings, self.statistics = settings, statistics
        self.pages = Pages(settings.pages)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Let a request wait."""
        if self.settings.share_prefixes:
            sequence.keys = prefix_keys(sequence.ids[: sequence.prompt_length], self.settings.page_size)
        bisect.insort(self.waiting, sequence, key=lambda each: each.number)

    def remove(self, sequence: Sequence) -> None:
        """A request ended, or was given up."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_up_pages(sequence)
        else:
            self.waiting.remove(sequence)

    def plan(self, version: int) -> list[Piece]:
        """The pieces of the next step, decoding requests first; pages are taken for all of them.

        Args:
            version: of the weights that will compute it.
        """
        pieces = self._decoding(version)
        left = self.settings.step_tokens - len(pieces)
        for sequence in self.running:
            if left and sequence.computed < len(sequence.ids):
                pieces.append(self._piece(sequence, left, version))
                left -= pieces[-1].end - pieces[-1].start
        for sequence in list(self.waiting):
            if not left or len(self.running) == self.settings.max_sequences:
                break
            if self._soon_shared(sequence, version):
                continue
            if not self._admit(sequence, version):
                break
            pieces.append(self._piece(sequence, left, version))
            left -= pieces[-1].end - pieces[-1].start
        self.statistics.most_pages = max(self.statistics.most_pages, self.pages.held)
        return pieces

    def preempt(self, sequence: Sequence) -> None:
        """Let a running request wait again, without pages: all that it holds is computed again later."""
        self.running.remove(sequence)
        self._give_up_pages(sequence)
        bisect.insort(self.waiting, sequence, key=lambda each: each.number)
        self.statistics.preemptions += 1

    def check(self) -> None:
        """Raise AssertionError unless pages and requests agree."""
        self.pages.check([each.pages for each in self.running])
        assert not any(each.pages for each in self.waiting)
        for each in self.running:
            assert len(each.pages) * self.settings.page_size >= each.computed

    def _decoding(self, version: int) -> list[Piece]:
        pieces = []
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.decodes:
                continue
            if len(sequence.pages) * self.settings.page_size == sequence.computed:
                while not self.pages.available and sequence in self.running:
                    self.preempt(self.running[-1])
                if sequence not in self.running:
                    break  # it was the youngest
                sequence.pages.extend(self.pages.take(1))
            pieces.append(self._piece(sequence, 1, version))
        return pieces

    def _piece(self, sequence: Sequence, most: int, version: int) -> Piece:
        """Plan a request's next tokens, and publish the pages of its prompt that they fill."""
        start, decodes = sequence.computed, sequence.decodes
        end = min(len(sequence.ids), start + most)
        if sequence.cache_version is None:
            sequence.cache_version = version
        sequence.computed = end
        if sequence.cache_version == version:
            full = min(end // self.settings.page_size, len(sequence.keys))
            for i in range(sequence.published, full):
                self.pages.publish(sequence.pages[i], sequence.keys[i])
            sequence.published = max(sequence.published, full)
        return Piece(sequence, start, end, decodes)

    def _soon_shared(self, sequence: Sequence, version: int) -> bool:
        """Whether a running request is about to compute the next page that this one could share."""
        known = self.pages.known(sequence.keys)
        if known == len(sequence.keys):
            return False
        return any(
            sequence.keys[known] in other.keys[other.published :]
            for other in self.running
            if other.cache_version == version and other.computed < len(other.ids)
        )

    def _admit(self, sequence: Sequence, version: int) -> bool:
        """Give a request its pages, shared ones as far as they are known; False where they do not suffice."""
        shared = self.pages.share(sequence.keys)
        needed = -(-len(sequence.ids) // self.settings.page_size) - len(shared)
        if needed > self.pages.available:
            self.pages.release(shared)
            return False
        sequence.pages = array("i", shared + self.pages.take(needed))
        sequence.computed = len(shared) * self.settings.page_size
        sequence.published = len(shared)
        self.statistics.prefix_hits += sequence.computed
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda each: each.number)
        return True

    def _give_up_pages(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages, sequence.computed, sequence.published = array("i"), 0, 0
        sequence.cache_version = None
