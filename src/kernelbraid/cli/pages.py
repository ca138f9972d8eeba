"""Verbs that write something to look at."""

from pathlib import Path
from typing import Annotated

import typer

from kernelbraid.cli.application import Json, StudyFolder, app, done


@app.command()
def report(
    study: StudyFolder,
    to: Annotated[Path, typer.Option("--output", "-o", help="Page to write.", metavar="FILE")] = Path(
        "report.html"
    ),
    as_json: Json = False,
) -> None:
    """Write a study as one HTML page that loads nothing else: descent, objective, latencies, spending."""
    import gc

    from kernelbraid.ir.store import Store
    from kernelbraid.report import render

    gc.disable()  # this process ends with the page, and looking for garbage would take a fifth of its time
    with Store.open(study) as store:
        done(as_json, render.write(store, to))
