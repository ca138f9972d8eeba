"""Certificates: this machine's, in the user's data folder, and committed ones, checked against sources."""

import json
import secrets
import time
from pathlib import Path
from typing import Any

from kernelbraid import ops
from kernelbraid.audit.environment import fingerprint
from kernelbraid.audit.orders import harness_hash
from kernelbraid.audit.verify import Progress, Report, in_use, verify
from kernelbraid.ir.evidence import Certificate, Level
from kernelbraid.ops import installed
from kernelbraid.ops.problem import Operator


def certificate(report: Report) -> Certificate:
    """Return the certificate that a report amounts to.

    Raises:
        ValueError: a requirement does not hold, or only a screen was done.
    """
    contract = report.operator.contract
    if not report.held:
        failed = next(verdict.requirement for verdict in report.verdicts if not verdict.held)
        raise ValueError(f"{failed} does not hold: no certificate")
    if report.level is not Level.FULL:
        raise ValueError(f"a certificate needs a full verification, not a {report.level}")
    shipped = {ops.source(report.operator, file).sha256: file for file in report.operator.files}
    return Certificate(
        operator=report.operator.name,
        contract=contract.hash,
        implementation=report.source.sha256,
        file=shipped.get(report.source.sha256, ""),
        bits_ids=report.bits_ids,
        verdicts=report.verdicts,
        specialisations=report.specialisations,
        environment=report.environment,
        harness=harness_hash(report.operator.name),
        seed=report.seed,
        issued=time.time(),
    )


def certificate_path(operator: str, architecture: str, device: str) -> Path:
    """Return where this user's certificate for a device lives; it may not exist."""
    name = installed.folder(operator, architecture, device).name
    return installed.home() / "certificates" / operator / architecture / f"{name}.certificate.json"


def certify_local(operator: Operator, *, progress: Progress = lambda _, __: None) -> tuple[Report, Path]:
    """Verify the implementation in use and write a certificate for this machine into the user's data folder.

    Raises:
        ValueError: its device is not there, or a requirement does not hold.
        RuntimeError: the implementation does not run, or the folder cannot be written.
    """
    report = verify(operator, resume=True, progress=progress)
    return report, write_local(report)


def write_local(report: Report) -> Path:
    """Write a report's certificate into the user's data folder; raises as `certify_local` does."""
    issued = certificate(report)
    environment = report.environment
    path = certificate_path(report.operator.name, environment.architecture, environment.device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        temporary.write_text(issued.dumps(), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def local_certificate(operator: Operator) -> Certificate | None:
    """Return this machine's certificate, None unless it is for what is in use: source, contract, judge."""
    try:
        environment = fingerprint(operator.backend, rates=False)
    except ValueError:  # no such device here
        return None
    path = certificate_path(operator.name, environment.architecture, environment.device)
    try:
        found = Certificate.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    current = (operator.contract.hash, in_use(operator).sha256, harness_hash(operator.name))
    same = (found.contract, found.implementation, found.harness) == current
    return found if same and found.environment.versions == environment.versions else None


def check_evidence(folder: Path) -> dict[str, Any]:
    """Check committed certificates and benchmarks against this checkout's sources, contracts and judge.

    Args:
        folder: holds `<architecture>/*.certificate.json` and `<architecture>/*.bench.json`.

    Returns:
        `certificates`, `benchmarks` and `mismatched` (counts), and `problems` (file and reason).

    Raises:
        ValueError: no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder of evidence at {folder}")
    certificates = sorted(folder.glob("*/*.certificate.json"))
    benchmarks = sorted(folder.glob("*/*.bench.json"))
    problems: list[dict[str, str]] = []
    for path, examine in [
        *((path, _certificate_problem) for path in certificates),
        *((path, _benchmark_problem) for path in benchmarks),
    ]:
        try:
            problem = examine(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"unreadable: {error}"
        if problem:
            problems.append({"file": str(path.relative_to(folder)), "reason": problem})
    return {
        "certificates": len(certificates),
        "benchmarks": len(benchmarks),
        "mismatched": len(problems),
        "problems": problems,
    }


def _certificate_problem(path: Path) -> str:
    """Why a certificate does not speak of this checkout; empty where it does."""
    found = Certificate.loads(path.read_text(encoding="utf-8"))
    operator = ops.get(found.operator, _backend_of(path))
    if found.environment.architecture != path.parent.name:
        return f"it is for architecture {found.environment.architecture}"
    if found.harness != harness_hash(operator.name):
        return "the judge has changed since it was issued"
    wanted = {requirement.id for requirement in operator.contract.requirements}
    if {verdict.requirement for verdict in found.verdicts if verdict.held} != wanted:
        return "it does not hold every requirement of the contract"
    return _hash_problem(operator, found.contract, {found.implementation}, found.file)


def _benchmark_problem(path: Path) -> str:
    found = json.loads(path.read_text(encoding="utf-8"))
    operator = ops.get(found["operator"], _backend_of(path))
    if found["environment"]["architecture"] != path.parent.name:
        return f"it was run on architecture {found['environment']['architecture']}"
    if not all(row["verified"] is True for row in found["rows"]):
        return "it has rows whose bits were not verified"
    sources = {str(row["implementation"]) for row in found["rows"]}
    return _hash_problem(operator, found["contract"], sources, None)


def _backend_of(path: Path) -> str:
    """Evidence lies in a folder named like its architecture."""
    return "cpu" if path.parent.name == "cpu" else "cuda"


def _hash_problem(operator: Operator, contract: str, implementations: set[str], file: str | None) -> str:
    if contract != operator.contract.hash:
        return f"it is for another state of the contract {operator.contract.name}"
    names = operator.files if file is None else (file,)
    current = {ops.source(operator, name).sha256 for name in names}
    if not implementations <= current:
        changed = min(implementations - current)
        return f"{', '.join(names)} is no longer the source {changed[:12]} that it speaks of"
    return ""
