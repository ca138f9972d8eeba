"""Reads the knobs of many sources that differ in knobs alone, and parses one of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernelbraid.contract import Contract, KnobValue, Source
from kernelbraid.search.proposers import edits
from kernelbraid.search.proposers.edits import DeclaredKnob


@dataclass(frozen=True, slots=True)
class Template:
    """A source without the literals of its knobs."""

    pieces: tuple[bytes, ...]
    """What stands before, between and after the literals."""
    knobs: tuple[DeclaredKnob, ...]
    """As declared, with the values of the source that was parsed."""
    order: tuple[int, ...]
    """Index of the knob at each literal."""
    skeleton: str

    @classmethod
    def of(cls, source: Source, contract: Contract) -> "Template":
        """Parse a source; raises ValueError where `edits.declared` does."""
        knobs = edits.declared(source, contract)
        data = source.text.encode()
        order = sorted(range(len(knobs)), key=lambda each: knobs[each].start)
        ends = [0, *(knobs[each].stop for each in order)]
        starts = [*(knobs[each].start for each in order), len(data)]
        pieces = tuple(data[end:start] for end, start in zip(ends, starts, strict=True))
        return cls(pieces, knobs, tuple(order), edits.skeleton(source, contract))

    def read(self, text: str) -> tuple[DeclaredKnob, ...] | None:
        """Return the knobs of another source; None unless it is this one but for literals of lawful values.

        A literal in the place of another one changes nothing else of what is parsed, so nothing needs to be.
        """
        data = text.encode()
        if not data.startswith(self.pieces[0]):
            return None
        at = len(self.pieces[0])
        knobs = list(self.knobs)
        for index, piece in zip(self.order, self.pieces[1:], strict=True):
            found = _literal(data, at, piece, knobs[index].choices)
            if found is None:
                return None
            value, stop = found
            knobs[index] = replace(knobs[index], value=value, start=at, stop=stop)
            at = stop + len(piece)
        return tuple(knobs) if at == len(data) else None


class Templates:
    """The templates seen so far."""

    def __init__(self) -> None:
        self._known: list[Template] = []

    def read(self, source: Source, contract: Contract) -> tuple[tuple[DeclaredKnob, ...], str]:
        """Return a source's knobs and its skeleton, as `edits.declared` and `edits.skeleton` do."""
        for template in self._known:
            knobs = template.read(source.text)
            if knobs is not None:
                return knobs, template.skeleton
        made = Template.of(source, contract)
        self._known.insert(0, made)
        return made.knobs, made.skeleton


def _literal(
    data: bytes, at: int, piece: bytes, choices: Sequence[KnobValue]
) -> tuple[KnobValue, int] | None:
    """The choice that is written at a place, directly before `piece`, and where it ends."""
    for choice in choices:
        written = (f'"{choice}"', f"'{choice}'") if isinstance(choice, str) else (str(choice),)
        for each in written:
            stop = at + len(each.encode())
            if data[at:stop] == each.encode() and data.startswith(piece, stop):
                return choice, stop
    return None
