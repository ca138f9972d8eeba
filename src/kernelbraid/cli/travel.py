"""Audits that travel: the verbs of `kernelbraid audit`."""

from pathlib import Path
from typing import Annotated

import typer

from kernelbraid.cli.application import Json, StudyFolder, done, travelling


@travelling.command("export")
def audit_export(
    study: StudyFolder,
    to: Annotated[Path, typer.Option("--output", "-o", help="Job file to write.", metavar="FILE")],
    most: Annotated[int | None, typer.Option(help="Audits to take; default: all pending.", min=1)] = None,
    propose: Annotated[
        bool, typer.Option("--propose", help="Go on as `search` would: promote, confirm, propose candidates.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a study's pending audits into one job file."""
    from kernelbraid.report.progress import Watch
    from kernelbraid.search import travel
    from kernelbraid.search.study import Study

    with Study.open(study) as opened, Watch() as watch:
        done(as_json, travel.export(opened, to, most, propose=propose, progress=watch))


@travelling.command("run")
def audit_run(
    file: Annotated[Path, typer.Argument(help="A job file.", metavar="FILE")],
    to: Annotated[
        Path, typer.Option("--output", "-o", help="Results file; one that is there goes on.", metavar="FILE")
    ],
    minutes: Annotated[float | None, typer.Option(help="Time limit.", min=0)] = None,
    as_json: Json = False,
) -> None:
    """Run a job file where there is neither study nor network; run it again to go on."""
    from kernelbraid.audit import jobs
    from kernelbraid.report.progress import Watch
    from kernelbraid.search.executors import QUEUED
    from kernelbraid.search.executors.local import LocalExecutor

    job, waited = jobs.read_job(file), 0.0
    with Watch() as watch:

        def told(event: jobs.Event) -> None:
            nonlocal waited
            waited += event.data["seconds"] if event.stage == QUEUED else 0.0
            watch.event(event)

        LocalExecutor()(job, to, minutes=minutes, progress=told)
    answered = len(jobs.read_results(to).evidence)
    done(
        as_json,
        {"results": str(to), "answered": answered, "asked": len(job.candidates), "queue_seconds": waited},
    )


@travelling.command("import")
def audit_import(
    study: StudyFolder,
    file: Annotated[Path, typer.Argument(help="A results file.", metavar="FILE")],
    as_json: Json = False,
) -> None:
    """Record the results of a job in its study, each once."""
    from kernelbraid.search import audits
    from kernelbraid.search.study import Study

    with Study.open(study) as opened:
        found = audits.take_in(opened, file)
    done(as_json, {"recorded": len(found.recorded), "repeated": found.repeated})
