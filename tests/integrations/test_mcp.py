"""The MCP server, driven by the SDK's own client over stdio and HTTP."""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="it is part of the extras mcp and dev")

from mcp import Client, StdioServerParameters
from tests.search.fake_audit import OPERATOR, ROOT, FakeAudits, new_study

from kernelbraid.contract import Source
from kernelbraid.integrations import mcp as integration
from kernelbraid.ir import query
from kernelbraid.ir.evidence import Level
from kernelbraid.search import loop
from kernelbraid.search.proposers import edits
from kernelbraid.search.proposers.external import External
from kernelbraid.search.study import Study

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study whose root is audited."""
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, proposer="external") as study:
        loop.run(study, External(), run_job=fake)
    return tmp_path / "s"


def child(**settings: int | str) -> Source:
    return edits.apply(ROOT, settings, OPERATOR.contract, label="child.py")


def stdio(folder: Path) -> StdioServerParameters:
    """The command of the server, auditing by a model in a process of its own."""
    code = f"from tests.integrations.served import main; main({str(folder)!r})"
    environment = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'src'}"}
    return StdioServerParameters(command=sys.executable, args=["-c", code], env=environment, cwd=REPOSITORY)


@contextmanager
def http(folder: Path) -> Iterator[str]:
    """The server at a free port, in a thread."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = integration.server(folder, files=False, run_job=FakeAudits())
    serve = partial(integration.serve_http, made, "127.0.0.1", port)
    threading.Thread(target=serve, daemon=True).start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"


async def told(client: Client, tool: str, **given: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, given)
    assert not result.is_error, result.content
    found = result.structured_content
    assert isinstance(found, dict)
    return found


async def refused(client: Client, tool: str, **given: Any) -> str:
    result = await client.call_tool(tool, given)
    assert result.is_error
    return str(result.content[0].text)


async def drive(client: Client, candidate: dict[str, str]) -> None:
    """What an agent does: from the task to a promotion."""
    assert "submit" in (client.instructions or "submit")
    tools = {each.name: each for each in (await client.list_tools()).tools}
    assert set(tools) == {"next", "source", "merge", "evidence", "submit", "decide", "show", "diff"}
    assert all(each.description for each in tools.values())
    task = await told(client, "next", most=3)
    assert task["task"]["operator"] == "attention" and len(task["opportunities"]) == 3
    (parent,) = task["parents"]
    text = (await told(client, "source", implementation=parent["implementation"]))["text"]
    assert text == ROOT.text
    found = await told(
        client,
        "submit",
        parents=[ROOT.short],
        hypothesis="vector code for the scores",
        functions=["scores"],
        by="agent one",
        **candidate,
    )
    assert found["status"] == "verified" and found["incumbent"] == found["implementation"]
    evidence = await told(client, "evidence", implementation=found["implementation"])
    assert evidence["verified"] and evidence["promotions"][0]["granted"]
    kept = await told(
        client, "decide", implementation=found["implementation"], decision="continue", reason="fast"
    )
    assert kept["decision"] == "continue"
    study = await told(client, "show")
    assert study["best"] == found["implementation"] and len(study["implementations"]) == 2
    one = await told(client, "show", implementation=ROOT.short)
    assert one["source"] == ROOT.text
    difference = await told(client, "diff", a=ROOT.short, b=found["implementation"][:12])
    assert difference["knobs"] == {"SCORES": ["key_by_key", "vectorised"]}


async def blunder(client: Client) -> None:
    """Mistakes come back as one sentence, and change nothing."""
    good = {"parents": [ROOT.short], "hypothesis": "x"}
    assert "has already" in await refused(client, "submit", text=ROOT.text, **good)
    assert "must define" in await refused(client, "submit", text="x = 1", **good)
    assert "nothing to merge" in await refused(
        client, "merge", ours=ROOT.short, theirs=child(SCORES="vectorised").short
    )
    assert "no implementation" in await refused(client, "source", implementation="ffff")
    assert "decision must be one of" in await refused(
        client, "decide", implementation=ROOT.short, decision="keep", reason="x"
    )
    assert "either the text" in await refused(client, "submit", **good)


def connected(where: Any, *visits: Callable[[Client], Awaitable[None]]) -> None:
    async def visit() -> None:
        async with Client(where) as client:
            for each in visits:
                await each(client)

    asyncio.run(visit())


def test_an_agent_drives_a_study_over_stdio(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(child(SCORES="vectorised").text)
    connected(stdio(folder), partial(drive, candidate={"file": str(file)}), blunder)
    with Study.open(folder) as study:
        said = query.modification(study.store, study.incumbent)
        assert said is not None and said.proposer == "agent one" and said.functions == ("scores",)
        study.store.check()


def test_an_agent_drives_a_study_over_http(folder: Path) -> None:
    with http(folder) as url:
        connected(url, partial(drive, candidate={"text": child(SCORES="vectorised").text}), blunder)

        async def no_files(client: Client) -> None:
            given = {"parents": [ROOT.short], "hypothesis": "x", "file": "/etc/passwd"}
            assert "reads no files" in await refused(client, "submit", **given)

        connected(url, no_files)


def test_two_agents_work_on_one_study_at_once(folder: Path) -> None:
    async def submit(where: Any, **settings: int | str) -> str:
        async with Client(where) as client:
            given = {"parents": [ROOT.short], "hypothesis": str(settings), "text": child(**settings).text}
            found = await told(client, "submit", **given)
            assert (await told(client, "next"))["failures"] == []
            return str(found["status"])

    async def both(url: str) -> list[str]:
        return await asyncio.gather(
            submit(stdio(folder), VALUES="keys_by_4"),
            submit(url, PARTITION="cost"),
            submit(url, QUERY_TILE=32),
        )

    with http(folder) as url:
        statuses = asyncio.run(both(url))
    assert len(statuses) == 3 and "None" not in statuses
    with Study.open(folder) as study:
        study.store.check()
        assert study.store.pending() == []
        screens = [each for each in query.audits(study.store) if each.level is Level.SCREEN]
        assert len(screens) == 4 == len({each.implementation for each in screens})


def test_a_port_that_is_taken_is_one_clear_sentence(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"cannot listen at 127.0.0.1:{port} .*choose another --port"):
            integration.serve_http(integration.server(folder), "127.0.0.1", port)


def test_no_study_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no study at"):
        integration.server(tmp_path / "nowhere")


def test_progress_of_an_audit_reaches_the_client(folder: Path) -> None:
    heard: list[str] = []

    async def listen(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    async def visit() -> None:
        made = integration.server(folder, run_job=FakeAudits())
        async with Client(made) as client:
            given = {"parents": [ROOT.short], "hypothesis": "x", "text": child(PARTITION="cost").text}
            result = await client.call_tool("submit", given, progress_callback=listen)
            assert json.loads(json.dumps(result.structured_content))["status"] is not None

    asyncio.run(visit())
    assert heard
