"""An ablation as one SVG file: lowest objective over audits, and seconds, arm beside arm with intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kernelbraid.audit.timing import student_quantile
from kernelbraid.ir.files import whole_file
from kernelbraid.report.charts import Axis, Frame, axis

CONFIDENCE = 0.95
"""Two-sided, by Student's t over the repeats, as in the ablation's document."""
COLOURS = ("#1b6ca8", "#b5541c", "#3c7d3c", "#7a4a9c")
PANEL = Frame(620, 300, left=64)
BARS = Frame(360, 300, left=64)
WIDTH, HEIGHT, FOOT = PANEL.width + BARS.width, PANEL.height, 24

Interval = tuple[float, float, float]
"""Mean, low and high."""


def write(document: Mapping[str, Any], path: Path) -> None:
    """Draw the document of an ablation, whole or not at all.

    Args:
        document: what `ablation.run` returned.
        path: the SVG file.

    Raises:
        ValueError: no arm has audited anything.
        RuntimeError: the file cannot be written.
    """
    text = drawn(document)
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def drawn(document: Mapping[str, Any]) -> str:
    """Return the SVG of an ablation's document."""
    curves = {name: curve for name, arm in document["arms"].items() if (curve := objective(arm))}
    if not curves:
        raise ValueError("no arm of the ablation has audited a candidate: there is nothing to draw")
    spent = {name: seconds(arm) for name, arm in document["arms"].items() if arm["repeats"]}
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(document["arms"])}
    every = [each for curve in curves.values() for point in curve for each in point]
    y = axis(every, PANEL.height - PANEL.bottom, PANEL.top)
    label = "lowest objective / root's, over audits"
    body = [*bands(curves, colours, y, label), *_bars(spent, colours), *legend(colours)]
    title = f"{document['operator']}: {document['repeats']} repeats an arm, means and 95% intervals"
    return picture(title, WIDTH, body)


def picture(title: str, width: int, body: Sequence[str]) -> str:
    """An SVG file of panels and their legend."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + FOOT}" role="img" '
        f'font-family="sans-serif" font-size="11"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n'
    )


def objective(arm: Mapping[str, Any]) -> list[Interval]:
    """After each audit, the lowest ratio to the root so far: geometric mean of repeats that got there."""
    curves = [each["trajectory"] for each in arm["repeats"] if each["trajectory"]]
    found = []
    for audits in range(max(map(len, curves), default=0)):
        logs = [math.log(curve[audits]) for curve in curves if audits < len(curve)]
        mean, low, high = interval(logs)
        found.append((math.exp(mean), math.exp(low), math.exp(high)))
    return found


def seconds(arm: Mapping[str, Any]) -> Interval:
    """Seconds that one study of an arm searched."""
    return interval([each["seconds"] for each in arm["repeats"]])


def interval(values: Sequence[float]) -> Interval:
    """Mean with its interval; of one value, no wider than it."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    quantile = student_quantile((1 + CONFIDENCE) / 2, len(values) - 1)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def bands(
    curves: Mapping[str, Sequence[Interval]], colours: Mapping[str, str], y: Axis, label: str
) -> list[str]:
    """Means as lines, intervals as bands, over 1, 2 and so on."""
    most = max(map(len, curves.values()))
    x = Axis(0.5, most + 0.5, PANEL.left, PANEL.width - PANEL.right)
    body = _frame(0, PANEL, y, label)
    step = max(1, most // 8)
    for audits in range(step, most + 1, step):
        body.append(_text(x.pixel(audits), PANEL.height - PANEL.bottom + 16, str(audits), "middle"))
    for name, curve in curves.items():
        places = [x.pixel(number) for number in range(1, len(curve) + 1)]
        upper = [f"{px},{y.pixel(high)}" for px, (_, _, high) in zip(places, curve, strict=True)]
        lower = [f"{px},{y.pixel(low)}" for px, (_, low, _) in zip(places, curve, strict=True)]
        line = [f"{px},{y.pixel(mean)}" for px, (mean, _, _) in zip(places, curve, strict=True)]
        band = " ".join([*upper, *reversed(lower)])
        body.append(f'<polygon points="{band}" fill="{colours[name]}" fill-opacity="0.15"/>')
        body.append(
            f'<polyline points="{" ".join(line)}" fill="none" stroke="{colours[name]}" stroke-width="2"/>'
        )
    return body


def _bars(spent: Mapping[str, Interval], colours: Mapping[str, str]) -> list[str]:
    top = max(high for _, _, high in spent.values()) or 1.0
    y = Axis(0.0, 1.05 * top, BARS.height - BARS.bottom, BARS.top)
    body = _frame(PANEL.width, BARS, y, "seconds of search, a study")
    room = (BARS.width - BARS.left - BARS.right) / len(spent)
    for number, (name, (mean, low, high)) in enumerate(spent.items()):
        middle = round(PANEL.width + BARS.left + room * (number + 0.5))
        at, base = y.pixel(mean), y.pixel(0.0)
        half = round(room * 0.3)
        body.append(
            f'<rect x="{middle - half}" y="{at}" width="{2 * half}" height="{base - at}" '
            f'fill="{colours[name]}" fill-opacity="0.7"/>'
        )
        ends = y.pixel(max(low, 0.0)), y.pixel(high)
        body.append(f'<path d="M{middle},{ends[0]}V{ends[1]}" stroke="black" fill="none"/>')
    return body


def _frame(left: int, frame: Frame, y: Axis, label: str) -> list[str]:
    body = [_text(left + frame.left, frame.height - 2, label, "start")]
    for tick in y.ticks():
        at = y.pixel(tick)
        line = f"M{left + frame.left},{at}H{left + frame.width - frame.right}"
        body.append(f'<path d="{line}" stroke="#ddd" fill="none"/>')
        body.append(_text(left + frame.left - 6, at + 4, f"{tick:g}", "end"))
    return body


def legend(colours: Mapping[str, str]) -> list[str]:
    """Names of arms below the panels."""
    body = []
    for number, (name, colour) in enumerate(colours.items()):
        at = PANEL.left + 150 * number
        body.append(f'<rect x="{at}" y="{HEIGHT + 6}" width="12" height="12" fill="{colour}"/>')
        body.append(_text(at + 18, HEIGHT + 16, name, "start"))
    return body


def _text(x: int, y: int, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
