"""Two modifications composed: a three-way merge of sources over their nearest common ancestor.

Lines that one side changed are taken from it; lines that both changed alike, once. What both changed
differently is a conflict, which is reported and not resolved. Written here: the merge libraries that are kept
up are under licences that this one's users may not accept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from kernelbraid.contract import Source
from kernelbraid.ir import query
from kernelbraid.search.study import Study

Lines = Sequence[str]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Lines that both sides changed, each differently."""

    line: int
    """Where it stands in the text that would result, with our lines in its place; the first line is 1."""
    base: tuple[str, ...]
    ours: tuple[str, ...]
    theirs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of a merge."""

    base: str
    """The nearest common ancestor, by hash."""
    parents: tuple[str, str]
    source: Source | None
    """None where there are conflicts."""
    conflicts: tuple[Conflict, ...]


def merge(study: Study, ours: str, theirs: str) -> Merged:
    """Compose two verified implementations of a study.

    Args:
        study: an open study.
        ours: one, by hash or first digits.
        theirs: the other.

    Raises:
        ValueError: one of them is not verified, they are the same, or one descends from the other.
    """
    sides = [study.store.implementation(each).sha256 for each in (ours, theirs)]
    for sha256 in sides:
        if not query.is_verified(study.store, sha256):
            raise ValueError(f"{sha256[:12]} is not verified: only verified implementations are merged")
    ancestors = [[step.implementation.sha256 for step in query.lineage(study.store, sha)] for sha in sides]
    for sha256, other in zip(sides, reversed(ancestors), strict=True):
        if sha256 in other:
            raise ValueError(f"{sha256[:12]} is what the other was made from, or the same: nothing to merge")
    base = next(sha for sha in reversed(ancestors[0]) if sha in set(ancestors[1]))
    texts = [study.store.source(sha).text.splitlines(keepends=True) for sha in (base, *sides)]
    lines: list[str] = []
    conflicts = []
    for part in three_way(*texts):
        if isinstance(part, Conflict):
            conflicts.append(Conflict(len(lines) + 1, part.base, part.ours, part.theirs))
            lines += part.ours
        else:
            lines += part
    label = f"{sides[0][:12]} and {sides[1][:12]}"
    source = None if conflicts else Source("".join(lines), label=label)
    return Merged(base, (sides[0], sides[1]), source, tuple(conflicts))


def three_way(base: Lines, ours: Lines, theirs: Lines) -> Iterator[Lines | Conflict]:
    """Yield the pieces of the merged text in order: lines, or a conflict (its `line` is 0).

    Between lines that all three texts share, in order, a piece that one side left as it was is the other's.
    Where neither side added or removed lines, as in a list of constants, each line is such a piece.
    """
    at = at_ours = at_theirs = 0
    for start, start_ours, start_theirs, length in _shared(base, ours, theirs):
        piece = (base[at:start], ours[at_ours:start_ours], theirs[at_theirs:start_theirs])
        yield from _resolved(*map(tuple, piece))
        if length:
            yield base[start : start + length]
        at, at_ours, at_theirs = start + length, start_ours + length, start_theirs + length


def _resolved(base: Lines, ours: Lines, theirs: Lines) -> Iterator[Lines | Conflict]:
    if ours == theirs or theirs == base:
        chosen: Lines | Conflict = ours
    elif ours == base:
        chosen = theirs
    elif len(base) > 1 and len(base) == len(ours) == len(theirs):
        for lines in zip(base, ours, theirs, strict=True):
            yield from _resolved(*((line,) for line in lines))
        return
    else:
        chosen = Conflict(0, tuple(base), tuple(ours), tuple(theirs))
    if chosen:
        yield chosen


def _shared(base: Lines, ours: Lines, theirs: Lines) -> Iterator[tuple[int, int, int, int]]:
    """Runs of lines that all share: (start in base, in ours, in theirs, length); the last is the end."""
    mine, others = _blocks(base, ours), _blocks(base, theirs)
    i = j = 0
    while i < len(mine) and j < len(others):
        (a, a_ours, a_length), (b, b_theirs, b_length) = mine[i], others[j]
        start, stop = max(a, b), min(a + a_length, b + b_length)
        if start < stop:
            yield start, a_ours + start - a, b_theirs + start - b, stop - start
        if a + a_length <= b + b_length:
            i += 1
        else:
            j += 1
    yield len(base), len(ours), len(theirs), 0


def _blocks(base: Lines, other: Lines) -> list[tuple[int, int, int]]:
    matcher = SequenceMatcher(None, base, other, autojunk=False)
    return [(block.a, block.b, block.size) for block in matcher.get_matching_blocks() if block.size]
