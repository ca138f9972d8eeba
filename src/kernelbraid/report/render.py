"""A study's page: one HTML file that loads nothing, with tables that need no scripts.

Details and sources travel compressed inside it and are inflated by the browser. Whatever a study holds is
text: the template escapes it, the script writes it as text nodes, and the page's own content security policy
lets nothing run but the one script it was made with.
"""

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from kernelbraid.ir import survey
from kernelbraid.ir.bulk import kept_objects
from kernelbraid.ir.files import write_whole
from kernelbraid.ir.store import Store
from kernelbraid.ir.survey import Finding, Timing
from kernelbraid.report import charts, deltas
from kernelbraid.report.grid import text
from kernelbraid.report.page import Page, document
from kernelbraid.report.table import short_names

LEGEND = (
    ("root", "root"),
    ("incumbent", "incumbent"),
    ("promoted", "promoted before"),
    ("frontier", "frontier: to be built on"),
    ("archive", "archive: kept for later"),
    ("verified", "verified, abandoned"),
    ("rejected", "rejected"),
    ("pending", "not audited yet"),
)


def write(store: Store, path: Path) -> dict[str, Any]:
    """Write a study's page.

    Args:
        store: the study's records.
        path: file to write; one that is there is replaced, whole or not at all.

    Returns:
        `path`, `bytes` and `nodes`, the implementations shown.

    Raises:
        ValueError: `path` is a folder, or its folder does not exist.
        RuntimeError: the file cannot be written, or a source no longer matches its hash.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name the file to write")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} into")
    with kept_objects(), store.read():
        page = document(store)
        first = {
            node["sha256"]: page.nodes[node["parents"][0]]["sha256"] for node in page.nodes if node["parents"]
        }
        packed = deltas.pack(survey.sources(store), first)
        data = html(page, packed).encode("utf-8", "replace")
    write_whole(path, data)
    return {"path": str(path), "bytes": len(data), "nodes": len(page.nodes)}


def html(page: Page, sources: Sequence[deltas.Packed]) -> str:
    """Return the page; equal for equal studies.

    Args:
        page: what it shows.
        sources: the packed source of every node.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["text"] = text
    script, style = _part("page.js"), _part("page.css")
    plots, points = _plots(page)
    names, shared = short_names([each["name"] for each in page.workloads])
    return environment.from_string(_part("page.html")).render(
        page=page,
        script=script,
        style=style,
        script_hash=_csp_hash(script),
        style_hash=_csp_hash(style),
        data=_packed(_payload(page, points)),
        sources=_packed(sources),
        plots=plots,
        legend=[entry for entry in LEGEND if any(node["group"] == entry[0] for node in page.nodes)],
        names=names,
        shared=shared,
    )


def _part(name: str) -> str:
    return (files("kernelbraid.report") / "template" / name).read_text(encoding="utf-8")


def _csp_hash(inline: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}"


def _packed(value: Any) -> str:
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(zlib.compress(plain, 6)).decode()


def _plots(page: Page) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """The SVGs, and for those that answer to the pointer [node, x, y] of every point."""
    groups = [node["group"] for node in page.nodes]
    points: dict[str, list[list[int]]] = {}
    steps = [(each["audit"], each["ratio"]) for each in page.incumbents]

    def scatter(key: str, title: str, x_label: str, rows: Sequence[Mapping[str, Any]], x: str) -> str:
        ordered: dict[str, list[tuple[int, tuple[float, float]]]] = {}
        for row in rows:
            ordered.setdefault(groups[row["node"]], []).append((row["node"], (row[x], row["ratio"])))
        plain = {group: [at for _, at in found] for group, found in sorted(ordered.items())}
        line = steps if x == "audit" else []
        drawn, pixels = charts.scatter(charts.WIDE, title, x_label, plain, line)
        points[key] = [
            [node, *pixel]
            for group in plain
            for (node, _), pixel in zip(ordered[group], pixels[group], strict=True)
        ]
        return drawn

    told = [row for row in page.objective if row["tokens"] is not None]
    parents = [node["parents"] for node in page.nodes]
    plots: dict[str, Any] = {
        "graph": charts.graph(page.layout, parents, groups),
        "audits": None,
        "tokens": None,
        "workloads": [_trajectory(page, row, groups) for row in page.workloads],
        "roofline": _roofline(page),
    }
    if page.objective:
        title = "Objective, ratio to the root, over audits"
        plots["audits"] = scatter("audits", title, "audits", page.objective, "audit")
    if told:
        title = "Objective, ratio to the root, over tokens"
        plots["tokens"] = scatter("tokens", title, "tokens", told, "tokens")
    return plots, points


