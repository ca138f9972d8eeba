"""Verbs of a proposer outside: `next`, `source`, `evidence`, `merge`, `submit`, `decide`."""

from pathlib import Path
from typing import Annotated

import typer

from kernelbraid.cli.agents import AuditCommandTemplate, ExecutorName
from kernelbraid.cli.application import Implementation, StudyFolder, app, emit, failed


@app.command("next")
def next_(
    study: StudyFolder,
    most: Annotated[int, typer.Option(help="Opportunities, parents and failures listed.", min=1)] = 10,
) -> None:
    """JSON: what is needed to write the next candidate: task, parents, opportunities, failures."""
    from kernelbraid.search.proposers import external

    emit(external.next_(study, most))


@app.command()
def source(study: StudyFolder, impl: Implementation) -> None:
    """JSON: an implementation's text, knobs and descent."""
    from kernelbraid.search.proposers import external

    emit(external.source(study, impl))


@app.command()
def evidence(study: StudyFolder, impl: Implementation) -> None:
    """JSON: everything that audits found about an implementation."""
    from kernelbraid.search.proposers import external

    emit(external.evidence(study, impl))


@app.command()
def merge(
    study: StudyFolder,
    ours: Implementation,
    theirs: Implementation,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the merged source to FILE.", metavar="FILE")
    ] = None,
) -> None:
    """JSON: two implementations composed over their common ancestor, or the lines that conflict."""
    from kernelbraid.search.proposers import external

    found = external.merge(study, ours, theirs)
    if output is not None and found["text"] is not None:
        output.write_text(found["text"], encoding="utf-8")
    emit(found)
    if found["conflicts"]:
        failed()


@app.command()
def submit(
    study: StudyFolder,
    file: Annotated[Path, typer.Argument(help="The complete source of the candidate.", metavar="FILE")],
    parent: Annotated[
        list[str], typer.Option(help="A verified implementation it was made from; may be repeated.")
    ],
    hypothesis: Annotated[str, typer.Option(help="Why it should be faster.")],
    function: Annotated[
        list[str] | None, typer.Option(help="A function that was changed; may be repeated.")
    ] = None,
    regime: Annotated[list[str] | None, typer.Option(help="A regime it serves; may be repeated.")] = None,
    expect: Annotated[str, typer.Option(help="What the audit should show.")] = "",
    risk: Annotated[
        list[str] | None, typer.Option(help="Id of a requirement it could break; may be repeated.")
    ] = None,
    falsified_by: Annotated[str, typer.Option(help="What would show the hypothesis wrong.")] = "",
    opportunity: Annotated[int | None, typer.Option(help="Id of the opportunity it takes.")] = None,
    by: Annotated[str, typer.Option(help="Who submits.")] = "external",
    audit: Annotated[bool, typer.Option("--audit", help="Audit it here and now.")] = False,
    audit_command: AuditCommandTemplate = None,
    executor: ExecutorName = "local",
) -> None:
    """JSON: record a candidate and request its audit; with --audit, run it and decide on promotion."""
    from kernelbraid.report.progress import Watch
    from kernelbraid.search.audits import runner
    from kernelbraid.search.proposers import external

    with Watch() as watch:
        document = external.submit(
            study,
            file,
            parents=parent,
            hypothesis=hypothesis,
            functions=function or (),
            regimes=regime or (),
            expected_effect=expect,
            requirements_at_risk=risk or (),
            falsified_by=falsified_by,
            opportunity=opportunity,
            by=by,
            audit=audit,
            progress=watch,
            run_job=runner(audit_command, executor),
        )
    emit(document)


@app.command()
def decide(
    study: StudyFolder,
    impl: Implementation,
    decision: Annotated[
        str, typer.Argument(help="continue (build on it), merge (join it), archive (keep it) or abandon.")
    ],
    reason: Annotated[str, typer.Option(help="Why.")],
    by: Annotated[str, typer.Option(help="Who decides.")] = "external",
) -> None:
    """JSON: record what becomes of an implementation."""
    from kernelbraid.search.proposers import external

    emit(external.decide(study, impl, decision, reason=reason, by=by))
