"""Several processes on one study, and processes that die."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.ir.plain import ROOT, answer, audited, child, new_store

from kernelbraid.ir import query
from kernelbraid.ir.evidence import Level
from kernelbraid.ir.store import Store

HERE = Path(__file__).parents[2]


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.ir.writer", *map(str, arguments)]
    path = os.pathsep.join([str(HERE), str(HERE / "src")])
    return subprocess.Popen(
        command, cwd=HERE, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )


def test_nothing_is_lost_or_halved_when_a_writer_is_killed(tmp_path: Path) -> None:
    process = start("kills", tmp_path, 20)
    process.communicate(timeout=300)
    assert process.returncode == 0


def test_two_processes_write_one_study(tmp_path: Path) -> None:
    with new_store(tmp_path / "study") as store:
        audited(store, ROOT.sha256)
        requests = [store.request_audit(child(store, 1000 + i), Level.SCREEN) for i in range(40)]
        answers = [answer(store, request).to_json() for request in requests]
        (tmp_path / "answers.json").write_text(json.dumps(answers))
        first, second = start("race", tmp_path, 0, 40), start("race", tmp_path, 20, 60)
        counts = [[int(word) for word in p.communicate(timeout=120)[0].split()] for p in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0]
        added, recorded = (sum(column) for column in zip(*counts, strict=True))
        assert (added, recorded) == (60, 40)
        assert len(query.implementations(store)) == 1 + 40 + 60
        assert query.totals(store).audits == 41
        store.check()


def test_threads_of_one_process_write_one_study(tmp_path: Path) -> None:
    with new_store(tmp_path / "study") as store:
        audited(store, ROOT.sha256)
        failures: list[BaseException] = []

        def work(start: int) -> None:
            try:
                for number in range(start, start + 10):
                    audited(store, child(store, number))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(query.verified(store)) == 31
        store.check()


def test_one_process_controls_a_search(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    store = new_store(folder)
    take = (
        "import sys; from pathlib import Path; from kernelbraid.ir.store import Store\n"
        f"with Store.open(Path({str(folder)!r})) as store, store.controller_lock():\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    second = Store.open(folder)
    with (
        store.controller_lock(),
        pytest.raises(RuntimeError, match="another process"),
        second.controller_lock(),
    ):
        pass
    with subprocess.Popen(
        [sys.executable, "-c", take], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match="another process searches"), store.controller_lock():
            pass
        process.kill()
        process.wait()
    with store.controller_lock():
        audited(store, ROOT.sha256)  # others may still write; the lock is for the one who decides
