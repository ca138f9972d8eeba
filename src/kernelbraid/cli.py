"""The command line: verbs only. Each one calls the library, then prints one JSON document or tables.

Documents and tables go to standard output; progress, warnings and errors to standard error. Exit codes are
those of `report.failure.ExitCode`.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

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
audits = typer.Typer(help="Audits that travel: run them on another machine.", no_args_is_help=True)
app.add_typer(audits, name="audit")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def main() -> None:
    app()


def emit(document: Any) -> None:
    """Print one JSON document."""
    json.dump(document, sys.stdout, indent=1, allow_nan=False)
    print()


if __name__ == "__main__":
    main()
