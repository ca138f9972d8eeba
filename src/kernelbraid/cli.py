"""The command line: verbs only. Each one calls the library, then prints one JSON document or tables.

Documents and tables go to standard output; progress, warnings and errors to standard error. Exit codes are
those of `report.failure.ExitCode`.
"""

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from kernelbraid.report.failure import ExitCode, classify, sentence

EPILOG = (
    "Exit codes: 0 done; 1 a check failed (unequal bits, a mismatched certificate, a refused promotion); "
    "2 wrong command or input, nothing was changed; 3 the machine stood in the way (disk, memory, "
    "permissions); 70 a defect of kernelbraid; 130 interrupted, `resume` continues."
)


class Verbs(TyperGroup):
    """Turns every error into one sentence on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if getattr(error, "exit_code", None) is not None:  # a usage error, which typer prints itself
                raise
            code = classify(error)
            if code is ExitCode.DEFECT:
                traceback.print_exc()
            print(f"kernelbraid: {sentence(error)}", file=sys.stderr)
            raise typer.Exit(int(code)) from None


app = typer.Typer(
    cls=Verbs,
    name="kernelbraid",
    help="Kernels with the same bits in rollout and policy update: certify, measure and search them.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
travelling = typer.Typer(
    cls=Verbs,
    help="Audits that travel: run a study's audits on another machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(travelling, name="audit")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
OperatorName = Annotated[str, typer.Argument(help="Name of an operator; `kernelbraid ops` lists them.")]
Compare = Annotated[
    bool | None,
    typer.Option(
        help="At the end, measure root, best, shipped and torch side by side; default: unless --json."
    ),
]
StudyFolder = Annotated[Path, typer.Argument(help="Folder of a study.", metavar="STUDY")]
Implementation = Annotated[
    str, typer.Argument(help="An implementation: its hash, or the first digits.", metavar="IMPL")
]


def main() -> None:
    app()


def emit(document: Any) -> None:
    """Print one JSON document."""
    json.dump(document, sys.stdout, indent=1, allow_nan=False, default=str)
    print()


def out() -> Console:
    return Console(highlight=False)


def say(text: str) -> None:
    """Tell a person at the terminal something that belongs to no document."""
    print(text, file=sys.stderr, flush=True)


def failed() -> NoReturn:
    raise typer.Exit(int(ExitCode.CHECK_FAILED))


# ---- The machine and the operators


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


# ---- Proof and measurement


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
        typer.Option(help="Also write FOLDER/<architecture>/<operator>.bench.json.", metavar="FOLDER"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the shipped implementation beside its peers, warm and cold, in one run."""
    from kernelbraid import ops
    from kernelbraid.audit import bench as benchmark
    from kernelbraid.report import table

    document = benchmark.bench(ops.get(operator, device), grid, longest=longest, progress=say)
    if write is not None:
        say(f"wrote {benchmark.write(document, write)}")
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
    """Let hostile, identical and swapped candidates try to be promoted."""
    from kernelbraid import ops
    from kernelbraid.audit import fixtures
    from kernelbraid.audit import selftest as test
    from kernelbraid.report import table
    from kernelbraid.search.study import read_source

    document = test.selftest(
        ops.get(operator, device),
        _promotable,
        honest=read_source(root) if root else None,
        trials=trials,
        fixtures=fixtures.named(only) if only else fixtures.for_device(device),
        progress=say,
    )
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


# ---- Studies


@app.command()
def search(
    operator: OperatorName,
    root: Annotated[
        Path | None,
        typer.Option(help="Implementation to start from; default: the shipped one.", metavar="FILE"),
    ] = None,
    device: Device = "cpu",
    minutes: Annotated[float | None, typer.Option(help="Time to search, above 0.")] = None,
    audits: Annotated[int | None, typer.Option(help="Candidates to audit.", min=1)] = None,
    policy: Annotated[
        str, typer.Option(help="pinned keeps the root's bits; mutual may agree on others.")
    ] = "mutual",
    patience: Annotated[
        int | None, typer.Option(help="Audits without a promotion after which to end.", min=1)
    ] = None,
    proposer: Annotated[
        str, typer.Option(help="knobs, or external: candidates come through `submit`.")
    ] = "knobs",
    seed: Annotated[int, typer.Option(help="Decides among edits that evidence does not tell apart.")] = 0,
    study: Annotated[
        Path | None,
        typer.Option(help="Folder to make; default: studies/OPERATOR-DATE-N here.", metavar="FOLDER"),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option("--export", help="Run nothing: write the first audits to a job file.", metavar="FILE"),
    ] = None,
    compare: Compare = None,
    as_json: Json = False,
) -> None:
    """Search for a faster implementation; Ctrl-C stops cleanly and `resume` continues."""
    from kernelbraid.search import travel
    from kernelbraid.search.study import DEFAULT_PATIENCE, Study

    with Study.create(
        study or new_study_folder(operator),
        operator,
        root,
        device=device,
        policy=policy,
        minutes=minutes,
        audits=audits,
        patience=DEFAULT_PATIENCE if patience is None else patience,
        proposer=proposer,
        seed=seed,
        elsewhere=job is not None,
    ) as made:
        if job is None:
            _drive(made, compare, as_json)
        else:
            _done(as_json, travel.export(made, job, propose=True))


