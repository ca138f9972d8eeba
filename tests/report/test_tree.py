"""The drawing of the descent: no two nodes share a place, the way to the incumbent is the first row."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kernelbraid.report.charts import axis, graph
from kernelbraid.report.tree import layout


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int | None], int]:
    count = draw(st.integers(1, 60))
    parents: list[int | None] = [None]
    parents += [draw(st.integers(0, node - 1)) for node in range(1, count)]
    return parents, draw(st.integers(0, count - 1))


@given(trees())
def test_every_node_has_a_place_of_its_own(tree: tuple[list[int | None], int]) -> None:
    parents, incumbent = tree
    placed = layout(parents, incumbent)
    places = list(zip(placed.x, placed.y, strict=True))
    assert len(set(places)) == len(parents)
    assert all(0 <= x < placed.width and 0 <= y < placed.height for x, y in places)
    line = [incumbent]
    while (parent := parents[line[-1]]) is not None:
        line.append(parent)
    assert all(placed.y[node] == 0 and placed.branch[node] is None for node in line)
    assert all(placed.x[a] > placed.x[b] for a, b in pairwise(line))
    for node, parent in enumerate(parents):
        if parent is not None and placed.hangs[node]:
            assert placed.y[node] > placed.y[parent]


def test_many_children_make_a_block_and_long_chains_a_row() -> None:
    wide = layout([None] + [0] * 2000, 0)
    assert wide.width < 80 and wide.height < 80
    chain = layout([None, *range(4999)], 4999)
    assert chain.height == 1 and len(set(chain.x)) == 5000


def test_lines_lead_to_every_parent() -> None:
    parents: list[list[int]] = [[], [0], [0], [1, 2]]
    drawn = graph(layout([None, 0, 0, 1], 3), parents, ["root", "frontier", "rejected", "incumbent"])
    assert drawn.count('class="merge" d="M') == 1
    assert drawn.count('class="node') == 4


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5))
def test_axes_hold_their_values(values: list[float]) -> None:
    found = axis(values, 10, 200)
    assert all(10 <= found.pixel(value) <= 200 for value in values)
    assert all(10 <= found.pixel(tick) <= 200 for tick in found.ticks())
    assert len(found.ticks()) <= 13
