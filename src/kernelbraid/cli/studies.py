"""Verbs on studies: search, look, promote."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kernelbraid.cli.agents import (
    Api,
    AuditCommandTemplate,
    BaseUrl,
    Evidence,
    ExecutorName,
    KeyVariable,
    MaxMoney,
    MaxTokens,
    ModelName,
    OtherModel,
    OtherUrl,
    PriceIn,
    PriceOut,
    ProposerCalls,
)
from kernelbraid.cli.application import (
    Compare,
    Device,
    Implementation,
    Json,
    OperatorName,
    StudyFolder,
    app,
    done,
    emit,
    out,
    say,
)
from kernelbraid.report.failure import ExitCode


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
    workloads: Annotated[
        Path | None,
        typer.Option(
            help="Optimize for the calls of a run that `train --record-workloads` recorded.", metavar="FILE"
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="pinned keeps the root's bits; mutual may agree on others.")
    ] = "mutual",
    patience: Annotated[
        int | None, typer.Option(help="Audits without a promotion after which to end.", min=1)
    ] = None,
    proposer: Annotated[
        str,
        typer.Option(
            help="knobs, llm (a language model), external (candidates come by `submit`) or replay (those of "
            "another study)."
        ),
    ] = "knobs",
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            help="A workload, or a grid of them, that proposers never see and a promotion needs too; may be "
            "repeated. Default: the operator's grid held_out, if it has one.",
            metavar="NAME",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides among edits that evidence does not tell apart.")] = 0,
    study: Annotated[
        Path | None,
        typer.Option(help="Folder to make; default: studies/OPERATOR-DATE-N here.", metavar="FOLDER"),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option("--export", help="Run nothing: write the first audits to a job file.", metavar="FILE"),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="A study whose proposals are made again, from its root.", metavar="STUDY"),
    ] = None,
    proposer_calls: ProposerCalls = None,
    model: ModelName = None,
    base_url: BaseUrl = None,
    api: Api = None,
    key_variable: KeyVariable = None,
    max_tokens: MaxTokens = None,
    max_money: MaxMoney = None,
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    evidence: Evidence = "full",
    audit_command: AuditCommandTemplate = None,
    executor: ExecutorName = "local",
    compare: Compare = None,
    as_json: Json = False,
) -> None:
    """Search for a faster implementation; Ctrl-C stops cleanly and `resume` continues."""
    from kernelbraid import ops
    from kernelbraid.ir.replaying import Recorded
    from kernelbraid.search import travel
    from kernelbraid.search.audits import runner
    from kernelbraid.search.proposers.llm_settings import LlmSettings
    from kernelbraid.search.proposers.replay import made_from
    from kernelbraid.search.study import DEFAULT_PATIENCE, Study, chosen_workloads

    replayed: list[Recorded] = []
    if replay is not None:
        if root is not None or proposer not in ("knobs", "replay"):
            raise ValueError("a replay starts from the recorded root and needs no other proposer")
        of, root_source, replayed = made_from(replay)
        if of != operator:
            raise ValueError(f"{replay} is a study of {of}, not of {operator}")
        proposer = "replay"
    llm = None
    if proposer == "llm":
        llm = LlmSettings.of(
            model,
            base_url=base_url,
            api=api,
            key_variable=key_variable,
            max_tokens=max_tokens,
            max_money=max_money,
            price_in=price_in,
            price_out=price_out,
            evidence=evidence,
        )
    run_job = runner(audit_command, executor)
    recorded = None if workloads is None else _recorded(operator, device, workloads)
    with Study.create(
        study or new_study_folder(operator),
        operator,
        root_source if replayed else root,
        device=device,
        workloads=None if recorded is None else recorded.workloads,
        dtype=None if recorded is None else recorded.dtype,
        policy=policy,
        minutes=minutes,
        audits=audits,
        patience=DEFAULT_PATIENCE if patience is None else patience,
        proposer=proposer,
        seed=seed,
        held_out=chosen_workloads(ops.get(operator, device), held_out) if held_out else None,
        elsewhere=job is not None or audit_command is not None or executor != "local",
        proposer_calls=proposer_calls,
        llm=llm,
        replay=replayed,
    ) as made:
        if job is None:
            _drive(
                made,
                False if compare is None and (audit_command or executor != "local") else compare,
                as_json,
                run_job,
            )
        else:
            done(as_json, travel.export(made, job, propose=True))


@app.command()
def resume(
    study: StudyFolder,
    model: OtherModel = None,
    base_url: OtherUrl = None,
    audit_command: AuditCommandTemplate = None,
    executor: ExecutorName = "local",
    compare: Compare = None,
    as_json: Json = False,
) -> None:
    """Go on with an interrupted search, within the budgets it was given."""
    from kernelbraid.search import travel
    from kernelbraid.search.audits import runner
    from kernelbraid.search.study import Study

    run_job = runner(audit_command, executor)
    with Study.open(study) as opened:
        if opened.store.study.proposer == "llm":
            travel.change_model(opened, model, base_url)
        _drive(
            opened,
            False if compare is None and (audit_command or executor != "local") else compare,
            as_json,
            run_job,
        )


@app.command()
def show(
    study: StudyFolder,
    impl: Annotated[
        str | None, typer.Argument(help="An implementation: its hash, or the first digits.", metavar="[IMPL]")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Also what proposers may not see: held-out workloads, marked.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a study, or everything recorded about one of its implementations."""
    from kernelbraid.ir.bulk import kept_objects
    from kernelbraid.report import documents, table
    from kernelbraid.search.study import Study

    with Study.open(study) as opened, kept_objects():
        if impl is not None:
            document = documents.implementation(opened.store, opened.contract, impl, held_out=held_out)
            emit(document) if as_json else table.implementation(out(), document)
            return
        rows = documents.implementations(opened.store)
        kept = documents.held_out(opened) if held_out else []
        if as_json:
            shown = {"held_out_workloads": kept} if held_out else {}
            emit({**opened.summary(), **shown, "implementations": rows})
        else:
            table.implementations(out(), rows)
            table.closing(out(), opened.summary())
            if kept:
                table.held_out(out(), kept)


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
        done(as_json, {"study": str(study), "file": str(to), "lines": export_study(store, to)})


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `export` wrote.", metavar="FILE")],
    to: Annotated[Path, typer.Option("--output", "-o", help="Folder of the new study.", metavar="FOLDER")],
    as_json: Json = False,
) -> None:
    """Make a study folder from an exported file, whole or not at all."""
    from kernelbraid.ir.exchange import import_study

    import_study(file, to).close()
    done(as_json, {"study": str(to), "file": str(file)})


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
    done(as_json, document)


