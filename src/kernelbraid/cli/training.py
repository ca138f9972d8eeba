"""The verbs of reinforcement learning: a run, and a grid of runs beside the vendor's kernels."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from kernelbraid.cli.application import Json, app, emit, failed, out, say


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A configuration in YAML.", metavar="CONFIG")],
    rollouts: Annotated[
        int | None, typer.Option(help="Train to this many; default: the configuration's.", min=1)
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest checkpoint, or refuse a folder that has one.")
    ] = True,
    record_workloads: Annotated[
        Path | None,
        typer.Option(help="Write the run's calls, for `search --workloads`.", metavar="FILE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model with GRPO or PPO; run again to go on after an interruption."""
    from kernelbraid.report import table
    from kernelbraid.rl.config import read_config
    from kernelbraid.rl.progress import Watch, flat
    from kernelbraid.rl.reuse import ReuseError
    from kernelbraid.rl.spot_check import MismatchError
    from kernelbraid.rl.trainer import train as run

    try:
        read = read_config(config)
    except ValueError as error:
        *lines, last = str(error).splitlines()  # the application prints one line, and there may be many
        for line in lines:
            say(line)
        raise ValueError(last.strip()) from None
    first = os.environ.get("RANK", "0") == "0"  # torchrun starts several, and one talks
    watch = Watch(rollouts or read.rollouts) if first and (not as_json or sys.stderr.isatty()) else None
    try:
        with watch or nullcontext():
            document = run(
                read,
                folder=config.parent,
                resume=resume,
                rollouts=rollouts,
                told=watch,
                workloads=record_workloads,
            )
    except (MismatchError, ReuseError) as error:
        say(f"kernelbraid: {error}")
        failed()
    if not first:
        return
    if as_json:
        emit(document)
    else:
        rows = {name: value for name, value in document.items() if not isinstance(value, dict)}
        table.facts(out(), "", rows | flat(document | dict.fromkeys(rows)))


@app.command()
def compare(
    grid: Annotated[Path, typer.Argument(help="A grid of training steps in YAML.", metavar="GRID")],
    write: Annotated[
        Path,
        typer.Option(
            help="Write FOLDER/<architecture>/train.bench.json; what it has is not measured again.",
            metavar="FOLDER",
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH of a model that the grid names by `path`; may be repeated."),
    ] = None,
    row: Annotated[list[str] | None, typer.Option(help="Measure this row alone; may be repeated.")] = None,
    steps: Annotated[int | None, typer.Option(help="Timed rollouts of each arm.", min=1)] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure arms again that failed.")] = False,
    as_json: Json = False,
) -> None:
    """Measure training steps on unified kernels beside the vendor's; run again to go on."""
    from kernelbraid.report import table
    from kernelbraid.rl import comparison

    pairs = [each.partition("=") for each in model or []]
    wrong = [name for name, _, path in pairs if not name or not path]
    if wrong:
        raise typer.BadParameter("--model needs NAME=PATH")
    document = comparison.compare(
        comparison.read_grid(grid),
        grid.parent,
        write=write,
        models={name: path for name, _, path in pairs},
        only=row or (),
        steps=steps,
        retry=retry,
        progress=say,
    )
    emit(document) if as_json else table.comparison(out(), document)
    if any(each["unequal"] or each["curves_equal"] is False for each in document["rows"]):
        failed()
