"""Stop strings: the text of a completion as its tokens come, and whether a string to stop at is in it."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, such as a tokenizer's `decode`; a character that is not complete yet ends as U+FFFD."""

INCOMPLETE = "\ufffd"


class TextWatch:
    """Follows one completion, whose characters and strings may span tokens.

    Text is decoded from a token back that is known to end a character, so that the cost of a token does not
    grow with the completion.

    Args:
        decode: text of token ids.
        stop: strings to stop at, none of them empty.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._longest = max(map(len, stop))
        self._ids: list[int] = []
        self._before = 0
        self._settled = 0
        self._tail = ""

    def add(self, token: int) -> bool:
        """Take in the next token; True where it completes one of the strings."""
        self._ids.append(token)
        old = self._decode(self._ids[self._before : self._settled])
        text = self._decode(self._ids[self._before :])
        complete = text.rstrip(INCOMPLETE)
        seen = self._tail + complete[len(old) :]
        if any(each in seen for each in self._stop):
            return True
        if len(text) > len(old) and not text.endswith(INCOMPLETE):
            self._tail = seen[max(0, len(seen) - self._longest + 1) :]
            self._before, self._settled = self._settled, len(self._ids)
        return False
