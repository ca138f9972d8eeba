"""Plots as inline SVG, drawn from numbers: no scripts, colours from the page's style sheet."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kernelbraid.report.tree import Layout

Point = tuple[float, float]

LOG_FROM = 3.0
"""Where largest / smallest exceeds this, an axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Size of a plot and its margins, pixels."""

    width: int
    height: int
    left: int = 52
    right: int = 12
    top: int = 10
    bottom: int = 34


WIDE = Frame(900, 280)
SMALL = Frame(430, 180)


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from low to high onto pixels from start to end."""

    low: float
    high: float
    start: int
    end: int
    log: bool = False

    def pixel(self, value: float) -> int:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        place = math.log(value) if self.log else value
        return round(self.start + (place - low) / (high - low) * (self.end - self.start))

    def ticks(self) -> list[float]:
        if not self.log:
            return _linear_ticks(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [m * 10.0**k for k in powers for m in (1, 2, 5)]
        inside = [each for each in found if self.low <= each <= self.high]
        return inside if len(inside) <= 8 else [each for each in inside if f"{each:e}"[0] == "1"]


def axis(values: Sequence[float], start: int, end: int) -> Axis:
    """An axis that holds all values, which are above 0; logarithmic where they differ much."""
    low, high = min(values), max(values)
    if high / low > LOG_FROM:
        return Axis(low / 1.08, high * 1.08, start, end, log=True)
    margin = 0.06 * (high - low) or 0.05 * high
    return Axis(low - margin, high + margin, start, end)


def _linear_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(k * step, 12) for k in range(first, last + 1)]


def scatter(
    frame: Frame,
    title: str,
    x_label: str,
    points: Mapping[str, Sequence[Point]],
    steps: Sequence[Point],
    limit: float | None = None,
) -> tuple[str, dict[str, list[tuple[int, int]]]]:
    """Points by class over x, a line in steps, and perhaps a limit.

    Args:
        frame: its size.
        title: what it shows, for those who do not see it.
        x_label: what x counts.
        points: class of the style sheet -> points with y above 0.
        steps: (x, y) from which the value y holds; drawn on to the last x.
        limit: a y that must not be exceeded.

    Returns:
        The SVG, and the pixel of every point.
    """
    everything = [point for group in points.values() for point in group] + list(steps)
    ys = [y for _, y in everything] + ([limit] if limit is not None else [])
    x = Axis(0.0, max(1.0, *(x for x, _ in everything)), frame.left, frame.width - frame.right)
    y = axis(ys, frame.height - frame.bottom, frame.top)
    pixels = {name: [(x.pixel(a), y.pixel(b)) for a, b in group] for name, group in points.items()}
    body = [_grid(frame, x, y, x_label)]
    if limit is not None:
        body.append(f'<path class="limit" d="M{frame.left} {y.pixel(limit)}H{frame.width - frame.right}"/>')
    for name, group in pixels.items():
        body.append(f'<path class="point {name}" d="{_dots(group)}"/>')
    if steps:
        body.append(f'<path class="steps" d="{_steps(steps, x, y)}"/>')
    return _svg(frame, title, body), pixels


