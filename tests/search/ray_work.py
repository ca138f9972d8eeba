"""What tasks of a Ray cluster do in tests: modelled audits, and a sign of life for whoever kills them."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.search.fake_audit import FakeAudits

from kernelbraid.audit import jobs


def modelled(job: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    """Answer a job by the model, as `cluster.audit_here` does by an audit."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        FakeAudits()(jobs.AuditJob.from_json(job), results, minutes=minutes)
        found = jobs.read_results(results).evidence
    return {"evidence": [each.to_json() for each in found], "queue_seconds": 0.0}


def marked(job: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    """As `modelled`, after writing down who works: `KB_MARKS/<process>-<candidates>`."""
    node = os.environ.get("RAY_NODE_ID", "") or __import__("ray").get_runtime_context().get_node_id()
    requests = "+".join(each["request"] for each in job["candidates"])
    path = Path(os.environ["KB_MARKS"]) / f"{os.getpid()}.{node}.{requests}"
    path.touch()
    time.sleep(float(os.environ.get("KB_SECONDS", "0")))
    return modelled(job, minutes)


def dies_once(job: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    """End the worker's process the first time that the cluster gets here."""
    flag = Path(os.environ["KB_MARKS"]) / "died"
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return marked(job, minutes)
    os.kill(os.getpid(), 9)
    raise AssertionError


def dies(job: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    os.kill(os.getpid(), 9)
    raise AssertionError


def refuses(job: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    raise ValueError("made for another version of the judging code")