@app.command()
def resume(study: StudyFolder, compare: Compare = None, as_json: Json = False) -> None:
    """Go on with an interrupted search, within the budgets it was given."""
    from kernelbraid.search.study import Study

    with Study.open(study) as opened:
        _drive(opened, compare, as_json)


@app.command()
def show(
    study: StudyFolder,
    impl: Annotated[
        str | None, typer.Argument(help="An implementation: its hash, or the first digits.", metavar="[IMPL]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a study, or everything recorded about one of its implementations."""
    from kernelbraid.report import documents, table
    from kernelbraid.search.study import Study

    with Study.open(study) as opened:
        if impl is not None:
            document = documents.implementation(opened.store, opened.contract, impl)
            emit(document) if as_json else table.implementation(out(), document)
            return
        rows = documents.implementations(opened.store)
        if as_json:
            emit({**opened.summary(), "implementations": rows})
        else:
            table.implementations(out(), rows)
            table.closing(out(), opened.summary())


@app.command()
def diff(study: StudyFolder, a: Implementation, b: Implementation, as_json: Json = False) -> None:
    """Compare two implementations of a study: knobs, bits, latencies, text."""
    from kernelbraid.report import documents, table
    from kernelbraid.search.study import Study

    with Study.open(study) as opened:
        document = documents.difference(opened.store, opened.contract, a, b)
    if as_json:
        emit(document)
    else:
        table.difference(out(), document)


@app.command()
def export(
    study: StudyFolder,
    to: Annotated[Path, typer.Option("--output", "-o", help="File to write, JSON lines.", metavar="FILE")],
    as_json: Json = False,
) -> None:
    """Write a whole study, sources included, into one file."""
    from kernelbraid.ir.exchange import export_study
    from kernelbraid.ir.store import Store

    with Store.open(study) as store:
        _done(as_json, {"study": str(study), "file": str(to), "lines": export_study(store, to)})


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `export` wrote.", metavar="FILE")],
    to: Annotated[Path, typer.Option("--output", "-o", help="Folder of the new study.", metavar="FOLDER")],
    as_json: Json = False,
) -> None:
    """Make a study folder from an exported file, whole or not at all."""
    from kernelbraid.ir.exchange import import_study

    import_study(file, to).close()
    _done(as_json, {"study": str(to), "file": str(file)})


@app.command()
def promote(study: StudyFolder, as_json: Json = False) -> None:
    """Install a study's winner where the public operator finds it on this machine."""
    from kernelbraid.search import promote as promotion
    from kernelbraid.search.study import Study

    with Study.open(study) as opened:
        path, certificate = promotion.install(opened)
        document = {
            "operator": certificate.operator,
            "implementation": certificate.implementation,
            "installed": str(path),
            "device": certificate.environment.device,
            "bits_changed": opened.summary()["bits"]["changed"],
        }
    _done(as_json, document)


@app.command()
def demote(operator: OperatorName, device: Device = "cpu", as_json: Json = False) -> None:
    """Go back to the shipped implementation on this machine."""
    from kernelbraid.search import promote as promotion

    _done(as_json, {"operator": operator, "removed": promotion.uninstall(operator, device)})


def new_study_folder(operator: str) -> Path:
    """The first free studies/<operator>-<date>-<n> under the current folder."""
    from datetime import date
    from itertools import count

    named = (Path("studies") / f"{operator}-{date.today():%Y%m%d}-{n}" for n in count(1))
    return next(folder for folder in named if not folder.exists())


def _drive(study: Any, compare: bool | None, as_json: bool) -> None:
    """Run a study's search to its end, tell how it goes, and print what came of it."""
    from kernelbraid.report import documents, table
    from kernelbraid.report.progress import Watch
    from kernelbraid.search import loop
    from kernelbraid.search.travel import proposer_of

    with Watch() as watch:
        ending = loop.run(study, proposer_of(study), progress=watch)
    summary = {**study.summary(), "ended_by": ending.value}
    if ending is not loop.Ending.INTERRUPTED and (not as_json if compare is None else compare):
        say("measuring root, best, shipped and torch side by side")
        summary["side_by_side"] = documents.side_by_side(study, say)
    if as_json:
        emit(summary)
    else:
        table.closing(out(), summary)
    if ending is loop.Ending.INTERRUPTED:
        say(f"interrupted; go on with: kernelbraid resume {study.folder}")
        raise typer.Exit(int(ExitCode.INTERRUPTED))


def _done(as_json: bool, document: Mapping[str, Any]) -> None:
    """Report what a short verb did."""
    from kernelbraid.report import table

    if as_json:
        emit(document)
    else:
        table.facts(out(), "", document)


# ---- A proposer outside


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
) -> None:
    """JSON: record a candidate and request its audit; with --audit, run it and decide on promotion."""
    from kernelbraid.report.progress import Watch
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


# ---- Audits that travel


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
        _done(as_json, travel.export(opened, to, most, propose=propose, progress=watch))


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

    job = jobs.read_job(file)
    with Watch() as watch:
        jobs.run_job(job, to, minutes=minutes, progress=watch.event)
    done = len(jobs.read_results(to).evidence)
    _done(as_json, {"results": str(to), "answered": done, "asked": len(job.candidates)})


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
    _done(as_json, {"recorded": len(found.recorded), "repeated": found.repeated})


if __name__ == "__main__":
    main()
