"""The verb of ablations."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kernelbraid.cli.agents import ExecutorName
from kernelbraid.cli.application import Device, Json, OperatorName, app, emit, out, say
from kernelbraid.report.failure import ExitCode


@app.command()
def ablate(
    operator: OperatorName,
    folder: Annotated[Path, typer.Option(help="Where the studies are made; run again to go on.")],
    repeats: Annotated[int, typer.Option(help="Studies of each arm, paired by seed.", min=2)] = 8,
    audits: Annotated[int | None, typer.Option(help="Candidates of each study.", min=1)] = None,
    minutes: Annotated[float | None, typer.Option(help="Time to search of each study.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="full, no-evidence, no-branching or best-of-n; may be repeated; default: all."),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(help="Implementation to start from; default: the shipped one.", metavar="FILE"),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Give every arm the proposals of this study; then arms are full, no-branching, best-of-n.",
            metavar="STUDY",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw objectives and seconds of the arms.", metavar="FILE.svg"),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Time this workload of the operator's grid study alone, or those of this phase; may be "
            "repeated; default: all.",
            metavar="NAME",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="pinned keeps the root's bits; mutual may agree on others.")
    ] = "mutual",
    device: Device = "cpu",
    executor: ExecutorName = "local",
    as_json: Json = False,
) -> None:
    """Search with parts taken away, equal budgets, paired seeds: what evidence and branching contribute."""
    from kernelbraid import ops
    from kernelbraid.report import arms, table
    from kernelbraid.report.progress import Watch
    from kernelbraid.search import ablation
    from kernelbraid.search.audits import runner
    from kernelbraid.search.loop import Progress
    from kernelbraid.search.proposers.arms import Arm
    from kernelbraid.search.study import some_workloads

    known = [each.value for each in Arm]
    for name in arm or ():
        if name not in known:
            raise ValueError(f"arm must be one of {', '.join(known)}, got {name!r}")
    every = tuple(each for each in Arm if replay is None or each is not Arm.NO_EVIDENCE)
    plan = ablation.Plan(
        operator=operator,
        folder=folder,
        repeats=repeats,
        arms=tuple(Arm(name) for name in arm) if arm else every,
        audits=audits,
        minutes=minutes,
        root=root,
        device=device,
        policy=policy,
        replay=replay,
        workloads=some_workloads(ops.get(operator, device), workload) if workload else None,
    )
    with Watch() as watch:

        def told(study: str, progress: Progress) -> None:
            watch(progress)

        document: dict[str, Any] = ablation.run(
            plan,
            progress=told,
            begins=lambda study, before: say(f"{study}, study {before + 1} of {len(plan.studies)}:"),
            run_job=runner(None, executor),
        )
    if plot is not None:
        arms.write(document, plot)
    if as_json:
        emit(document)
    else:
        table.ablation(out(), document)
    if not document["ended"]:
        say(f"interrupted; the same command goes on with {folder}")
        raise typer.Exit(int(ExitCode.INTERRUPTED))
