"""Audits on the machines of a Ray cluster, one comparison a device at a time.

A job is divided among the devices: whole hosts for the CPU, single GPUs for CUDA. Each part runs as an audit
that travels does, in a process of its own on the host, beside the root and the incumbent, so that ratios are
of one device. Hosts need the same kernelbraid; its hash is checked there.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from kernelbraid.audit import jobs
from kernelbraid.ir.evidence import AuditEvidence
from kernelbraid.search.executors import lost, queued
from kernelbraid.search.executors.fate import ends_with_its_parent

LOSSES = 3
"""Times that one part of a job may lose its worker before the job is given up."""
POLL_SECONDS = 0.5
HEAD_SECONDS = 20.0
"""How long a cluster may take to answer before it counts as gone."""


class Work(Protocol):
    """What a task of the cluster does with a job, as JSON: returns `evidence` and `queue_seconds`."""

    def __call__(self, job: dict[str, Any], minutes: float | None) -> dict[str, Any]: ...


class ClusterLost(RuntimeError):  # noqa: N818 - what happened
    """The cluster, or every device of it, went away: the audits stay pending."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the cluster."""

    node: str
    number: int


@dataclass(slots=True)
class _Part:
    job: jobs.AuditJob
    losses: list[Device] = field(default_factory=list)

    @property
    def requests(self) -> list[str]:
        return [each.request for each in self.job.candidates]


