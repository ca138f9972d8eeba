"""What the machine and the operators are, and what verifying them found, as JSON-able documents."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernelbraid import ops
from kernelbraid.audit import certificates, sanitize, verify
from kernelbraid.audit.environment import fingerprint, gpus, require_device
from kernelbraid.ir.evidence import Level
from kernelbraid.models import evidence
from kernelbraid.ops import installed
from kernelbraid.ops.problem import Operator


def environment(device: str) -> dict[str, Any]:
    """This machine as audits record it, and the winners that are installed on it."""
    found = fingerprint(device)
    winners = {}
    for operator in ops.OPERATORS:
        source = installed.active(operator.name, found.architecture, found.device)
        if source is not None:
            winners[operator.name] = source.sha256
    return {
        **asdict(found),
        "versions": dict(found.versions),
        "gpus": list(gpus()),
        "home": str(installed.home()),
        "installed": winners,
    }


def operators() -> dict[str, Any]:
    """Every operator, and the certificates that hold for it on this machine."""
    return {
        "operators": [
            _listed([each for each in ops.OPERATORS if each.name == name])
            for name in dict.fromkeys(operator.name for operator in ops.OPERATORS)
        ]
    }


def _listed(backends: Sequence[Operator]) -> dict[str, Any]:
    """One operator, from its entries a backend."""
    first = backends[0]
    relations = [relation.name for each in backends for relation in each.contract.relations]
    return {
        "name": first.name,
        "contract": first.contract.name,
        "contract_hashes": {each.backend: each.contract.hash for each in backends},
        "dtypes": {each.backend: list(each.contract.dtypes) for each in backends},
        "backends": [each.backend for each in backends],
        "backward": any("backward" in each.regimes for each in backends),
        "entry_points": {each.backend: list(each.entry_points) for each in backends},
        "regimes": {each.backend: list(each.regimes) for each in backends},
        "relations": list(dict.fromkeys(relations)),
        "grids": {
            each.backend: {name: len(workloads) for name, workloads in each.grids.items()}
            for each in backends
        },
        "certificates": [found for each in backends for found in _certificates(each)],
    }


def _certificates(operator: Operator) -> list[dict[str, Any]]:
    """This machine's certificate for the implementation in use, if there is a current one."""
    found = certificates.local_certificate(operator)
    if found is None:
        return []
    return [
        {
            "implementation": found.implementation,
            "device": found.environment.device,
            "bits_ids": dict(found.bits_ids),
            "issued": found.issued,
        }
    ]


def verified(
    names: Sequence[str], device: str, level: str, local: bool, progress: Callable[[str, float], None]
) -> dict[str, Any]:
    """Verify operators, all if none is named; with `local`, certify this machine.

    A full verification that was interrupted goes on after the scopes that it had finished.

    Raises:
        ValueError: an unknown operator, device or level; or a certificate was asked of a screen.
    """
    levels = {each.value: each for each in (Level.SCREEN, Level.FULL)}
    if level not in levels:
        raise ValueError(f"level must be one of {', '.join(levels)}, got {level!r}")
    if local and level != Level.FULL:
        raise ValueError(f"a certificate needs level full, got {level}")
    found = []
    wanted = names or [each.name for each in ops.OPERATORS if each.backend == device]
    for operator in [ops.get(name, device) for name in wanted]:
        resume = level == Level.FULL
        report = verify.verify(operator, level=levels[level], resume=resume, progress=progress)
        certificate = certificates.write_local(report) if local and report.held else None
        found.append({**report.to_json(), "certificate": str(certificate) if certificate else None})
    return {
        "operators": found,
        "held": all(each["held"] for each in found),
        "comparisons": sum(each["comparisons"] for each in found),
        "unequal": sum(each["unequal"] for each in found),
    }


def sanitized(names: Sequence[str], device: str) -> dict[str, Any]:
    """Run small programs of operators, all if none is named, under CUDA's compute-sanitizer."""
    require_device(device)
    wanted = names or [each.name for each in ops.OPERATORS if each.backend == device]
    found = [sanitize.sanitize(ops.get(name, device)) for name in wanted]
    return {"operators": found, "held": all(each["held"] for each in found)}


def one_case(case_id: str, device: str) -> dict[str, Any]:
    """Repeat one case alone."""
    name = case_id.partition("/")[0]
    if name not in {operator.name for operator in ops.OPERATORS}:
        raise ValueError(f"{case_id!r} is no case: its id is what a failing check prints first")
    case, verdict = verify.verify_case(ops.get(name, device), case_id)
    return {**asdict(verdict), "case": case.id, "regime": case.regime, "shape": asdict(case.shape)}


def committed(folder: Path | None) -> dict[str, Any]:
    """Check committed evidence: of `folder`, else of ./evidence, else of this package's checkout."""
    places = (Path("evidence"), Path(__file__).resolve().parents[3] / "evidence")
    chosen = folder or next((place for place in places if place.is_dir()), places[0])
    found = certificates.check_evidence(chosen)
    problems = [each for each in found["problems"] if Path(each["file"]).name not in evidence.FILES]
    problems += evidence.problems(chosen)
    return {**found, "mismatched": len(problems), "problems": problems}
