"""Evidence of whole models: measured rows in committed files, tied to the sources that they speak of.

`<folder>/<architecture>/train.bench.json` and `profile.bench.json` hold rows beside the environment, the
commit, and hashes of every operator's contract and implementation and of the modules that a row runs. A file
whose sources changed says nothing about this checkout, and `problem` tells so.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernelbraid import ops
from kernelbraid.audit.bench import commit
from kernelbraid.audit.environment import fingerprint
from kernelbraid.audit.verify import in_use

PACKAGE = Path(__file__).resolve().parents[1]
_LAYER = ("accumulating", "layer", "model", "operators", "vendor", "vendor_cuda")
_STEP = (
    "advantages",
    "buckets",
    "drawing",
    "losses",
    "parallel",
    "phases",
    "pieces",
    "policy",
    "rollout",
    "schedule",
    "sharded",
    "spot_check",
    "trainer",
    "update",
)
SOURCES: Mapping[str, tuple[str, ...]] = {
    "profile": tuple(f"models/{name}.py" for name in (*_LAYER, "profile")),
    "train": (
        *(f"models/{name}.py" for name in _LAYER),
        *(f"rl/{name}.py" for name in (*_STEP, "arm", "comparison")),
    ),
}
"""Modules whose change makes a file of a kind speak of something else."""


FILES = tuple(f"{kind}.bench.json" for kind in SOURCES)
"""Names of the files, beside those of operators."""


def stamp(kind: str, device: str, *, rates: bool = False) -> dict[str, Any]:
    """A document without rows, of this checkout on this machine.

    Args:
        kind: `train` or `profile`.
        device: `cpu` or `cuda`.
        rates: also measure operations and bytes a second.

    Raises:
        ValueError: the device is not there.
    """
    environment = fingerprint(device, rates=rates)
    backend = [each for each in ops.OPERATORS if each.backend == device]
    return {
        "kind": kind,
        "environment": {**asdict(environment), "versions": dict(environment.versions)},
        **commit(),
        "contracts": {each.name: each.contract.hash for each in backend},
        "implementations": {each.name: in_use(each).sha256 for each in backend},
        "sources": sources(kind),
        "rows": [],
    }


def sources(kind: str) -> dict[str, str]:
    """SHA-256 of the modules that a kind of row runs, by path in the package."""
    return {
        name: hashlib.sha256((PACKAGE / name).read_bytes()).hexdigest()
        for name in SOURCES[kind]
        if (PACKAGE / name).is_file()
    }


def place(document: Mapping[str, Any], folder: Path) -> Path:
    """Where a document is written under a folder."""
    return folder / str(document["environment"]["architecture"]) / f"{document['kind']}.bench.json"


def write(document: Mapping[str, Any], folder: Path) -> Path:
    """Write a document whole or not at all; returns its path."""
    path = place(document, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")
    temporary.replace(path)
    return path


def kept(document: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Rows that a folder has of the same sources, device and versions as a document; none of others."""
    try:
        found = json.loads(place(document, folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(found, dict) or _subject(found) != _subject(document):
        return []
    rows = found["rows"]
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _subject(document: Mapping[str, Any]) -> tuple[Any, ...]:
    environment = document.get("environment", {})
    parts = [document.get(name) for name in ("kind", "contracts", "implementations", "sources")]
    return (*parts, environment.get("device"), environment.get("versions"))


def problem(path: Path) -> str:
    """Why a file does not speak of this checkout; empty where it does.

    Raises:
        OSError, ValueError, KeyError, TypeError: it cannot be read.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    kind = path.name.removesuffix(".bench.json")
    if found["kind"] != kind:
        return f"it holds rows of {found['kind']}"
    if found["environment"]["architecture"] != path.parent.name:
        return f"it was run on architecture {found['environment']['architecture']}"
    if not found["rows"]:
        return "it has no rows"
    if any(row.get("unequal") for row in found["rows"]):
        return "it has rows whose bits were not equal"
    backend = "cpu" if path.parent.name == "cpu" else "cuda"
    operators = {each.name: each for each in ops.OPERATORS if each.backend == backend}
    for name, contract in found["contracts"].items():
        if name not in operators or operators[name].contract.hash != contract:
            return f"it is for another state of the contract of {name}"
    for name, implementation in found["implementations"].items():
        shipped = {ops.source(operators[name], file).sha256 for file in operators[name].files}
        if implementation not in shipped:
            return f"{name} is no longer the source {implementation[:12]} that it speaks of"
    now = sources(kind)
    changed = sorted(
        name for name in {**now, **found["sources"]} if now.get(name) != found["sources"].get(name)
    )
    return f"{', '.join(changed)} changed since it was measured" if changed else ""


def problems(folder: Path) -> list[dict[str, str]]:
    """Files of models under `<folder>/<architecture>` that do not speak of this checkout, with the reason."""
    found = []
    for path in sorted(each for name in FILES for each in folder.glob(f"*/{name}")):
        try:
            reason = problem(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"unreadable: {error}"
        if reason:
            found.append({"file": str(path.relative_to(folder)), "reason": reason})
    return found