class RayExecutor:
    """Runs jobs on a Ray cluster.

    A worker that goes away with its part of a job is told as `lost`, and the part runs on another device
    where there is one. Waiting for a device is told as `queue` and counts against no limit.

    Args:
        address: of the cluster, such as `auto` or `ray://host:10001`; None starts one on this machine.
        work: what a task does; by default it runs `kernelbraid audit run` on its host.

    Raises:
        RuntimeError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, address: str | None = None, work: Work | None = None) -> None:
        self._ray = _ray()
        self._work = work or audit_here
        self._address = address
        self._connect()

    @property
    def devices(self) -> int:
        """Hosts, or GPUs if there are any: as many comparisons run at a time."""
        gpus = len(self._devices("cuda"))
        return gpus or max(1, len(self._devices("cpu")))

    def __call__(
        self,
        job: jobs.AuditJob,
        results: Path,
        *,
        minutes: float | None = None,
        progress: Callable[[jobs.Event], None] | None = None,
    ) -> Path:
        """Divide a job among the cluster's devices and append what comes back.

        Raises:
            ClusterLost: the cluster went away, or one part lost LOSSES workers.
            ValueError: the job is for another kernelbraid than the hosts have.
            RuntimeError: the cluster has no such device, or the root does not run there.
        """
        with jobs.ResultsWriter(job, results) as writer:
            waiting = [each for each in job.candidates if each.request not in writer.answered]
            if waiting:
                self._connect()
                _Run(self, job, writer, minutes, progress or (lambda _: None)).run(waiting)
        return results

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        try:
            self._ray.init(
                address=self._address,
                log_to_driver=False,
                logging_level="ERROR",
                include_dashboard=False if self._address is None else None,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = self._address or "on this machine"
            raise RuntimeError(f"no Ray cluster {where}: {_first_line(error)}") from error

    def _devices(self, device: str) -> list[Device]:
        """Devices of the hosts that are there now."""
        found = []
        for node in self._ray.nodes():
            if node["Alive"]:
                count = int(node["Resources"].get("GPU", 0)) if device == "cuda" else 1
                found += [Device(node["NodeID"], number) for number in range(count)]
        return found

    def _start(self, device: Device, kind: str, job: jobs.AuditJob, minutes: float | None) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self._ray.remote(_called).options(
            num_cpus=0,
            num_gpus=1 if kind == "cuda" else 0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(device.node, soft=False),
        )
        return remote.remote(self._work, job.to_json(), minutes)


class _Run:
    """One job on its way."""

    def __init__(
        self,
        executor: RayExecutor,
        job: jobs.AuditJob,
        writer: jobs.ResultsWriter,
        minutes: float | None,
        progress: Callable[[jobs.Event], None],
    ) -> None:
        self._executor, self._ray = executor, executor._ray
        self._job, self._writer, self._progress = job, writer, progress
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._running: dict[Any, tuple[_Part, Device]] = {}
        self._waits: list[float] = []

    def run(self, candidates: Sequence[jobs.Candidate]) -> None:
        devices = self._free()
        if not devices:
            raise RuntimeError(f"the Ray cluster has no device for {self._job.device}")
        parts = [self._part(piece) for piece in divided(candidates, len(devices))]
        try:
            while parts or self._running:
                parts = self._begin(parts)
                parts += self._wait()
                self._progress(jobs.Event("cluster", "", f"{len(self._running)} parts run", None, {}))
            if (waited := min(self._waits, default=0.0)) > 0:
                self._progress(queued(waited))  # while one part waits another may run: that was not waiting
        finally:
            for reference in self._running:
                with contextlib.suppress(Exception):
                    self._ray.cancel(reference, force=True)

    def _part(self, candidates: Sequence[jobs.Candidate]) -> _Part:
        return _Part(replace(self._job, id=secrets.token_hex(8), candidates=tuple(candidates)))

    def _free(self) -> list[Device]:
        busy = {device for _, device in self._running.values()}
        try:
            return [each for each in self._executor._devices(self._job.device) if each not in busy]
        except Exception as error:
            raise ClusterLost(f"the Ray cluster went away: {_first_line(error)}") from error

    def _begin(self, parts: list[_Part]) -> list[_Part]:
        """Start what fits on the free devices, preferring those that a part has not lost; return the rest."""
        left = []
        free = self._free() if parts else []
        for part in parts:
            fresh = [each for each in free if each.node not in {lost.node for lost in part.losses}]
            if not (fresh or free):
                left.append(part)
                continue
            device = (fresh or free)[0]
            free.remove(device)
            minutes = None if self._deadline is None else max(0.0, self._deadline - time.monotonic()) / 60
            reference = self._executor._start(device, self._job.device, part.job, minutes)
            self._running[reference] = (part, device)
        if left and not self._running:
            raise ClusterLost("the Ray cluster has no device left")
        return left

    def _wait(self) -> list[_Part]:
        """Take in what is done, and return the parts that lost their worker."""
        again = []
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=POLL_SECONDS)
        for reference in done:
            part, device = self._running.pop(reference)
            try:
                self._take(self._ray.get(reference, timeout=HEAD_SECONDS), part)
            except self._ray.exceptions.RayTaskError as error:
                raise _cause(error) from error
            except (self._ray.exceptions.RayError, ConnectionError, TimeoutError) as error:
                part.losses.append(device)
                reason = f"a worker on {device.node[:12]} went away: {type(error).__name__}"
                self._progress(lost(part.requests, reason))
                if len(part.losses) >= LOSSES:
                    raise ClusterLost(f"{reason}, {LOSSES} times; the audits stay pending") from error
                again.append(part)
        return again

    def _take(self, answer: Mapping[str, Any], part: _Part) -> None:
        wanted = set(part.requests)
        for each in answer["evidence"]:
            evidence = AuditEvidence.from_json(each)
            if evidence.job in wanted and evidence.job not in self._writer.answered:
                self._writer.append(evidence)
        self._waits.append(float(answer["queue_seconds"]))


def divided(candidates: Sequence[jobs.Candidate], devices: int) -> list[Sequence[jobs.Candidate]]:
    """Split candidates into as many equal pieces as there are devices, none empty."""
    pieces = min(devices, len(candidates))
    return [candidates[number::pieces] for number in range(pieces)]


def audit_here(job: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    """Run a job on this host in a process of its own, which ends with this one."""
    with tempfile.TemporaryDirectory(prefix="kernelbraid-ray-") as folder:
        path, results = Path(folder) / "job.json", Path(folder) / "results.jsonl"
        jobs.write_job(jobs.AuditJob.from_json(job), path)
        command = [
            sys.executable,
            "-m",
            "kernelbraid",
            "audit",
            "run",
            str(path),
            "-o",
            str(results),
            "--json",
        ]
        if minutes is not None:
            command += ["--minutes", f"{minutes:.4f}"]
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            preexec_fn=ends_with_its_parent(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        )
        if ended.returncode != 0:
            last = ended.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
            kind = ValueError if ended.returncode == 2 else RuntimeError
            raise kind(f"the audit on {os.uname().nodename} failed: {last[0]}")
        found = [each.to_json() for each in jobs.read_results(results).evidence]
        return {"evidence": found, "queue_seconds": json.loads(ended.stdout)["queue_seconds"]}


def _called(work: Work, job: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    return work(job, minutes)


def _ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A head that went away: Ray ends this process then, after a minute unless told otherwise, and waits in
    # calls that take no time limit until it does.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", f"{HEAD_SECONDS:.0f}")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise RuntimeError(
            "the Ray executor needs the extra `ray`: pip install 'kernelbraid[ray]'"
        ) from error
    return ray


def _cause(error: Exception) -> Exception:
    """What a task raised, as the caller would have seen it here."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ValueError | RuntimeError):
        return type(cause)(str(cause)) if type(cause) in (ValueError, RuntimeError) else cause
    return RuntimeError(f"an audit on the cluster failed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