def spans(title: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """One line a workload on a common axis of milliseconds: the bound, the best and the root.

    Args:
        title: what it shows, for those who do not see it.
        rows: name, bound, best, root; all above 0.
    """
    frame = Frame(900, 30 + 34 * len(rows) + 14, left=12, top=30)
    x = axis([value for _, *values in rows for value in values], frame.left, frame.width - frame.right)
    lines = [f'<g class="axis">{_x_ticks(frame, x)}</g>']
    for row, (name, *values) in enumerate(rows):
        at = frame.top + 34 * row + 16
        bound, best, root = (x.pixel(value) for value in values)
        lines.append(f'<text class="name" x="{frame.left}" y="{at - 8}">{escape(name)}</text>')
        lines.append(f'<path class="span" d="M{bound} {at}H{max(best, root)}"/>')
        lines.append(f'<path class="bound" d="M{bound} {at - 6}v12"/>')
        lines.append(f'<path class="point root" d="M{root} {at}h0"/>')
        lines.append(f'<path class="point incumbent" d="M{best} {at}h0"/>')
    return _svg(frame, title, lines)


def graph(layout: Layout, parents: Sequence[Sequence[int]], groups: Sequence[str]) -> str:
    """The derivation graph: one path a kind of line and a state, so that thousands of nodes stay light.

    Args:
        layout: where the nodes stand.
        parents: indices of each node's parents, the first one being its place in the tree.
        groups: class of each node.
    """
    x, y = layout.x, layout.y
    line: list[str] = []
    edges: list[str] = []
    shelves: dict[tuple[int, int], int] = {}
    merges: list[str] = []
    lowest = list(y)
    for node, above in enumerate(parents):
        for place, parent in enumerate(above):
            if place > 0:
                merges.append(f"M{x[parent]} {y[parent]}L{x[node]} {y[node]}")
            elif layout.hangs[node]:
                lowest[parent] = max(lowest[parent], y[node])
                shelves[parent, y[node]] = max(shelves.get((parent, y[node]), 0), x[node])
                edges.append(f"M{x[node]} {y[node]}v-.5")
            else:
                (line if layout.branch[node] is None else edges).append(f"M{x[parent]} {y[parent]}H{x[node]}")
    edges += [f"M{x[parent] - 0.5:g} {row - 0.5:g}H{right}" for (parent, row), right in shelves.items()]
    stems = [f"M{x[n]} {y[n]}l-.5 .5V{lowest[n] - 0.5:g}" for n in range(len(x)) if lowest[n] > y[n]]
    drawn: dict[str, list[str]] = {}
    for node, group in enumerate(groups):
        drawn.setdefault(group, []).append(_mark(group, x[node], y[node]))
    wide, high = max(layout.width + 2, 36), max(layout.height + 2, 8)
    left, top = -1 - (wide - layout.width - 2) / 2, -1 - (high - layout.height - 2) / 2
    paths = [
        f'<path class="edge" d="{"".join(edges + stems)}"/>',
        f'<path class="merge" d="{"".join(merges)}"/>',
        f'<path class="line" d="{"".join(line)}"/>',
        *(f'<path class="node {group}" d="{"".join(marks)}"/>' for group, marks in sorted(drawn.items())),
    ]
    box = f"{left:g} {top:g} {wide} {high}"
    return f'<svg id="graph" viewBox="{box}" role="img" aria-label="Derivation graph">{"".join(paths)}</svg>'


def _mark(group: str, x: int, y: int) -> str:
    if group == "rejected":
        return f"M{x - 0.25:g} {y - 0.25:g}l.5 .5m0-.5l-.5 .5"
    if group == "pending":
        return f"M{x} {y - 0.3:g}l.3 .3-.3 .3-.3-.3z"
    return f"M{x} {y}h0"


def _dots(pixels: Sequence[tuple[int, int]]) -> str:
    return "".join(f"M{x} {y}h0" for x, y in sorted(set(pixels)))


def _steps(steps: Sequence[Point], x: Axis, y: Axis) -> str:
    (first_x, first_y), *others = steps
    path = f"M{x.pixel(first_x)} {y.pixel(first_y)}"
    path += "".join(f"H{x.pixel(a)}V{y.pixel(b)}" for a, b in others)
    return f"{path}H{x.end}"


def _grid(frame: Frame, x: Axis, y: Axis, x_label: str) -> str:
    right = frame.width - frame.right
    rules = "".join(f"M{frame.left} {y.pixel(tick)}H{right}" for tick in y.ticks())
    labels = "".join(
        f'<text x="{frame.left - 6}" y="{y.pixel(tick) + 4}" text-anchor="end">{_number(tick)}</text>'
        for tick in y.ticks()
    )
    name = f'<text x="{right}" y="{frame.height - 4}" text-anchor="end">{escape(x_label)}</text>'
    return f'<path class="rule" d="{rules}"/><g class="axis">{labels}{_x_ticks(frame, x)}{name}</g>'


def _x_ticks(frame: Frame, x: Axis) -> str:
    at = frame.height - frame.bottom + 15
    return "".join(
        f'<text x="{x.pixel(tick)}" y="{at}" text-anchor="middle">{_number(tick)}</text>'
        for tick in x.ticks()
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _svg(frame: Frame, title: str, body: Sequence[str]) -> str:
    box = f"0 0 {frame.width} {frame.height}"
    return (
        f'<svg class="plot" viewBox="{box}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )
