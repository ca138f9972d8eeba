"""Tables for people: ruled on a terminal, aligned plain text anywhere else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | float | int | None


@dataclass(slots=True)
class Grid:
    """A titled table; numbers are right-aligned, None shows as a dash."""

    title: str
    headers: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Append one row, one cell a header."""
        assert len(cells) == len(self.headers), f"{len(cells)} cells for {len(self.headers)} headers"
        self.rows.append(cells)

    def show(self, console: Console) -> None:
        """Print to `console`, ruled if it is a terminal."""
        if console.is_terminal:
            console.print(self._ruled())
        else:
            for line in self.lines():
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    def lines(self) -> Iterator[str]:
        """The plain form: one line a row, columns separated by two spaces."""
        texts = [list(self.headers), *([text(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in texts) for i in range(len(self.headers))]
        right = self._right()
        if self.title:
            yield self.title
        for row in texts if any(self.headers) else texts[1:]:
            cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
            yield ("  " + "  ".join(cells)).rstrip()

    def _right(self) -> list[bool]:
        return [
            bool(self.rows) and all(not isinstance(row[i], str) for row in self.rows)
            for i in range(len(self.headers))
        ]

    def _ruled(self) -> Table:
        table = Table(
            title=self.title or None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            show_header=any(self.headers),
        )
        for header, right in zip(self.headers, self._right(), strict=True):
            table.add_column(header, justify="right" if right else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(text(cell)) for cell in row))
        return table


def text(cell: Cell) -> str:
    """Format one cell: four significant digits for numbers, thousands separated in whole ones."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return cell
