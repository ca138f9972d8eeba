"""Write what the documents take from the code: docs/cli.md from --help, docs/contracts.md from the contracts.

`--check` writes nothing and fails if a page is out of date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from kernelbraid.cli import app
from kernelbraid.contract import AccuracyBound, Contract
from kernelbraid.ops import OPERATORS
from kernelbraid.report.failure import ExitCode

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH = 100
CLI = """# Command line

Made by `make docs` from `--help`; do not edit. Every verb prints tables for people, or with `--json` one
JSON document on standard output and nothing else there. Progress, warnings and errors go to standard error.
Colours and rules appear on a terminal only.

Environment variables: KERNELBRAID_HOME, where promoted implementations, local certificates and compiled code
live (by default the user's data folder); KERNELBRAID_MODEL and KERNELBRAID_BASE_URL, which stand for --model
and --base-url of `search`; and those that hold a language model's key: OPENAI_API_KEY, ANTHROPIC_API_KEY, and
KERNELBRAID_API_KEY with --base-url.

| exit code | meaning |
|---|---|
"""
CODES = {
    ExitCode.OK: "done",
    ExitCode.CHECK_FAILED: "a check failed: unequal bits, a mismatched certificate, a refused promotion, a"
    " promoted exploit",
    ExitCode.BAD_INPUT: "the command or a file it was given is wrong; nothing was changed",
    ExitCode.STOPPED: "the machine stood in the way: full disk, read-only folder, no memory",
    ExitCode.DEFECT: "KernelBraid itself is wrong; a traceback comes first",
    ExitCode.INTERRUPTED: "Ctrl-C; what was recorded stays, and `resume` continues",
}
MARK = "<!-- below this line: made by `make docs` from the contracts; do not edit -->\n"


def command_line() -> str:
    codes = "".join(f"| {int(code)} | {CODES[code]} |\n" for code in ExitCode)
    return CLI + codes + "".join(_verbs(get_command(app), "kernelbraid", None))


def _verbs(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name, parent=parent, terminal_width=WIDTH)
    yield f"\n## {context.command_path}\n\n```\n{command.get_help(context).rstrip()}\n```\n"
    for child in getattr(command, "commands", {}).values():
        yield from _verbs(child, child.name, context)


def contracts() -> str:
    """The hand-written part of docs/contracts.md, then every contract as it is now."""
    page = DOCS / "contracts.md"
    written = page.read_text().split(MARK)[0]
    return written + MARK + "".join(_contract(each.contract, each.backend) for each in OPERATORS)


def _contract(contract: Contract, backend: str) -> str:
    return "\n".join(_sections(contract, backend)) + "\n"


def _sections(contract: Contract, backend: str) -> Iterator[str]:
    dtypes = ", ".join(contract.dtypes)
    yield f"\n## `{contract.name}` on {backend.upper()}\n\nHash `{contract.hash[:16]}`. dtypes: {dtypes}.\n"
    axes = [
        (axis.name, _range(axis.low, axis.high, axis.choices), "model" if axis.constant else "load", axis.doc)
        for axis in contract.axes
    ]
    yield _table(("axis", "values", "follows", ""), axes)
    yield _table(
        ("numeric knob", "values", "default", ""),
        [(k.name, ", ".join(map(str, k.choices)), str(k.default), k.doc) for k in contract.knobs],
    )
    yield _table(("rounding point", ""), [(p.place, p.rounding) for p in contract.rounding_points])
    yield _table(
        ("elementary operation", ""), [(o.name, o.definition) for o in contract.elementary_operations]
    )
    yield _table(("sum", "order"), contract.reduction_orders)
    yield _table(("special value", "policy"), contract.special_values)
    relations = [(f"`{r.name}`", r.statement, ", ".join(r.regimes)) for r in contract.relations]
    yield _table(("relation", "statement", "regimes"), relations)
    bounds = [(f"`accuracy_{b.quantity}`", _bound(b), ", ".join(b.regimes)) for b in contract.accuracy]
    yield _table(
        ("accuracy", "relative error against float64, at most, in the mean over rows", "regimes"), bounds
    )
    yield _table(("refused by name", "why"), [(e.feature, e.reason) for e in contract.exclusions])


def _bound(bound: AccuracyBound) -> str:
    """What a bound allows, in words."""
    allowed = [f"{bound.factor:g} times the vendor's"]
    if bound.floor:
        allowed.append(f"{bound.floor:g}")
    if bound.half_ulps:
        allowed.append(f"{bound.half_ulps:g} half-ulps of the compute dtype")
    return f"{', or '.join(allowed)}; of a case or a row {bound.gross:g} times either"


def _range(low: int, high: int, choices: tuple[int, ...] | None) -> str:
    return ", ".join(map(str, choices)) if choices else f"{low} to {high}"


def _table(headers: tuple[str, ...], rows: Any) -> str:
    lines = [headers, ("---",) * len(headers), *rows]
    cells = ([cell.replace("|", "\\|") for cell in row] for row in lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n"


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, text in (("cli.md", command_line()), ("contracts.md", contracts())):
        page = DOCS / name
        if not page.exists() or page.read_text() != text:
            stale.append(name)
            if not check:
                page.write_text(text)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
