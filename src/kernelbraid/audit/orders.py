"""What an audit is asked: a job, as one file that carries everything but the judging code."""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from kernelbraid.contract import BitPolicy, Source, Workload, content_hash
from kernelbraid.ir.evidence import Level

FORMAT = "kernelbraid audit job 1"

BESIDE_THE_JUDGE = frozenset({"bench", "beside", "sanitize", "selftest"})
"""Files of this package that use the judging code and give no verdict."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One request of a job: how far to audit which source."""

    request: str
    """Id under which the evidence comes back."""
    source: Source
    level: Level


@dataclass(frozen=True, slots=True)
class AuditJob:
    """Audits to be run together: candidates beside one root and one incumbent.

    Raises ValueError where requests repeat, nothing is to be timed, or a candidate exceeds the job's level.
    """

    id: str
    study: str
    operator: str
    contract: str
    """Hash of the contract."""
    harness: str
    """`harness_hash` of the code that must judge."""
    device: str
    """`cpu` or `cuda`."""
    level: Level
    """The furthest that any candidate goes."""
    policy: BitPolicy
    dtype: str
    constant_axes: tuple[dict[str, int], ...]
    workloads: tuple[Workload, ...]
    root: Source
    incumbent: Source
    candidates: tuple[Candidate, ...]
    separate: bool = False
    """Time every role in a process of its own even where sources are equal; otherwise they share one."""
    to_beat: float = 1.0
    """Share of the incumbent's aggregate latency that the best candidate before these needs: one above it
    cannot be promoted next, and is timed no further than it takes to see that."""

    def __post_init__(self) -> None:
        requests = [candidate.request for candidate in self.candidates]
        if len(set(requests)) != len(requests):
            raise ValueError("a job must not name a request twice")
        if not self.workloads or not self.constant_axes:
            raise ValueError("a job needs at least one workload and one set of constant axes")
        if not 0 < self.to_beat <= 1:
            raise ValueError(f"to_beat must lie above 0 and be at most 1, got {self.to_beat}")
        levels = list(Level)
        if any(levels.index(c.level) > levels.index(self.level) for c in self.candidates):
            raise ValueError(f"a candidate asks for more than the job's level {self.level}")

    @property
    def hash(self) -> str:
        """SHA-256 of everything the job says."""
        return content_hash(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "AuditJob":
        """Rebuild a job written by `to_json`; raises ValueError on anything malformed."""
        try:
            return cls(
                **{
                    **data,
                    "level": Level(data["level"]),
                    "policy": BitPolicy(data["policy"]),
                    "constant_axes": tuple(dict(axes) for axes in data["constant_axes"]),
                    "workloads": tuple(_workload(item) for item in data["workloads"]),
                    "root": _source(data["root"]),
                    "incumbent": _source(data["incumbent"]),
                    "candidates": tuple(
                        Candidate(item["request"], _source(item["source"]), Level(item["level"]))
                        for item in data["candidates"]
                    ),
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an audit job: {error!r}") from error


def _source(item: Mapping[str, Any]) -> Source:
    source = Source(item["text"], item["label"])
    if source.sha256 != item["sha256"]:
        raise ValueError(f"the source {source.label or source.short} does not match its hash")
    return source


def _workload(item: Mapping[str, Any]) -> Workload:
    axes = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in item["axes"])
    return Workload(item["phase"], axes, item["weight"], item["limit"])


@dataclass(frozen=True, slots=True)
class Event:
    """Progress of an audit, for people."""

    stage: str
    """tripwires, build, smoke, screen, timing, full or done."""
    candidate: str
    """Short hash of the source; empty for the job as a whole."""
    message: str
    fraction: float | None = None
    """Share of the stage that is done, where it is known."""
    data: dict[str, Any] = field(default_factory=dict)


def harness_hash(operator: str) -> str:
    """Return the hash of what judges an operator: contract, problems, evidence, audit, its statements.

    Other operators, implementations, the public functions in front of them, benchmarks and the self-test are
    not part of it.
    """
    package = Path(__file__).resolve().parents[1]
    files = [package / "contract.py", package / "ir" / "evidence.py"]
    files += [package / "ops" / name for name in ("problem.py", "formats.py", "numbers.py", "rows.py")]
    files += [file for file in (package / "audit").glob("*.py") if file.stem not in BESIDE_THE_JUDGE]
    own = package / "ops" / operator
    files += [file for file in own.glob("*.py") if not _implementation_side(file.stem)]
    found = sha256()
    for file in sorted(files):
        content = file.read_bytes()
        found.update(f"{file.relative_to(package)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _implementation_side(stem: str) -> bool:
    return stem in ("api", "arguments", "cpu", "registered") or stem.startswith(("gpu", "peers"))


def write_job(job: AuditJob, path: Path) -> None:
    """Write a job file in one step: either the whole file is there afterwards, or what was there before.

    Raises:
        RuntimeError: the file cannot be written.
    """
    body = job.to_json()
    text = json.dumps({"format": FORMAT, "hash": content_hash(body), "job": body}, indent=1)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RuntimeError(f"cannot write the job file {path}: {error.strerror or error}") from error


def read_job(path: Path) -> AuditJob:
    """Read a job file.

    Raises:
        ValueError: there is no such file, it is no job file or was changed, or other code must judge it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the job file {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a job file: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("job"), dict):
        raise ValueError(f"{path} is not a job file of this version ({FORMAT})")
    if content_hash(data["job"]) != data.get("hash"):
        raise ValueError(f"{path} is corrupt: its content does not match its hash; export the job again")
    job = AuditJob.from_json(data["job"])
    check_harness(job)
    return job


def check_harness(job: AuditJob) -> None:
    """Raise ValueError unless this installation judges as the job demands."""
    here = harness_hash(job.operator)
    if job.harness != here:
        raise ValueError(
            f"job {job.id} was made for another version of the judging code ({job.harness[:12]}, here "
            f"{here[:12]}): install the version that exported it, or export it again"
        )
