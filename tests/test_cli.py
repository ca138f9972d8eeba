"""The command line as scripts see it: one document on standard output, one sentence an error, exit codes."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelbraid import ops
from kernelbraid.report.failure import ExitCode, classify, sentence

ROOT = Path(__file__).resolve().parent.parent
STRAIGHTFORWARD = ROOT / "examples" / "roots" / "straightforward.py"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the command line in an empty folder, with a data folder of its own."""

    def call(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kernelbraid", *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "KERNELBRAID_HOME": str(tmp_path / "home"), **environment},
            capture_output=True,
            text=True,
            timeout=900,
        )

    return call


def refused(done: subprocess.CompletedProcess[str], code: ExitCode = ExitCode.BAD_INPUT) -> str:
    """The one sentence of an error, after checking that it is one."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("kernelbraid: ")]
    assert len(lines) == 1 and done.stderr.splitlines()[-1] == lines[0]
    return lines[0]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that no audit has touched."""
    from kernelbraid.search.study import Study

    folder = tmp_path_factory.mktemp("studies") / "fresh"
    Study.create(folder, "attention", STRAIGHTFORWARD, proposer="external").close()
    return folder


def test_help_names_every_verb(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb in (
        *(
            "env",
            "ops",
            "verify",
            "bench",
            "selftest",
            "search",
            "resume",
            "show",
            "diff",
            "export",
            "import",
            "report",
        ),
        *("promote", "demote", "next", "source", "evidence", "submit", "decide", "audit"),
    ):
        assert re.search(rf"^  {verb} ", done.stdout, re.MULTILINE), verb


def test_documents_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "pages.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_ops(run: Run) -> None:
    document = json.loads(run("ops", "--json").stdout)
    listed = {each["name"]: each for each in document["operators"]}
    assert list(listed) == list(dict.fromkeys(each.name for each in ops.OPERATORS))
    assert {"linear", "rms_norm", "rope", "moe_experts", "logprob", "sample"} <= listed.keys()
    attention = listed["attention"]
    assert attention["contract"] == "attention/1"
    assert attention["backends"] == ["cpu", "cuda"]
    assert attention["dtypes"] == {"cpu": ["float32"], "cuda": ["bfloat16", "float16"]}
    assert attention["backward"] is True
    assert "decode_equals_prefill" in attention["relations"]
    assert attention["certificates"] == []


def test_env(run: Run) -> None:
    document = json.loads(run("env", "--json").stdout)
    assert document["architecture"] == "cpu" and document["cores"] >= 1
    assert document["flops"] > 0 and document["bandwidth"] > 0
    assert document["versions"]["numpy"] and document["installed"] == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("search", "conv"), "unknown operator 'conv'; operators are attention"),
        (("search", "attention", "--device", "cuda"), "device cuda"),
        (("search", "attention", "--device", "tpu"), "'tpu'"),
        (("search", "attention", "--policy", "loose"), "policy must be one of"),
        (("search", "attention", "--root", "nowhere.py"), "nowhere.py"),
        (("bench", "conv"), "unknown operator 'conv'"),
        (("bench", "attention", "--grid", "none"), "it has study"),
        (("show", "nowhere"), "there is no study at"),
        (("resume", "nowhere"), "there is no study at"),
        (("next", "nowhere"), "there is no study at"),
        (("report", "nowhere"), "there is no study at"),
        (("demote", "conv"), "unknown operator 'conv'"),
        (("audit", "run", "nowhere.json", "-o", "results.jsonl"), "nowhere.json"),
        (("selftest", "--fixture", "gentle"), "no fixture 'gentle'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_sentence(run: Run, tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    assert expected in refused(run(*words))
    assert not list(tmp_path.rglob("study.db")), "bad input must leave nothing behind"


def test_usage_errors(run: Run) -> None:
    for words in (("frobnicate",), ("search",), ("search", "attention", "--minutes", "soon")):
        done = run(*words)
        assert done.returncode == ExitCode.BAD_INPUT
        assert done.stdout == "" and "Error:" in done.stderr


def test_root_must_be_an_implementation(run: Run, tmp_path: Path) -> None:
    (tmp_path / "root.py").write_text("def attention(): pass\n")
    assert "must define" in refused(run("search", "attention", "--root", "root.py"))
    (tmp_path / "root.py").write_text("def attention(:\n")
    refused(run("search", "attention", "--root", "root.py"))
    (tmp_path / "root.py").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refused(run("search", "attention", "--root", "root.py"))
    assert not (tmp_path / "studies").exists()


def test_damaged_and_foreign_files(run: Run, tmp_path: Path, study: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "study.db").write_bytes(b"SQLite format 3\0" + b"\x7f" * 4000)
    refused(run("show", "broken"))
    (tmp_path / "job.json").write_text('{"format": "something else"}')
    assert "not a job file" in refused(run("audit", "run", "job.json", "-o", "results.jsonl"))
    assert not (tmp_path / "results.jsonl").exists()
    (tmp_path / "study.jsonl").write_text('{"kernelbraid_study": 1\n')
    assert "line 1" in refused(run("import", "study.jsonl", "-o", "imported"))
    assert not (tmp_path / "imported").exists()
    assert "not a results file" in refused(run("audit", "import", study, "job.json"))


def test_show_and_source_of_a_fresh_study(run: Run, study: Path) -> None:
    document = json.loads(run("show", study, "--json").stdout)
    [root] = document["implementations"]
    assert root["state"] == "incumbent" and root["implementation"] == document["root"] == document["best"]
    assert document["audited"] == 0 and document["unequal"] == 0 and document["speedup"] == 1.0
    shown = json.loads(run("show", study, document["root"][:8], "--json").stdout)
    assert shown["source"] == STRAIGHTFORWARD.read_text()
    assert json.loads(run("source", study, document["root"]).stdout)["text"] == shown["source"]
    assert json.loads(run("evidence", study, document["root"]).stdout)["audits"] == []
    assert "no implementation" in refused(run("show", study, "abcdef"))
    assert "promoted nothing" in refused(run("promote", study))
    assert "no pending audit" in refused(run("audit", "export", study, "-o", "job.json"))


def test_next_names_the_task(run: Run, study: Path) -> None:
    document = json.loads(run("next", study).stdout)
    assert document["task"]["operator"] == "attention"
    assert document["incumbent"] == document["root"]


def test_submit_refuses(run: Run, study: Path, tmp_path: Path) -> None:
    root = json.loads(run("next", study).stdout)["root"]
    (tmp_path / "candidate.py").write_text(STRAIGHTFORWARD.read_text() + "\nX = 1\n")
    words = ("submit", study, "candidate.py", "--parent", root, "--hypothesis", "none")
    assert "verified" in refused(run(*words)), "no audit has verified the root yet"
    assert refused(run("submit", study, "missing.py", "--parent", root, "--hypothesis", "none"))
    assert "decision must be one of" in refused(run("decide", study, root, "burn", "--reason", "none"))


def test_export_and_import(run: Run, study: Path, tmp_path: Path) -> None:
    done = run("export", study, "-o", "study.jsonl", "--json")
    assert json.loads(done.stdout)["lines"] > 2
    assert run("import", "study.jsonl", "-o", "copy").returncode == 0
    documents = [json.loads(run("show", folder, "--json").stdout) for folder in (study, "copy")]
    assert documents[0]["implementations"] == documents[1]["implementations"]
    (tmp_path / "copy" / "more").write_text("")
    refused(run("import", "study.jsonl", "-o", "copy"))


def test_demote_without_a_winner(run: Run) -> None:
    assert json.loads(run("demote", "attention", "--json").stdout) == {
        "operator": "attention",
        "removed": False,
    }


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kernelbraid", "ops", "--json"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == ExitCode.STOPPED
    assert "no space left" in done.stderr and "Traceback" not in done.stderr


def test_classification_of_errors() -> None:
    cases: list[tuple[BaseException, ExitCode, str]] = [
        (ValueError("q must be float32\nmore"), ExitCode.BAD_INPUT, "q must be float32"),
        (RuntimeError("the root does not run"), ExitCode.STOPPED, "the root does not run"),
        (
            OSError(errno.ENOSPC, "No space left on device", "a/b"),
            ExitCode.STOPPED,
            "no space left on the device (a/b)",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "a"),
            ExitCode.STOPPED,
            "choose a folder you may write to",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "a"), ExitCode.STOPPED, "permission denied (a)"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a"), ExitCode.BAD_INPUT, "no such file (a)"),
        (MemoryError(), ExitCode.STOPPED, "out of memory"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "interrupted"),
        (KeyError("x"), ExitCode.DEFECT, "x"),
        (NotImplementedError(), ExitCode.DEFECT, "NotImplementedError"),
    ]
    for error, code, words in cases:
        assert classify(error) is code
        assert words in sentence(error)
        assert "\n" not in sentence(error)


