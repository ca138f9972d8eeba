"""A study as an MCP server: the verbs of a proposer outside as tools, over stdio or HTTP.

Nothing is kept between calls: each one opens the study's folder, so that several agents, servers and command
lines may work on one study at once.
"""

import json
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread

try:
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
except ImportError as error:  # pragma: no cover - a test takes the library away in a process of its own
    raise RuntimeError("the MCP server needs the extra `mcp`: pip install 'kernelbraid[mcp]'") from error

import kernelbraid
from kernelbraid.audit import jobs
from kernelbraid.contract import Source
from kernelbraid.ir.columns import plain
from kernelbraid.report import documents
from kernelbraid.report.failure import ExitCode, classify, sentence
from kernelbraid.report.progress import described
from kernelbraid.search import audits, loop
from kernelbraid.search.proposers import external
from kernelbraid.search.study import Study

INSTRUCTIONS = """A study searches for a faster implementation of one numerical operator whose bits obey a
contract. `next` tells the task, verified parents, opportunities, failures and what is left; `source` and
`evidence` tell about one implementation. Write a complete source, `submit` it with its parents and a
hypothesis, and let it be audited: only the audit decides. Failures are evidence too: read their reasons
before the next candidate. Implementations are named by their SHA-256, or its first digits."""
PROGRESS_SECONDS = 1.0
"""At most one message of an audit's progress in so long."""


def server(
    folder: Path, *, by: str = "mcp", files: bool = True, run_job: audits.RunJob = jobs.run_job
) -> MCPServer[Any]:
    """Return a server of one study; `run` starts it.

    Args:
        folder: of the study.
        by: who submits and decides, where a call does not say.
        files: whether a candidate may be named by its file, on the machine of the server.
        run_job: runs audits.

    Raises:
        ValueError: there is no study.
        RuntimeError: the folder cannot be read or written.
    """
    with Study.open(folder) as study:
        about = f"{study.operator.name} on {study.store.study.device}"
    made: MCPServer[Any] = MCPServer(
        name="kernelbraid",
        instructions=f"{INSTRUCTIONS}\nThis study: {about}.",
        version=kernelbraid.__version__,
        log_level="WARNING",
    )

    @made.tool(name="next")
    async def next_(most: int = 10) -> dict[str, Any]:
        """What is needed to write the next candidate: task, parents, opportunities, failures, budget.

        `most` limits each list, the most promising or latest first.
        """
        return await _called(external.next_, folder, most)

    @made.tool()
    async def source(implementation: str) -> dict[str, Any]:
        """An implementation's text, knobs and descent."""
        return await _called(external.source, folder, implementation)

    @made.tool()
    async def evidence(implementation: str) -> dict[str, Any]:
        """Everything that audits found about an implementation, and what was decided on it."""
        return await _called(external.evidence, folder, implementation)

    @made.tool()
    async def submit(
        ctx: Context,
        parents: list[str],
        hypothesis: str,
        text: str = "",
        file: str = "",
        functions: list[str] | None = None,
        regimes: list[str] | None = None,
        expected_effect: str = "",
        requirements_at_risk: list[str] | None = None,
        falsified_by: str = "",
        opportunity: int | None = None,
        by: str = by,
        audit: bool = True,
    ) -> dict[str, Any]:
        """Record a candidate, audit it and decide on promotion; without `audit` it waits for the next audit.

        The candidate is one complete Python source: its `text`, or the path of its `file` where the server
        runs on your machine. `parents` are the verified implementations it was made from. Say the functions
        and regimes that change together, the effect you expect, ids of requirements at risk, and what would
        show the hypothesis wrong. An audit takes seconds to minutes; audits of others come first.
        """
        if bool(text) == bool(file):
            raise ToolError("give either the text of the candidate or its file")
        if file and not files:
            raise ToolError("this server reads no files: give the text of the candidate")
        return await _called(
            partial(
                external.submit,
                folder,
                Source(text) if text else Path(file),
                parents=parents,
                hypothesis=hypothesis,
                functions=functions or (),
                regimes=regimes or (),
                expected_effect=expected_effect,
                requirements_at_risk=requirements_at_risk or (),
                falsified_by=falsified_by,
                opportunity=opportunity,
                by=by,
                audit=audit,
                progress=_teller(ctx),
                run_job=run_job,
            )
        )

    @made.tool()
    async def merge(ours: str, theirs: str) -> dict[str, Any]:
        """Two verified implementations composed over their nearest common ancestor, or what conflicts.

        The text is a candidate like any other: submit it with both as parents.
        """
        return await _called(external.merge, folder, ours, theirs)

    @made.tool()
    async def decide(implementation: str, decision: str, reason: str, by: str = by) -> dict[str, Any]:
        """Record what becomes of an implementation: continue, merge, archive or abandon, and why."""
        return await _called(partial(external.decide, folder, implementation, decision, reason=reason, by=by))

    @made.tool()
    async def show(implementation: str = "") -> dict[str, Any]:
        """The study: its summary and every implementation; or all that is recorded about one of them."""
        return await _called(_show, folder, implementation)

    @made.tool()
    async def diff(a: str, b: str) -> dict[str, Any]:
        """Compare two implementations: knobs, bits, latencies, text."""
        return await _called(_diff, folder, a, b)

    return made


def serve_http(made: MCPServer[Any], host: str, port: int) -> None:
    """Serve over HTTP at `http://host:port/mcp` until interrupted. There is no authentication.

    Raises:
        RuntimeError: the address cannot be used.
    """
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RuntimeError(f"cannot listen at {host}:{port} ({reason}): choose another --port") from error
    made.run("streamable-http", host=host, port=port)


async def _called(verb: Callable[..., Any], *given: Any) -> dict[str, Any]:
    """Run a verb in a thread, and turn what is wrong with the call or the machine into one sentence."""
    try:
        document = await anyio.to_thread.run_sync(partial(verb, *given))
    except Exception as error:
        if classify(error) is ExitCode.DEFECT:
            raise
        raise ToolError(sentence(error)) from error
    found: dict[str, Any] = json.loads(json.dumps(plain(document), default=str))
    return found


def _teller(ctx: Context) -> Callable[[loop.Progress], None]:
    """Tells the client how an audit goes, from the thread that it runs in."""
    told = [0.0, 0.0]

    def tell(progress: loop.Progress) -> None:
        now = time.monotonic()
        if now - told[0] >= PROGRESS_SECONDS:
            told[0], told[1] = now, told[1] + 1
            anyio.from_thread.run(ctx.report_progress, told[1], None, described(progress))

    return tell


def _show(folder: Path, implementation: str) -> dict[str, Any]:
    with Study.open(folder) as study:
        if implementation:
            return documents.implementation(study.store, study.contract, implementation)
        return {**study.summary(), "implementations": documents.implementations(study.store)}


def _diff(folder: Path, a: str, b: str) -> dict[str, Any]:
    with Study.open(folder) as study:
        return documents.difference(study.store, study.contract, a, b)