def _trajectory(page: Page, workload: Mapping[str, Any], groups: Sequence[str]) -> str | None:
    by_request = {row["request"]: row["ratio"] for row in workload["points"]}
    if not by_request:
        return None
    points: dict[str, list[tuple[float, float]]] = {}
    for row in workload["points"]:
        points.setdefault(groups[row["node"]], []).append((row["audit"], row["ratio"]))
    steps = [
        (each["audit"], 1.0 if each["request"] is None else by_request[each["request"]])
        for each in page.incumbents
        if each["request"] is None or each["request"] in by_request
    ]
    title = f"{workload['name']}: ratio to the root over audits, limit {workload['limit']:g}"
    ordered = dict(sorted(points.items()))
    drawn, _ = charts.scatter(charts.SMALL, title, "audits", ordered, steps, workload["limit"])
    return drawn


def _roofline(page: Page) -> str | None:
    rows = [row for row in page.workloads if row["bound_ms"] and row["best_ms"] > 0 and row["root_ms"] > 0]
    if not rows:
        return None
    names, _ = short_names([row["name"] for row in rows])
    spans = [
        (name, row["bound_ms"], row["best_ms"], row["root_ms"]) for name, row in zip(names, rows, strict=True)
    ]
    return charts.spans("Milliseconds a call: bound, best and root of each workload", spans)


def _payload(page: Page, points: dict[str, list[list[int]]]) -> dict[str, Any]:
    """What the script needs for details. Numbers are rounded to six digits; whole hashes appear once."""
    sets = {members: i for i, members in enumerate(dict.fromkeys(_checked(page)))}
    place = {each["seq"]: i for i, each in enumerate(page.requirements)}
    workloads = {each["name"]: i for i, each in enumerate(page.workloads)}
    promotions: dict[int, list[dict[str, Any]]] = {}
    for each in page.promotions:
        promotions.setdefault(each["node"], []).append(_plain(each))
    return {
        "requirements": [each["id"] for each in page.requirements],
        "sets": [[place[member] for member in members] for members in sets],
        "workloads": short_names([each["name"] for each in page.workloads])[0],
        "limits": [each["limit"] for each in page.workloads],
        "incumbent": next(i for i, node in enumerate(page.nodes) if node["state"] == "incumbent"),
        "points": points,
        "x": page.layout.x,
        "y": page.layout.y,
        "nodes": [
            {
                **{
                    name: node[name]
                    for name in ("sha256", "label", "state", "parents", "branch", "decisions")
                },
                "ratio": _number(node["ratio"]),
                "change": _change(node["change"]),
                "audits": [_audit(each, sets, workloads) for each in node["audits"]],
                "promotions": promotions.get(i, []),
            }
            for i, node in enumerate(page.nodes)
        ],
    }


def _checked(page: Page) -> list[tuple[int, ...]]:
    return [audit.checked for node in page.nodes for audit in node["audits"]]


def _change(change: survey.Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    names = ("hypothesis", "functions", "regimes", "expected_effect", "requirements_at_risk", "falsified_by",
             "proposer", "mechanism", "rationale")  # fmt: skip
    stated = {name: value for name in names if (value := getattr(change, name))}
    return stated if change.edit is None else {**stated, "edit": _plain(change.edit)}


def _audit(
    finding: Finding, sets: Mapping[tuple[int, ...], int], workloads: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "level": finding.level.value,
        "status": finding.status.value,
        "reason": finding.reason,
        "bits_id": finding.bits_id,
        "checked": sets[finding.checked],
        "comparisons": finding.comparisons,
        "error": _number(finding.error),
        "seconds": [[stage, _number(value)] for stage, value in finding.seconds],
        "failures": [
            {
                "requirement": each.requirement,
                "error": _number(each.error),
                "difference": None
                if each.difference is None
                else {**asdict(each.difference), "seed": str(each.difference.seed)},
            }
            for each in finding.failures
        ],
        "timings": [_timing(each, workloads) for each in finding.timings],
    }


def _timing(each: Timing, workloads: Mapping[str, int]) -> list[Any]:
    ms = (each.candidate_ms, each.root_ms, each.incumbent_ms, each.bound_ms)
    name = workloads.get(each.workload, each.workload)
    return [name, each.protocol, each.processes, *map(_number, ms)]


def _number(value: float | None) -> float | str | None:
    if value is None:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else repr(value)


def _plain(value: Any) -> Any:
    """The value with rounded finite numbers, and whole numbers beyond a browser's as text."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 53:
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