@pytest.mark.slow
def test_a_short_search_and_what_follows(run: Run, tmp_path: Path) -> None:
    done = run(
        *("search", "attention", "--root", STRAIGHTFORWARD, "--device", "cpu", "--audits", "1"),
        *("--minutes", "4", "--study", "study", "--json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["operator"] == "attention" and found["device"] == "cpu"
    assert len(found["root"]) == len(found["best"]) == 64
    assert found["audited"] >= 1 and found["unequal"] == 0 and found["comparisons"] > 1_000_000
    assert found["speedup"] > 0 and found["seconds"] > 0
    assert sum(found["rejected"].values()) + found["verified"] == found["audited"]
    assert "audited" in done.stderr

    shown = json.loads(run("show", "study", "--json").stdout)
    candidate = next(each for each in shown["implementations"] if each["parents"])
    assert run("show", "study", candidate["implementation"]).returncode == 0
    differing = json.loads(run("diff", "study", found["root"], candidate["implementation"], "--json").stdout)
    assert len(differing["knobs"]) == 1 and differing["patch"].startswith("---")


@pytest.mark.slow
def test_an_audit_travels(run: Run, tmp_path: Path) -> None:
    from kernelbraid.ir.evidence import Level
    from kernelbraid.search.study import Study

    with Study.create(tmp_path / "study", "attention", STRAIGHTFORWARD, proposer="external") as made:
        made.store.request_audit(made.root, Level.SCREEN)
    exported = json.loads(run("audit", "export", "study", "-o", "job.json", "--json").stdout)
    assert exported["audits"] == 1
    assert run("audit", "run", "job.json", "-o", "results.jsonl", "--minutes", "0").returncode == 0
    done = run("audit", "run", "job.json", "-o", "results.jsonl", "--json")
    assert json.loads(done.stdout)["answered"] == 1, done.stderr
    for expected in ({"recorded": 1, "repeated": 0}, {"recorded": 0, "repeated": 1}):
        assert json.loads(run("audit", "import", "study", "results.jsonl", "--json").stdout) == expected
    assert json.loads(run("evidence", "study", exported_root(tmp_path)).stdout)["verified"] is True


def exported_root(folder: Path) -> str:
    return str(json.loads((folder / "job.json").read_text())["job"]["root"]["sha256"])


def test_running_a_job_needs_no_database(tmp_path: Path) -> None:
    """On the machine that a job travels to, SQLAlchemy need not be there."""
    from kernelbraid.ir.evidence import Level
    from kernelbraid.search import audits
    from kernelbraid.search.study import Study

    with Study.create(tmp_path / "study", "attention", STRAIGHTFORWARD, proposer="external") as made:
        made.store.request_audit(made.root, Level.SCREEN)
        audits.export(made, tmp_path / "job.json")
    script = (
        "import sys\n"
        "sys.modules['sqlalchemy'] = None\n"
        "from kernelbraid.cli import app\n"
        "app(['audit', 'run', 'job.json', '-o', 'results.jsonl', '--minutes', '0', '--json'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.pop("queue_seconds") >= 0
    assert document == {"results": "results.jsonl", "answered": 0, "asked": 1}


@pytest.mark.slow
def test_verify_screen(run: Run) -> None:
    done = run("verify", "attention", "--level", "screen", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["held"] and document["unequal"] == 0 and document["comparisons"] > 1_000_000
    [report] = document["operators"]
    assert {"relation", "regime", "comparisons", "unequal", "first_difference"} <= set(report["relations"][0])


@pytest.mark.slow
def test_interrupt_and_resume(run: Run, tmp_path: Path) -> None:
    words = ("search", "attention", "--root", STRAIGHTFORWARD, "--audits", "1", "--study", "study", "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "kernelbraid", *map(str, words)],
        cwd=tmp_path,
        env={**os.environ, "KERNELBRAID_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "proposed" in line:
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, errors
    assert json.loads(output)["ended_by"] == "interrupted"
    assert "kernelbraid resume" in errors and "Traceback" not in errors

    done = run("resume", "study", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["audited"] == 1 and found["ended_by"] == "audits"


def test_report(run: Run, study: Path, tmp_path: Path) -> None:
    told = json.loads(run("report", study, "--json").stdout)
    assert told == {"path": "report.html", "bytes": (tmp_path / "report.html").stat().st_size, "nodes": 1}
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "is a folder: name the file to write" in refused(run("report", study, "-o", "."))
    assert "there is no folder" in refused(run("report", study, "-o", "nowhere/page.html"))
