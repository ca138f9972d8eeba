"""Thousands of similar sources in little space: each as its differences from its first parent."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import ne

Hunk = tuple[int, int, str | None]
"""Lines start to end of the parent become this text; None removes them."""

Packed = tuple[int, str] | tuple[int, list[Hunk]]
"""Index of the parent and hunks in ascending order; -1 and the whole text where there is none."""

MOST_LINES = 4000
"""Beyond so many changed lines on both sides together the lines between first and last change go whole."""


def pack(sources: Iterable[tuple[str, str]], parents: Mapping[str, str]) -> list[Packed]:
    """Pack sources, each after its parent.

    Args:
        sources: hash and text, each parent before its children.
        parents: child -> first parent, by hash.
    """
    needed = set(parents.values())
    index: dict[str, int] = {}
    kept: dict[str, str] = {}
    packed: list[Packed] = []
    for sha256, text in sources:
        parent = parents.get(sha256)
        if parent is None:
            packed.append((-1, text))
        else:
            packed.append((index[parent], hunks(kept[parent].split("\n"), text.split("\n"))))
        index[sha256] = len(index)
        if sha256 in needed:
            kept[sha256] = text
    return packed


def unpack(packed: Sequence[Packed]) -> list[str]:
    """Return the texts; the page does the same."""
    texts: list[list[str]] = []
    for parent, stored in packed:
        if isinstance(stored, str):
            texts.append(stored.split("\n"))
            continue
        lines = list(texts[parent])
        for start, end, text in reversed(stored):
            lines[start:end] = [] if text is None else text.split("\n")
        texts.append(lines)
    return ["\n".join(lines) for lines in texts]


def hunks(a: Sequence[str], b: Sequence[str]) -> list[Hunk]:
    """Return what turns lines `a` into lines `b`; not always the fewest lines."""
    if len(a) == len(b):
        unequal = list(compress(range(len(a)), map(ne, a, b)))
        if len(unequal) <= 1 + len(a) // 8:  # edits in place, such as values of knobs
            return [(start, end, "\n".join(b[start:end])) for start, end in _runs(unequal)]
    shorter = min(len(a), len(b))
    first = next(compress(range(shorter), map(ne, a, b)), shorter)
    last = next(compress(range(shorter - first), map(ne, reversed(a), reversed(b))), shorter - first)
    left, right = a[first : len(a) - last], b[first : len(b) - last]
    codes: Sequence[tuple[str, int, int, int, int]]
    if len(left) + len(right) > MOST_LINES:
        codes = [("replace", 0, len(left), 0, len(right))]
    else:
        codes = difflib.SequenceMatcher(None, left, right).get_opcodes()
    return [
        (first + i, first + j, "\n".join(right[k:m]) if m > k else None)
        for tag, i, j, k, m in codes
        if tag != "equal"
    ]


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs
