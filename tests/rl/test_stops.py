"""Stop strings across tokens and across the bytes of a character."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kernelbraid.rl.stops import TextWatch


def by_bytes(ids: Sequence[int]) -> str:
    """A tokenizer of single bytes."""
    return bytes(ids).decode(errors="replace")


def ended(text: bytes, *stop: str) -> int | None:
    watch = TextWatch(by_bytes, stop)
    return next((i + 1 for i, token in enumerate(text) if watch.add(token)), None)


def test_a_string_ends_at_the_token_that_completes_it() -> None:
    assert ended(b"one END two", "END") == 7
    assert ended(b"one EN D", "END") is None
    assert ended(b"aaab", "ab", "zz") == 4
    assert ended(b"x", "x") == 1


def test_characters_of_several_bytes() -> None:
    text = "né ⇒ stop".encode()
    assert ended(text, "é") == 3
    assert ended(text, "⇒ s") == len("né ⇒ s".encode())
    assert ended(text, "⇒") == len("né ⇒".encode())


def test_a_string_before_an_unfinished_character_is_seen_at_once() -> None:
    tokens = [b"ok EN", b"D\xe2", b"\x87", b"\x92"]
    watch = TextWatch(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"), ("END",))
    assert [watch.add(i) for i in range(2)] == [False, True]


@given(st.text("ab⇒é😀", max_size=30), st.lists(st.text("ab⇒é😀", min_size=1, max_size=4), min_size=1))
def test_any_text_ends_where_its_bytes_do(text: str, stop: list[str]) -> None:
    data = text.encode()
    ends = [
        end for end in range(1, len(data) + 1) if any(s in data[:end].decode(errors="ignore") for s in stop)
    ]
    assert ended(data, *stop) == (ends[0] if ends else None)


def test_a_tokens_cost_does_not_grow() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return by_bytes(ids)

    watch = TextWatch(decode, ("never",))
    assert not any(watch.add(token) for token in b"a long text without it " * 50)
    assert longest <= 3
