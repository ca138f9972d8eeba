"""Benchmarks: the shipped implementation beside its peers, one row a workload and protocol.

A row is verified if this machine has a certificate of the very source or else every requirement of the screen
holds for its constant axes in this run, and the outputs of the timed calls equal those of another process bit
for bit.
"""

import json
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kernelbraid import ops
from kernelbraid.audit.beside import Row, SideBySide
from kernelbraid.audit.certificates import local_certificate
from kernelbraid.audit.checks import check_all
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.environment import fingerprint
from kernelbraid.audit.pools import Protocol
from kernelbraid.audit.process import Worker
from kernelbraid.audit.stages import Hands
from kernelbraid.contract import Workload
from kernelbraid.ir.evidence import Level
from kernelbraid.ops.problem import Operator

OURS = "kernelbraid"
PROTOCOLS: tuple[Protocol, ...] = ("warm", "cold")
LONGEST_SECONDS = 2.0
"""Workloads whose call cannot take less than this on the machine at hand are left out, and listed."""


def bench(
    operator: Operator,
    grid: str = "all",
    *,
    protocols: Sequence[Protocol] = PROTOCOLS,
    longest: float = LONGEST_SECONDS,
    progress: Callable[[str], None] = lambda _: None,
    folder: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Measure the shipped implementation beside its peers.

    Args:
        operator: what to measure.
        grid: name of one of the operator's grids, or `all`.
        protocols: `warm` (one call's buffers, again and again), `cold` (caches swept, distinct calls).
        longest: leave out workloads of which one call must take longer than so many seconds on this machine.
        progress: told of each step in a few words.
        folder: `write` the document there, and anew after every row, so that an interruption loses little.
        resume: keep the rows that `folder` has of this grid, of the same subject, and measure the others.

    Returns:
        A JSON-able document: `environment`, `commit`, `rows`, and with their reasons `skipped` workloads and
        `failed_peers`.

    Raises:
        ValueError: no such grid, or its device is not there.
        RuntimeError: a contender's process failed, or a timed call gave other bits than another process.
    """
    grids = _grids(operator, grid)
    source = ops.source(operator)
    environment = fingerprint(operator.backend)
    certificate = local_certificate(operator)
    certified = certificate is not None and certificate.implementation == source.sha256
    document: dict[str, Any] = {
        "operator": operator.name,
        "contract": operator.contract.hash,
        "environment": {**asdict(environment), "versions": dict(environment.versions)},
        **commit(),
        "rows": [],
        "skipped": [],
        "failed_peers": {},
    }
    rows, skipped = document["rows"], document["skipped"]
    if resume and folder is not None:
        rows += _measured(_read(place(document, folder)), document, source.sha256, grids)
    done = {_key(row) for row in rows}
    with tempfile.TemporaryDirectory(prefix="kernelbraid-bench-") as scratch:
        run = SideBySide(operator, {OURS: source}, environment, Path(scratch), confirm=OURS)
        document["failed_peers"] = run.left_out
        for name, workloads in grids.items():
            short = []
            for workload in workloads:
                least = run.machine.bound_ms(operator, workload) / 1e3
                if least <= longest:
                    short.append(workload)
                    continue
                reason = f"one call takes at least {least:.1f} s on this machine"
                skipped.append({"grid": name, "workload": workload.flat(), "reason": reason})
            left: dict[tuple[Protocol, ...], list[Workload]] = {}
            for each in short:
                missing = tuple(p for p in protocols if _named(name, each.flat(), p) not in done)
                left.setdefault(missing, []).append(each)
            left.pop((), None)
            if left and not certified:
                progress(f"grid {name}: checking")
            verified = certified or (bool(left) and _screened(run, short))
            for missing, those in left.items():
                for row in run.rows(those, missing, progress):
                    rows.append(_document(name, row, source.sha256, verified))
                    if folder is not None:
                        write(document, folder)
    if folder is not None:
        write(document, folder)
    return document


def _measured(
    before: dict[str, Any] | None, document: dict[str, Any], source: str, grids: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Verified rows of these grids that an earlier document of the same subject holds."""
    if before is None or _subject(before) != (*_subject(document)[:-1], {source}):
        return []
    return [row for row in before["rows"] if row["grid"] in grids and row["verified"]]


def _key(row: dict[str, Any]) -> str:
    return _named(row["grid"], row["workload"], row["protocol"])


def _named(grid: str, workload: Mapping[str, Any], protocol: str) -> str:
    """One row of a document, by name."""
    return json.dumps([grid, protocol, workload], sort_keys=True)


def _document(grid: str, row: Row, implementation: str, verified: bool) -> dict[str, Any]:
    peers = {name: ms for name, ms in row.ms.items() if name != OURS}
    return {
        "grid": grid,
        "workload": row.workload.flat(),
        "protocol": row.protocol,
        "implementation": implementation,
        "ours_ms": row.ms[OURS],
        "peers": peers,
        "bound_ms": row.bound_ms,
        "verified": verified,
        "processes_ms": {name: list(ms) for name, ms in row.processes_ms.items()},
    }


def write(document: dict[str, Any], folder: Path) -> Path:
    """Write a benchmark where committed evidence lives, `<folder>/<architecture>/<operator>.bench.json`.

    What the file holds of other grids stays there if it is of the same implementation, contract, device and
    versions.
    """
    path = place(document, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = _joined(_read(path), document)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)
    return path


def place(document: dict[str, Any], folder: Path) -> Path:
    """Where a document is written under a folder."""
    architecture = str(document["environment"]["architecture"])
    return folder / architecture / f"{document['operator']}.bench.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _joined(before: dict[str, Any] | None, document: dict[str, Any]) -> dict[str, Any]:
    """A document with the rows of other grids that an earlier one of the same subject holds."""
    if before is None or _subject(before) != _subject(document):
        return document
    new = {row["grid"] for name in ("rows", "skipped") for row in document[name]}
    kept = {name: [row for row in before[name] if row["grid"] not in new] for name in ("rows", "skipped")}
    return document | {name: [*rows, *document[name]] for name, rows in kept.items()}


def _subject(document: dict[str, Any]) -> tuple[Any, ...]:
    """What rows of one file have in common."""
    environment = document["environment"]
    sources = {row["implementation"] for row in document["rows"]}
    return document["contract"], environment["device"], environment["versions"], sources


def commit() -> dict[str, Any]:
    """The revision of the checkout that this package runs from, and whether it was changed."""
    here = Path(__file__).resolve().parent
    try:
        found = [
            subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10)
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", str(here.parent)))
        ]
    except (OSError, subprocess.TimeoutExpired):
        return {"commit": None, "dirty": None}
    if any(each.returncode for each in found):
        return {"commit": None, "dirty": None}
    return {"commit": found[0].stdout.strip(), "dirty": bool(found[1].stdout.strip())}


def _grids(operator: Operator, name: str) -> dict[str, tuple[Workload, ...]]:
    if name == "all":
        return dict(operator.grids)
    if name not in operator.grids:
        raise ValueError(f"{operator.name} has no grid {name!r}; it has {', '.join(operator.grids)}, all")
    return {name: operator.grids[name]}


def _screened(run: SideBySide, workloads: Sequence[Workload]) -> bool:
    """Whether every requirement of the screen holds for the constant axes of these workloads."""
    operator, source = run.operator, run.sources[OURS]
    contract = operator.contract
    held = True
    scopes = {tuple(operator.constant_axes(each).items()) for each in workloads}
    for axes, dtype in product(scopes, contract.dtypes):
        constant = dict(axes)
        with run.worker(source) as main, run.worker(source) as fresh:
            report = main.build(contract, constant)
            fresh.build()
            hands = Hands({"main": partial(_same, main), "fresh": partial(_same, fresh)})
            seed = secrets.randbits(31)
            plan = Plan(Level.SCREEN, (constant,), report.numerics, report.edges, dtype, seed, False)
            held = held and all(verdict.held for verdict in check_all(operator, plan, hands))
    return held


def _same(worker: Worker) -> Worker:
    return worker
