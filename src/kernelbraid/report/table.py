"""Tables of the documents that the command line prints with --json."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console

from kernelbraid.report.grid import Cell, Grid, text

Document = Mapping[str, Any]


def facts(console: Console, title: str, pairs: Mapping[str, Cell]) -> None:
    """Print a title and one `name  value` line a fact."""
    grid = Grid(title, ("", ""))
    for name, value in pairs.items():
        grid.add(name, text(value))
    grid.show(console)


def line(console: Console, sentence: str) -> None:
    """Print one line as it is, however long."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def environment(console: Console, document: Document) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    winners = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in document["installed"].items())
    facts(
        console,
        "",
        {
            "device": document["device"],
            "architecture": document["architecture"],
            "cores": document["cores"],
            "memory": f"{document['memory_gib']:g} GiB",
            "last-level cache": f"{document['cache_bytes'] / 2**20:g} MiB",
            "measured": f"{document['flops'] / 1e9:.0f} GFLOP/s, {document['bandwidth'] / 1e9:.1f} GB/s",
            "versions": versions,
            "GPUs": ", ".join(document["gpus"]) or "none",
            "data folder": document["home"],
            "installed winners": winners or "none: the shipped implementations are used",
        },
    )


def operators(console: Console, document: Document) -> None:
    grid = Grid("", ("operator", "contract", "backends", "backward", "relations", "certificates"))
    for each in document["operators"]:
        grid.add(
            each["name"],
            each["contract"],
            ", ".join(each["backends"]),
            "yes" if each["backward"] else "no",
            len(each["relations"]),
            len(each["certificates"]),
        )
    grid.show(console)


def implementations(console: Console, rows: Sequence[Document]) -> None:
    grid = Grid("", ("implementation", "state", "ratio to root", "from", "what was tried"))
    for row in rows:
        parents = ", ".join(parent[:12] for parent in row["parents"])
        grid.add(
            row["implementation"][:12],
            row["state"],
            row["ratio_to_root"],
            parents or None,
            row["hypothesis"] or row["label"],
        )
    grid.show(console)


def implementation(console: Console, document: Document) -> None:
    """Everything recorded about one implementation but its source."""
    knobs = ", ".join(f"{name}={value}" for name, value in document["knobs"].items())
    title = f"{document['implementation'][:12]} {document['label']}".rstrip()
    facts(console, title, {"knobs": knobs or None, "sha256": document["implementation"]})
    descent = Grid("descent", ("implementation", "what was tried"))
    for step in document["lineage"]:
        descent.add(step["implementation"][:12], step["hypothesis"] or "root")
    descent.show(console)
    for evidence in document["evidence"]:
        _evidence(console, evidence, document["held_out"])
    for promotion in document["promotions"]:
        outcome = "promoted" if promotion["granted"] else f"not promoted ({promotion['blocked_by']})"
        line(console, f"{outcome}: {promotion['reason']}")
    for decision in document["decisions"]:
        line(console, f"{decision['decision']} (by {decision['by']}): {decision['reason']}")


def _evidence(console: Console, evidence: Document, held_out: Collection[str]) -> None:
    compared = sum(verdict["comparisons"] for verdict in evidence["verdicts"])
    title = f"audit {evidence['job']}: {evidence['level']}, {evidence['status']}, {compared:,} compared"
    if evidence["reason"]:
        title += f": {evidence['reason']}"
    line(console, title)
    names, shared = short_names([each["workload"] for each in evidence["measurements"]])
    grid = Grid(f"  {shared}", ("workload", "protocol", "ms", "root ms", "ratio", "limit"))
    for name, each in zip(names, evidence["measurements"], strict=True):
        ours, root = _mean(each["candidate_ms"]), _mean(each["root_ms"])
        marked = f"{name} (held out)" if each["workload"] in held_out else name
        grid.add(marked, each["protocol"], ours, root, ours / root, each["limit"])
    if grid.rows:
        grid.show(console)
    for verdict in evidence["verdicts"]:
        if not verdict["held"]:
            line(console, f"  {failure(verdict)}")


def failure(verdict: Document) -> str:
    """One line for a requirement that did not hold: where, both values, the distance, the case."""
    found = verdict["difference"]
    if found is None:
        return f"{verdict['requirement']} does not hold"
    distance = "" if found["ulp"] is None else f", {found['ulp']} ULP apart"
    return (
        f"{verdict['requirement']}: {found['place']}: {found['left']} against {found['right']}{distance}; "
        f"{found['unequal']} unequal; seed {found['seed']}; case {found['case']}"
    )