@app.command()
def demote(operator: OperatorName, device: Device = "cpu", as_json: Json = False) -> None:
    """Go back to the shipped implementation on this machine."""
    from kernelbraid.search import promote as promotion

    done(as_json, {"operator": operator, "removed": promotion.uninstall(operator, device)})


def new_study_folder(operator: str) -> Path:
    """The first free studies/<operator>-<date>-<n> under the current folder."""
    from datetime import date
    from itertools import count

    named = (Path("studies") / f"{operator}-{date.today():%Y%m%d}-{n}" for n in count(1))
    return next(folder for folder in named if not folder.exists())


def _recorded(operator: str, device: str, file: Path) -> Any:
    """Read recorded workloads, and say what they leave out."""
    from kernelbraid import ops
    from kernelbraid.search.recorded import read_recorded

    found = read_recorded(file, ops.get(operator, device), device)
    say(
        f"{len(found.workloads)} workloads stand for {found.shapes} recorded shapes; calls with "
        f"{found.left_out:.2%} of their least time are left out"
    )
    return found


def _drive(study: Any, compare: bool | None, as_json: bool, run_job: Any) -> None:
    """Run a study's search to its end, tell how it goes, and print what came of it."""
    from kernelbraid.report import documents, table
    from kernelbraid.report.progress import Watch
    from kernelbraid.search import loop
    from kernelbraid.search.travel import proposer_of

    with Watch() as watch:
        ending = loop.run(study, proposer_of(study), progress=watch, run_job=run_job)
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
