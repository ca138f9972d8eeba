"""Verbs about the machine and the operators: what is there, proof, measurement."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kernelbraid.cli.application import Device, Json, OperatorName, app, emit, failed, out, say
from kernelbraid.report.failure import ExitCode


@app.command()
def env(device: Device = "cpu", as_json: Json = False) -> None:
    """Describe this machine as audits record it, and which implementations it uses."""
    from kernelbraid.report import listing, table

    document = listing.environment(device)
    if as_json:
        emit(document)
    else:
        table.environment(out(), document)


@app.command("ops")
def ops_(as_json: Json = False) -> None:
    """List the operators: contract, backends, relations, certificates of this machine."""
    from kernelbraid.report import listing, table

    document = listing.operators()
    if as_json:
        emit(document)
    else:
        table.operators(out(), document)


@app.command()
def verify(
    operators: Annotated[
        list[str] | None,
        typer.Argument(help="Operators, default: all; or `layer`, or `model NAME`.", metavar="[OPERATOR]..."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="A model's folder or GGUF file, for `model`.")] = None,
    level: Annotated[str, typer.Option(help="screen draws less than full, leaves huge scopes out.")] = "full",
    case: Annotated[str | None, typer.Option(help="Repeat this one case alone.", metavar="ID")] = None,
    local: Annotated[bool, typer.Option("--local", help="Certify this machine if everything holds.")] = False,
    evidence: Annotated[
        bool,
        typer.Option("--evidence", help="Check committed certificates and benchmarks; nothing is run."),
    ] = False,
    folder: Annotated[Path | None, typer.Option(help="Where committed evidence lives: ./evidence.")] = None,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Only run small programs under CUDA's compute-sanitizer.")
    ] = False,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Check every relation and accuracy bound of the implementation in use, all bits as integers."""
    from kernelbraid.report import across, listing, table
    from kernelbraid.report.progress import Watch

    if operators and operators[0] in across.KINDS:
        document = across.across(operators, device, weights, say)
        held, show_ = document["held"], across.show
    elif evidence:
        document = listing.committed(folder)
        held = not document["mismatched"]
        show_ = table.committed
    elif sanitize:
        document = listing.sanitized(operators or [], device)
        held, show_ = document["held"], table.sanitized
    elif case is not None:
        document = listing.one_case(case, device)
        held, show_ = document["held"], table.one_case
    else:
        with Watch() as watch:
            document = listing.verified(operators or [], device, level, local, watch.checking)
        held, show_ = document["held"], table.verified
    emit(document) if as_json else show_(out(), document)
    if not held:
        failed()


@app.command()
def bench(
    operator: OperatorName,
    grid: Annotated[str, typer.Option(help="Name of one of the operator's grids, or all.")] = "all",
    device: Device = "cpu",
    longest: Annotated[
        float, typer.Option(help="Leave out workloads whose one call must take longer: seconds.")
    ] = 2.0,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Also write FOLDER/<architecture>/<operator>.bench.json, row by row.", metavar="FOLDER"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows that FOLDER has of the grid; measure the others.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the shipped implementation beside its peers, warm and cold, in one run."""
    from kernelbraid import ops
    from kernelbraid.audit import bench as benchmark
    from kernelbraid.report import table

    if resume and write is None:
        raise typer.BadParameter("--resume needs --write FOLDER, where the rows are")
    document = benchmark.bench(
        ops.get(operator, device), grid, longest=longest, progress=say, folder=write, resume=resume
    )
    if write is not None:
        say(f"wrote {benchmark.place(document, write)}")
    if as_json:
        emit(document)
    else:
        table.bench(out(), document)
    if not all(row["verified"] for row in document["rows"]):
        failed()


@app.command()
def selftest(
    operator: Annotated[str, typer.Argument(help="What the candidates implement.")] = "attention",
    root: Annotated[
        Path | None,
        typer.Option(help="The honest implementation; default: the shipped one.", metavar="FILE"),
    ] = None,
    trials: Annotated[int, typer.Option("--aa", help="Trials of identical source.", min=0)] = 10,
    only: Annotated[
        list[str] | None, typer.Option("--fixture", help="Audit this fixture alone; may be repeated.")
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Let hostile, identical and swapped candidates try to be promoted; run again to go on after Ctrl-C."""
    from kernelbraid import ops
    from kernelbraid.audit import fixtures
    from kernelbraid.audit import selftest as test
    from kernelbraid.report import table
    from kernelbraid.search.study import read_source

    try:
        document = test.selftest(
            ops.get(operator, device),
            _promotable,
            honest=read_source(root) if root else None,
            trials=trials,
            fixtures=fixtures.named(only) if only else fixtures.for_device(device),
            progress=say,
        )
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    if as_json:
        emit(document)
    else:
        table.selftest(out(), document)
    if not test.passed(document):
        failed()


def _promotable(found: Any) -> bool:
    """Whether the promotion rule holds on a screen's evidence, the root being the incumbent."""
    from kernelbraid.search.promote import Outcome, decide

    bits = {"root_bits": found.bits_id, "incumbent_bits": found.bits_id}
    return decide(found, incumbent=found.incumbent, **bits).outcome is not Outcome.REFUSED
