"""Where each implementation stands in the picture of a study's descent.

The child that leads to the incumbent, or else the one with most descendants, goes on to the right in its
parent's row. All others hang below the parent, packed on shelves of about equal width and height, whole
subtrees first: a root with a thousand rejected children is a block of dots, and random trees stay compact.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ASPECT = 1.5
"""Width over height that a block of subtrees aims at."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns and rows, and who left the line to the incumbent where."""

    x: list[int]
    y: list[int]
    hangs: list[bool]
    """Whether a node hangs below its parent, on a shelf, and does not go on in its row."""
    branch: list[int | None]
    """The first node after leaving the line from root to incumbent; None on that line."""
    width: int
    height: int


@dataclass(slots=True)
class _Box:
    """A subtree with its own node at column 0, row 0."""

    width: int = 1
    height: int = 1
    onward: tuple[int, int] | None = None
    """The child in the same row, and its column."""
    hanging: list[tuple[int, int, int]] = field(default_factory=list)
    """Child, column, row."""


def layout(parents: Sequence[int | None], incumbent: int) -> Layout:
    """Place the nodes of a tree.

    Args:
        parents: index of each node's first parent, which comes before it; None for the root.
        incumbent: index of the node that the uppermost row leads to.
    """
    count = len(parents)
    children: list[list[int]] = [[] for _ in range(count)]
    for node, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(node)
    sizes = _sizes(parents)
    line = _line(parents, incumbent)
    boxes = [_Box() for _ in range(count)]
    for node in reversed(range(count)):  # children come after their parents
        ahead = max(
            (child for child in children[node] if child in line or children[child]),
            key=lambda child: (child in line, sizes[child], -child),
            default=None,
        )
        boxes[node] = _box(boxes, ahead, [child for child in children[node] if child != ahead])
    x, y, hangs = [0] * count, [0] * count, [False] * count
    branch: list[int | None] = [None] * count
    for node, parent in enumerate(parents):
        box = boxes[node]
        if box.onward is not None:
            child, column = box.onward
            x[child], y[child] = x[node] + column, y[node]
        for child, column, row in box.hanging:
            x[child], y[child], hangs[child] = x[node] + column, y[node] + row, True
        if node not in line and parent is not None:
            branch[node] = node if parent in line else branch[parent]
    return Layout(x, y, hangs, branch, max(x) + 1, max(y) + 1)


def _sizes(parents: Sequence[int | None]) -> list[int]:
    sizes = [1] * len(parents)
    for node in reversed(range(len(parents))):
        parent = parents[node]
        if parent is not None:
            sizes[parent] += sizes[node]
    return sizes


def _line(parents: Sequence[int | None], incumbent: int) -> set[int]:
    line = {incumbent}
    node = parents[incumbent]
    while node is not None:
        line.add(node)
        node = parents[node]
    return line


def _box(boxes: Sequence[_Box], ahead: int | None, others: Iterable[int]) -> _Box:
    ordered = sorted(others, key=lambda child: (-boxes[child].height, -boxes[child].width, child))
    box = _Box()
    if ordered:
        _shelve(box, boxes, ordered)
    if ahead is not None:
        box.onward = ahead, box.width + 1
        box.width += 1 + boxes[ahead].width
        box.height = max(box.height, boxes[ahead].height)
    return box


def _shelve(box: _Box, boxes: Sequence[_Box], ordered: Sequence[int]) -> None:
    """Hang subtrees below a node, the highest first; a free column parts subtrees from what follows."""
    wide = [boxes[child].width + (boxes[child].width > 1) for child in ordered]
    area = sum(width * boxes[child].height for width, child in zip(wide, ordered, strict=True))
    indent = int(boxes[ordered[0]].height > 1 or max(wide) > 1)
    most = max(math.isqrt(math.ceil(ASPECT * area)), *wide)
    column, row, shelf = indent, 1, boxes[ordered[0]].height
    for width, child in zip(wide, ordered, strict=True):
        if column + width > indent + most:
            column, row, shelf = indent, row + shelf, boxes[child].height
        box.hanging.append((child, column, row))
        column += width
        box.width = max(box.width, column)
    box.height = row + shelf