def difference(console: Console, document: Document) -> None:
    """Two implementations side by side."""
    names = (document["a"][:12], document["b"][:12])
    grid = Grid("", ("", *names))
    workloads, _ = short_names([row["workload"] for row in document["workloads"]])
    for name, (before, after) in document["knobs"].items():
        grid.add(name, _show(before), _show(after))
    grid.add("status", *document["status"])
    grid.add("bits id", *(_show(each) for each in document["bits_id"]))
    for name, row in zip(workloads, document["workloads"], strict=True):
        grid.add(f"{name}: ratio to root", *(_show(each) for each in row["ratio_to_root"]))
    grid.show(console)
    line(console, document["patch"])


def _show(value: Any) -> str:
    return text(value) if isinstance(value, float | None) else str(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verified(console: Console, document: Document) -> None:
    """One line a relation and regime, then what failed."""
    for report in document["operators"]:
        title = (
            f"{report['contract']} on {report['backend']}, {report['implementation'][:12]}, {report['level']}"
        )
        grid = Grid(title, ("relation", "regime", "cases", "comparisons", "unequal", "error/bound", "held"))
        for row in report["relations"]:
            cells = [row[name] for name in ("relation", "regime", "cases", "comparisons", "unequal", "error")]
            grid.add(*cells, "yes" if row["held"] else "NO")
        grid.show(console)
        for row in report["relations"]:
            if not row["held"]:
                line(console, failure({**row, "difference": row["first_difference"]}))
        for missing in report["untested"]:
            line(console, f"not tested: {missing['requirement']}: {missing['reason']}")
        counts = f"{report['comparisons']:,} comparisons, {report['unequal']:,} unequal"
        line(console, f"{counts}, {report['seconds']:.1f} s")
        if report["certificate"]:
            line(console, f"certificate: {report['certificate']}")


def one_case(console: Console, document: Document) -> None:
    """A case that was repeated alone."""
    if document["held"]:
        line(console, f"{document['case']}: holds, {document['comparisons']:,} compared")
    else:
        line(console, failure(document))


def sanitized(console: Console, document: Mapping[str, Any]) -> None:
    """What compute-sanitizer found in each operator, by checker."""
    for found in document["operators"]:
        results = {each["checker"]: each["output"] or "found nothing" for each in found["checkers"]}
        facts(console, found["operator"], results)


def committed(console: Console, document: Document) -> None:
    """What became of committed certificates and benchmarks."""
    for problem in document["problems"]:
        line(console, f"{problem['file']}: {problem['reason']}")
    counts = ("certificates", "benchmarks", "mismatched")
    facts(console, "", {name: document[name] for name in counts})


def bench(console: Console, document: Document) -> None:
    """Rows of a benchmark; the fastest peer stands beside ours."""
    environment = document["environment"]
    line(console, f"{environment['device']}, {environment['cores']} cores; ms, median of the processes")
    headers = ("grid", "workload", "protocol", "ours", "fastest peer", "", "ratio", "bound", "verified")
    grid = Grid("", headers)
    for row in document["rows"]:
        peer = min(row["peers"], key=row["peers"].get, default=None)
        theirs = row["peers"][peer] if peer is not None else None
        grid.add(
            row["grid"],
            shape(row["workload"]),
            row["protocol"],
            row["ours_ms"],
            theirs,
            peer or "",
            row["ours_ms"] / theirs if theirs else None,
            row["bound_ms"],
            "yes" if row["verified"] else "NO",
        )
    grid.show(console)
    for peer, reason in document["failed_peers"].items():
        line(console, f"left out: peer {peer}: {reason}")
    for skipped in document["skipped"]:
        line(console, f"left out: {skipped['grid']} {shape(skipped['workload'])}: {skipped['reason']}")


def shape(workload: Document) -> str:
    """A flat workload in a few words."""
    parts = []
    for axis, value in workload.items():
        if axis == "phase":
            continue
        if isinstance(value, list):
            value = f"{min(value)}..{max(value)}" if value else "none"
        parts.append(f"{axis}={value}")
    return f"{workload['phase']} {' '.join(parts)}"


def profile(console: Console, document: Document) -> None:
    title = f"{document['model']} on {document['device']}: one layer, ms a call"
    grid = Grid(title, ("phase", "calls a step", "unified", "vendor", "vendor/unified"))
    for name, phase in document["phases"].items():
        grid.add(name, phase["calls"], phase["ms"]["unified"], phase["ms"]["vendor"], phase["ratio"])
    grid.show(console)
    seconds = {f"seconds of {document['layers']} layers, {arm}": v for arm, v in document["seconds"].items()}
    names = {
        "recompute_share": "share of the recompute",
        "ceiling": "ceiling of reuse alone",
        "speedup": "speedup of unified kernels with reuse",
        "to_ceiling": "speedup over the ceiling",
    }
    facts(console, "", seconds | {words: document[name] for name, words in names.items()})


def comparison(console: Console, document: Document) -> None:
    """Training steps on unified kernels beside the vendor's."""
    line(console, f"{document['environment']['device']}; ms a step, median of the timed ones")
    headers = ("row", "unified+reuse", "vendor+recompute", "vendor+bypass", "recompute's share", "speedup")
    grid = Grid("", (*headers, "rewards' ratio", "compared", "unequal"))
    for row in document["rows"]:
        peers = row.get("peers", {})
        numbers = [row.get("ours_ms"), *(peers.get(f"vendor+{old}") for old in ("recompute", "bypass"))]
        names = ("recompute_share", "speedup", "reward_ratio", "compared", "unequal")
        grid.add(row["name"], *numbers, *(row.get(name) for name in names))
    grid.show(console)
    for row in document["rows"]:
        for arm, reason in row["failed"].items():
            line(console, f"failed: {row['name']}, {arm}: {reason}")
        if row.get("curves_equal") is not None:
            words = "equal" if row["curves_equal"] else "OTHER"
            line(console, f"{row['name']}: reuse and recompute gave {words} rewards, losses and norms")


def selftest(console: Console, document: Document) -> None:
    grid = Grid("", ("fixture", "kind", "expected", "observed", "promoted"))
    for each in document["fixtures"]:
        expected = " or ".join(each["expected"])
        grid.add(each["name"], each["kind"], expected, each["observed"], "yes" if each["promoted"] else "no")
    grid.show(console)
    facts(
        console,
        "",
        {
            "not as expected": ", ".join(document["unexpected"]) or "none",
            "promoted exploits": document["promoted_exploits"],
            "trials of identical source": document["trials"],
            "proven once": document["proven_once"],
            "false promotions": document["false_promotions"],
            f"gain proven in {100 * document['smallest_gain_share']:.0f}% of trials": (
                None if document["smallest_gain"] is None else f"{100 * document['smallest_gain']:.1f}%"
            ),
        },
    )


def closing(console: Console, summary: Document) -> None:
    """A study's closing table: workloads, regimes, objective, what was tried, where it is stored."""
    beside = {row["workload"]: row for row in summary.get("side_by_side", ())}
    _workloads(console, summary, beside)
    _regimes(console, summary, beside)
    rejected = ", ".join(f"{count} {reason}" for reason, count in summary["rejected"].items())
    objective = summary["objective"]
    gain = summary["smallest_gain"]
    bits = summary["bits"]
    times = a_step(summary, beside) if beside else {}
    against = ", ".join(f"{name} {ms / times['torch']:.2f}" for name, ms in times.items() if name != "torch")
    facts(
        console,
        "",
        {
            "objective in its audit, ms a step": _objective(objective),
            **({"time over torch's, this run": against} if against else {}),
            "speedup over the root": f"{summary['speedup']:.3f}",
            "root": summary["root"][:12],
            "best": summary["best"][:12],
            "bits": f"changed: {bits['root']} -> {bits['best']}" if bits["changed"] else "as the root's",
            "audited": summary["audited"],
            "verified": summary["verified"],
            "rejected": rejected or "none",
            "promotions": summary["promotions"],
            "elements compared as bits": summary["comparisons"],
            "unequal in accepted candidates": summary["unequal"],
            **_model(summary["model"]),
            "smallest gain provable": None if gain is None else f"{100 * gain:.1f}%",
            "seconds": summary["seconds"],
            "ended by": summary.get("ended_by"),
            "stored in": summary["study"],
        },
    )


def held_out(console: Console, rows: Sequence[Document]) -> None:
    """Workloads that proposers do not see, as the audit that promoted the best measured them."""
    names, shared = short_names([row["workload"] for row in rows])
    grid = Grid(
        f"held out, not shown to proposers  {shared}".rstrip(), ("", "root", "best", "best/root", "limit")
    )
    for name, row in zip(names, rows, strict=True):
        grid.add(name, row["root_ms"], row["best_ms"], row["ratio"], row["limit"])
    grid.show(console)


def _model(model: Document | None) -> Document:
    """What a language model cost, as far as its endpoint tells."""
    if model is None:
        return {}
    tokens = [model["tokens_in"], model["tokens_out"]]
    told = "unknown" if None in tokens else f"{tokens[0]:,} read, {tokens[1]:,} written"
    if model["calls_without_usage"] and told != "unknown":
        told += f", and {model['calls_without_usage']} calls that told none"
    attempts = ", ".join(f"{count} {outcome}" for outcome, count in model["attempts"].items())
    return {
        "model": model["model"],
        "its attempts": attempts or "none",
        "its calls": model["calls"],
        "its tokens": told,
        "its cost": "unknown" if model["money"] is None else f"${model['money']:.4f}",
    }


def _workloads(console: Console, summary: Document, beside: Mapping[str, Document]) -> None:
    columns = ("root", "best", "shipped") if beside else ("root", "best")
    names, shared = short_names([row["workload"] for row in summary["workloads"]])
    headers = ["workload, ms a call", *columns, *(["torch"] if beside else []), "best/root", "limit"]
    title = f"{summary['operator']} on {summary['device']}, {summary['policy']} bits, cold"
    grid = Grid(f"{title}; {shared}" if shared else title, headers)
    for name, row in zip(names, summary["workloads"], strict=True):
        times = beside.get(row["workload"], row)
        cells = [times[f"{column}_ms"] for column in columns]
        peer = [min(times["peers"].values(), default=None)] if beside else []
        grid.add(name, *cells, *peer, row["ratio"], row["limit"])
    grid.show(console)


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Names of workloads without the axes that all of them share, and those axes."""
    split = [name.rstrip("]").partition("[") for name in names]
    axes = [axes.split(",") for _, _, axes in split]
    shared = [axis for axis in axes[0] if all(axis in each for each in axes)] if len(axes) > 1 else []
    kept = ([axis for axis in each if axis not in shared] for each in axes)
    short = [f"{phase} {' '.join(each)}" for (phase, _, _), each in zip(split, kept, strict=True)]
    return short, " ".join(shared)


def _regimes(console: Console, summary: Document, beside: Mapping[str, Document]) -> None:
    columns = ("root", "best", "shipped") if beside else ("root", "best")
    headers = ["regime, ms a step", *columns, *(["torch"] if beside else []), "best/root"]
    grid = Grid("", headers)
    for regime in summary["regimes"]:
        if beside:
            times = a_step(summary, beside, regime["regime"])
            cells = (None if math.isnan(times[name]) else times[name] for name in (*columns, "torch"))
            grid.add(regime["regime"], *cells, regime["ratio"])
        else:
            grid.add(regime["regime"], regime["root_ms"], regime["best_ms"], regime["ratio"])
    grid.show(console)


def a_step(summary: Document, beside: Mapping[str, Document], phase: str | None = None) -> dict[str, float]:
    """Milliseconds a step of each contender measured side by side, of one regime or of all."""
    rows = [row for row in summary["workloads"] if phase in (None, row["phase"])]
    rows = [row for row in rows if beside[row["workload"]]["peers"]] or rows  # what torch has to compare with
    found = dict.fromkeys(("root", "best", "shipped", "torch"), 0.0)
    for row in rows:
        times = beside[row["workload"]]
        for name in ("root", "best", "shipped"):
            found[name] += row["weight"] * times[f"{name}_ms"]
        found["torch"] += row["weight"] * min(times["peers"].values(), default=math.nan)
    return found


def _objective(objective: Document | None) -> str | None:
    if objective is None:
        return None
    bound = f", at most {objective['upper']:.3f}" if objective["upper"] < 1 else ""
    root, best = text(objective["root_ms"]), text(objective["best_ms"])
    return f"{root} -> {best} (ratio {objective['ratio']:.3f}{bound})"


def ablation(console: Console, document: Document) -> None:
    """Arms of an ablation: the lowest objective measured, over the root's, intervals over the repeats."""
    grid = Grid(
        "", ("arm", "repeats", "audits", "lowest, over root", "95%", "over full", "95%", "proven", "seconds")
    )
    for name, arm in document["arms"].items():
        cells = [arm[key] for key in ("objective", "over_full", "proven")]
        objective, over, proven = cells
        grid.add(
            name,
            len(arm["repeats"]),
            arm["audits"],
            objective["mean"],
            _between(objective),
            over["mean"],
            _between(over),
            proven["mean"],
            arm["seconds"],
        )
    grid.show(console)
    line(console, "Tokens: none, the knob proposer asks no model.")


def _between(interval: Document) -> str:
    return "" if interval["low"] is None else f"{interval['low']:.3f} to {interval['high']:.3f}"
