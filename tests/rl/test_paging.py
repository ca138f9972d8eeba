"""Pages and the schedule on them: nothing leaks, nothing is freed twice, the oldest always gets on."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelbraid.rl.paging import Pages, prefix_keys
from kernelbraid.rl.records import Sampling
from kernelbraid.rl.requests import EngineSettings, Request, Statistics
from kernelbraid.rl.schedule import Piece, Schedule, Sequence


def test_keys_name_all_tokens_before() -> None:
    one, other = prefix_keys([1, 2, 3, 4, 5], 2), prefix_keys([1, 2, 3, 9, 5], 2)
    assert len(one) == 2 and one[0] == other[0] and one[1] != other[1]
    assert prefix_keys([9, 2, 3, 4, 5], 2)[1] != one[1]
    assert len(prefix_keys([1, 2, 3, 4], 2)) == 1  # the last token is computed by each for itself
    assert prefix_keys([1], 1) == () and len(prefix_keys([1, 2], 1)) == 1


def test_a_page_lives_until_its_last_holder_and_then_until_it_is_needed() -> None:
    pages = Pages(3)
    first = pages.take(2)
    pages.publish(first[0], b"a")
    assert pages.share([b"a", b"b"]) == first[:1]
    pages.check([first, first[:1]])
    pages.release(first)
    pages.check([first[:1]])
    assert pages.available == 2
    pages.release(first[:1])
    assert pages.available == 3 and pages.known([b"a"]) == 1
    assert first[0] not in pages.take(2)  # what is known goes last
    assert pages.take(1) == first[:1] and pages.known([b"a"]) == 0
    with pytest.raises(RuntimeError, match="1 pages were asked for, 0 are available"):
        pages.take(1)


def test_what_is_forgotten_is_not_shared() -> None:
    pages = Pages(2)
    held = pages.take(2)
    for page, key in zip(held, (b"a", b"b"), strict=True):
        pages.publish(page, key)
    pages.release(held[1:])
    pages.forget()
    assert pages.share([b"a"]) == [] and pages.available == 1
    pages.check([held[:1]])


def test_broken_accounts_are_seen() -> None:
    pages = Pages(2)
    held = pages.take(1)
    with pytest.raises(AssertionError, match="leaked"):
        pages.check([])
    with pytest.raises(AssertionError, match="leaked"):
        pages.check([held, held])
    pages.release(held)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release(held)


def underway(number: int, prompt: list[int], max_tokens: int) -> Sequence:
    asked = Request(torch.tensor(prompt, dtype=torch.int32), Sampling(max_tokens=max_tokens), number)
    return Sequence(asked, number, 0, list(prompt))


class World:
    """What every page holds, by what the schedule wrote: a request must find its own tokens."""

    def __init__(self, page_size: int, pages: int, most: int, step_tokens: int, share: bool) -> None:
        limits = EngineSettings(
            cache_tokens=page_size * pages,
            page_size=page_size,
            max_sequences=most,
            step_tokens=max(most, step_tokens),
            share_prefixes=share,
        )
        self.limits, self.version = limits, 0
        self.schedule = Schedule(limits, Statistics())
        self.slots: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self.rested: set[int] = set()
        """Pages that hold keys computed from keys of an older version."""

    def write(self, piece: Piece) -> None:
        size = self.limits.page_size
        for i in range(piece.start, piece.end):
            place = (piece.sequence.pages[i // size], i % size)
            self.slots[place] = (tuple(piece.sequence.ids[: i + 1]), self.version)
            rests = piece.sequence.cache_version != self.version
            (self.rested.add if rests else self.rested.discard)(place[0])

    def read(self, piece: Piece) -> None:
        sequence, size = piece.sequence, self.limits.page_size
        for i in range(piece.end):
            ids, version = self.slots[sequence.pages[i // size], i % size]
            assert ids == tuple(sequence.ids[: i + 1])
            assert sequence.cache_version is not None and version >= sequence.cache_version
            if sequence.cache_version == self.version:
                assert sequence.pages[i // size] not in self.rested

    def step(self) -> int:
        schedule = self.schedule
        pieces = schedule.plan(self.version)
        schedule.check()
        assert sum(piece.end - piece.start for piece in pieces) <= self.limits.step_tokens
        assert len(schedule.running) <= self.limits.max_sequences
        for piece in pieces:
            self.write(piece)
        for piece in pieces:
            self.read(piece)
        for piece in pieces:
            if piece.draws:
                sequence = piece.sequence
                sequence.ids.append(len(sequence.ids) % 2)
                if len(sequence.tokens) == sequence.request.sampling.max_tokens:
                    schedule.remove(sequence)
        schedule.check()
        return len(pieces)


def happening(rng: random.Random, world: World, begun: int) -> int:
    """One event of a random schedule; few token ids, so that many prompts share a beginning."""
    schedule, event = world.schedule, rng.choices(("add", "step", "remove", "update"), (4, 8, 1, 1))[0]
    if event == "add":
        prompt = [int(rng.random() < 0.15) for _ in range(rng.randint(1, 14))]
        schedule.add(underway(begun, prompt, rng.randint(1, 8)))
        return begun + 1
    if event == "step":
        world.step()
    elif event == "update":
        world.version += 1
        schedule.pages.forget()
    elif there := [*schedule.running, *schedule.waiting]:
        schedule.remove(rng.choice(there))
    return begun


@settings(max_examples=50, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(1, 6),
    st.integers(1, 12),
    st.booleans(),
)
def test_any_schedule_keeps_its_accounts(
    rng: random.Random, page_size: int, spare: int, most: int, step_tokens: int, share: bool
) -> None:
    world = World(page_size, -(-22 // page_size) + spare, most, step_tokens, share)
    keeps_its_accounts(world, random.Random(rng.getrandbits(40)))


@pytest.mark.parametrize("seed", range(40))
def test_scarce_pages_and_shared_prefixes(seed: int) -> None:
    """Where hypothesis seldom goes: everything shared, nothing to spare."""
    world = World(1 + seed % 3, -(-22 // (1 + seed % 3)) + seed % 5, 6, 5, True)
    keeps_its_accounts(world, random.Random(seed))
    assert world.schedule.statistics.prefix_hits > 0


def keeps_its_accounts(world: World, rng: random.Random) -> None:
    schedule, begun, steps = world.schedule, 0, 0
    for _ in range(60):
        begun = happening(rng, world, begun)
        schedule.check()
    while schedule.running or schedule.waiting:
        assert world.step(), "nothing moves"
        steps += 1
        assert steps < 5000
    assert schedule.pages.held == 0 and schedule.pages.available == world.limits.pages


@pytest.mark.parametrize("wrong", ["order", "version"])
def test_a_wrong_page_is_seen_by_the_world(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    right = Pages.share
    if wrong == "order":
        monkeypatch.setattr(Pages, "share", lambda self, keys: right(self, keys)[::-1])
    world = World(2, 20, 4, 8, True)
    prompt = [0, 1, 1, 0, 0, 0, 1]
    world.schedule.add(underway(0, prompt, 3))
    world.step()
    if wrong == "version":
        world.version = 1  # without `forget`
    world.schedule.add(underway(1, prompt, 3))
    with pytest.raises(AssertionError):
        world.step()


def test_the_youngest_gives_way() -> None:
    world = World(1, 8, 3, 8, False)
    for number in range(3):
        world.schedule.add(underway(number, [number % 2], 7))
    preempted: set[int] = set()
    while world.schedule.running or world.schedule.waiting:
        world.step()
        preempted |= {each.number for each in world.schedule.waiting}
    assert preempted == {1, 2} and world.schedule.statistics.preemptions >= 2


def test_pages_that_rest_on_old_keys_are_not_published() -> None:
    world, prompt = World(1, 30, 4, 4, True), [0, 1, 1, 0, 0, 0, 1, 1, 0, 1]
    world.schedule.add(underway(0, prompt, 1))
    world.step()  # four tokens under version 0
    world.version = 1
    world.schedule.pages.forget()
    world.schedule.add(underway(1, prompt, 1))
    while world.schedule.running or world.schedule.waiting:
        world.step()
    world.schedule.add(underway(2, prompt, 1))
    [piece] = world.schedule.plan(1)
    held = [world.slots[page, 0] for page in piece.sequence.pages[:9]]
    assert [version for _, version in held] == [1] * 9
    assert not set(piece.sequence.pages[:9]) & set(world.rested)
