"""Rewards of training runs as one SVG file: arm beside arm over rollouts, means of seeds with intervals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelbraid.ir.files import whole_file
from kernelbraid.report.arms import COLOURS, PANEL, bands, interval, legend, picture
from kernelbraid.report.charts import Axis


def write(document: Mapping[str, Any], path: Path) -> None:
    """Draw the document of `rl.curves`, whole or not at all.

    Args:
        document: holds `rewards`: arm -> seed -> one reward a rollout, null where none was known.
        path: the SVG file.

    Raises:
        ValueError: no run has a reward.
        RuntimeError: the file cannot be written.
    """
    text = drawn(document)
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def drawn(document: Mapping[str, Any]) -> str:
    """Return the SVG of rewards."""
    curves = {}
    for arm, seeds in document["rewards"].items():
        rollouts = min((len(each) for each in seeds.values()), default=0)
        known = [[each[i] for each in seeds.values() if each[i] is not None] for i in range(rollouts)]
        if rollouts and all(known):
            curves[arm] = [interval(each) for each in known]
    if not curves:
        raise ValueError("no run has a reward of every rollout: there is nothing to draw")
    every = [each for curve in curves.values() for point in curve for each in point]
    margin = 0.05 * (max(every) - min(every)) or 0.01
    y = Axis(min(every) - margin, max(every) + margin, PANEL.height - PANEL.bottom, PANEL.top)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(curves)}
    seeds = max(len(each) for each in document["rewards"].values())
    title = f"reward over rollouts: {seeds} seeds an arm, means and 95% intervals"
    return picture(
        title, PANEL.width, [*bands(curves, colours, y, "reward, over rollouts"), *legend(colours)]
    )
