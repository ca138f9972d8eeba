"""What the verbs share: the application, its arguments, what they print."""

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


def done(as_json: bool, document: Mapping[str, Any]) -> None:
    """Report what a short verb did."""
    from kernelbraid.report import table

    if as_json:
        emit(document)
    else:
        table.facts(out(), "", document)
