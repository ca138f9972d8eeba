"""An MCP server of a study whose audits are modelled, for a process of its own."""

from pathlib import Path

from tests.search.fake_audit import FakeAudits

from kernelbraid.integrations import mcp


def main(folder: str) -> None:
    mcp.server(Path(folder), run_job=FakeAudits()).run()
