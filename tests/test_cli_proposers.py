"""The command line of language models, agents and audit commands, as a person meets it."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic_ai", reason="it is part of the extras llm and dev")
pytest.importorskip("mcp", reason="it is part of the extras mcp and dev")

from tests.search.proposers.endpoint import Answer, Use, serving
from tests.test_cli import Run, refused, run, study

from kernelbraid import ops
from kernelbraid.ir.schema import ADDED, SCHEMA_VERSION
from kernelbraid.ir.store import Store
from kernelbraid.report.failure import ExitCode
from kernelbraid.search.proposers import edits

__all__ = ["run", "study"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--proposer", "llm"], "needs a model: give --model"),
        (["--proposer", "llm", "--model", "gpt-5"], "no key for https://api.openai.com/v1: set the variable"),
        (["--proposer", "llm", "--model", "claude-opus-4-5"], "set the variable ANTHROPIC_API_KEY"),
        (["--proposer", "llm", "--model", "m", "--base-url", "nowhere"], "base_url must be an address"),
        (["--proposer", "llm", "--model", "m", "--max-money", "0"], "max_money must be above 0"),
        (["--audit-command", "ssh gpu run {job}"], "must name {results}"),
    ],
)
def test_a_search_that_cannot_begin_says_why_and_makes_nothing(
    run: Run, tmp_path: Path, words: list[str], message: str
) -> None:
    done = run("search", "swiglu", *words, OPENAI_API_KEY="", ANTHROPIC_API_KEY="", KERNELBRAID_MODEL="")
    assert message in refused(done)
    assert not (tmp_path / "studies").exists()


def test_an_agent_needs_a_study(run: Run) -> None:
    assert "there is no study at" in refused(run("mcp", "nowhere"))


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [
        ("pydantic_ai", ["search", "swiglu", "--proposer", "llm", "--model", "m"], "llm"),
        ("mcp", ["mcp", "STUDY"], "mcp"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named(
    study: Path, tmp_path: Path, library: str, words: list[str], extra: str
) -> None:
    given = [str(study) if word == "STUDY" else word for word in words]
    program = (
        f"import sys; sys.modules[{library!r}] = None; sys.argv = ['kernelbraid', *{given!r}]; "
        "from kernelbraid.__main__ import main; main()"
    )
    environment = {**os.environ, "KERNELBRAID_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert f"pip install 'kernelbraid[{extra}]'" in refused(done, ExitCode.STOPPED)


def test_a_study_of_the_first_layout_gets_the_new_tables(study: Path) -> None:
    with sqlite3.connect(study / "study.db") as connection:
        for record in reversed([each for later in ADDED.values() for each in later]):
            connection.execute(f"DROP TABLE {record.__tablename__}")
        connection.execute("DROP TRIGGER schema_version_refuses_delete")
        connection.execute("DELETE FROM schema_version")
        connection.execute("INSERT INTO schema_version (version, created) VALUES (1, 0)")
    connection.close()
    for _ in range(2):
        with Store.open(study) as store:
            store.check()
    with sqlite3.connect(study / "study.db") as connection:
        with pytest.raises(sqlite3.IntegrityError, match="insert-only"):
            connection.execute("INSERT INTO prompt VALUES ('a', 'b', 'c', 0)")
            connection.execute("DELETE FROM prompt")
        versions = connection.execute("SELECT version FROM schema_version ORDER BY version").fetchall()
    connection.close()
    assert versions == [(version,) for version in range(1, SCHEMA_VERSION + 1)]


@pytest.mark.slow
def test_a_search_by_a_model_with_audits_by_a_command(run: Run, tmp_path: Path) -> None:
    operator = ops.get("rms_norm")
    root = ops.source(operator)
    knob = next(each for each in edits.declared(root, operator.contract) if each.alternatives)
    made = edits.apply(root, {knob.name: knob.alternatives[0]}, operator.contract)
    about = {
        "hypothesis": "another value",
        "expected_effect": "",
        "falsified_by": "",
        "functions": [],
        "regimes": ["decode"],
        "requirements_at_risk": [],
        "source": made.text,
    }
    away = f"{sys.executable} -m kernelbraid audit run {{job}} -o {{results}} --minutes {{minutes}}"
    unknown = Answer(404, '{"error": {"message": "no such model"}}')
    with serving(unknown, Use("submit", about), Use("decline", {"reason": "done"})) as endpoint:
        address = f"{endpoint.url}/v1"
        given = ["--base-url", address, "--audits", "1", "--study", "s", "--audit-command", away]
        done = run("search", "rms_norm", "--proposer", "llm", "--model", "wrong", *given, "--json")
        assert f"{address} knows no model wrong" in refused(done, ExitCode.STOPPED)
        done = run("resume", "s", "--model", "right", "--audit-command", away, "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ended_by"] == "audits" and summary["audited"] == 1
    assert summary["model"]["model"] == "right" and summary["model"]["tokens_in"] == 1000
    shown = json.loads(run("show", "s", "--json").stdout)
    assert shown["implementations"][1]["implementation"] == made.sha256
