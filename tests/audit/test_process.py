"""Workers: what honest ones give, and how the others end."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.audit import toy
from tests.audit.left import no_process_left

from kernelbraid.audit.confined import MARK
from kernelbraid.audit.process import Limits, Worker, WorkerFailure, _begin_with
from kernelbraid.contract import Source
from kernelbraid.ir.evidence import Status

MakeWorker = Callable[..., Worker]


@pytest.fixture
def make(tmp_path: Path) -> MakeWorker:
    workers: list[Worker] = []

    def start(source: Source, **limits: float) -> Worker:
        worker = Worker(
            source,
            toy.SUMS.entry_points,
            scratch=tmp_path / "scratch",
            cache=tmp_path / "cache",
            limits=Limits(**{"build_seconds": 20.0, "run_seconds": 5.0, **limits}),  # type: ignore[arg-type]
        )
        workers.append(worker)
        return worker

    with no_process_left():
        yield start
        for worker in workers:
            worker.kill()
    assert not list((tmp_path / "scratch").iterdir()), "a worker left its folder behind"


def failure(worker: Worker) -> WorkerFailure:
    """How a worker fails when it is built and asked to run the small program twice."""
    with pytest.raises(WorkerFailure) as caught:
        worker.build()
        worker.execute(toy.small_program())
        worker.execute(toy.small_program())
    assert worker.dead
    return caught.value


def test_an_honest_worker_builds_and_computes(make: MakeWorker) -> None:
    worker = make(toy.root())
    report = worker.build(toy.CONTRACT, {"width": 4})
    assert report.numerics == {"block": 16}
    assert report.edges == {"batch": (), "query_length": (32,), "key_length": ()}
    assert worker.build(toy.CONTRACT, {"width": 8}).numerics == {"block": 16}
    written = worker.execute(toy.small_program())
    np.testing.assert_array_equal(written["out"].view(np.int32), toy.expected().view(np.int32))


def test_a_loaded_program_runs_again_on_fresh_poison(make: MakeWorker) -> None:
    worker = make(toy.root())
    worker.build()
    loaded = worker.load(toy.small_program())
    assert np.isnan(loaded.memory.arrays["out"]).all()
    for _ in range(2):
        loaded.reset(np.random.default_rng(0))
        assert worker.run(loaded, repeats=3) > 0
        np.testing.assert_array_equal(
            worker.outputs(loaded)["out"].view(np.int32), toy.expected().view(np.int32)
        )
    worker.drop(loaded)
    assert worker.specialisations() == ()


def test_parts_of_a_program_run_alone(make: MakeWorker) -> None:
    worker = make(toy.root())
    worker.build()
    program = toy.timed(toy.workload("decode", 2, 9), np.random.default_rng(0), 5, 0, contiguous=False)
    loaded = worker.load(program)
    worker.run(loaded, first=1, count=2)
    done = ~np.isnan(worker.outputs(loaded)["out"]).all(axis=1)
    assert done.tolist() == [False] * 2 + [True] * 4 + [False] * 4


def test_compiled_code_is_reused_by_the_next_process(make: MakeWorker, tmp_path: Path) -> None:
    source = toy.variant(
        ("import numpy as np\n", "import numpy as np\nfrom numba import njit\n"),
        ("def numerics", "@njit(cache=True)\ndef twice(x):\n    return 2 * x\n\n\ndef numerics"),
        ("    at = 0\n", "    at = twice(0)\n"),
    )
    for _ in range(2):
        worker = make(source)
        worker.build()
        worker.execute(toy.small_program())
        assert worker.specialisations() == ("twice(int64)",)
    index = list((tmp_path / "cache").rglob("*.nbi"))
    assert len(index) == 1


def test_the_environment_is_scrubbed(make: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "42")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    top = (
        "import os, sys; print(sorted(os.environ), os.listdir('.'), [p for p in sys.path if 'nowhere' in p])"
    )
    worker = make(toy.hostile("", top=top))
    worker.build()
    assert "SECRET" not in worker.printed and "nowhere" not in worker.printed
    assert "NUMBA_CACHE_DIR" in worker.printed and "] [] []" in worker.printed


def test_no_module_of_this_package_enters_a_worker(make: MakeWorker) -> None:
    worker = make(toy.hostile("", top="import sys; print([m for m in sys.modules if 'kernelbraid' in m])"))
    worker.build()
    assert worker.printed.startswith("[]")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("x[0] = 0", Status.TAMPERED),
        ("x.flags.writeable = True", Status.TAMPERED),
        ("raise KeyError('lost')", Status.CRASHED),
        ("import sys; sys.exit(0)", Status.CRASHED),
        ("import os; os._exit(0)", Status.CRASHED),
        ("import ctypes; ctypes.string_at(0)", Status.CRASHED),
        ("raise MemoryError", Status.OUT_OF_MEMORY),
    ],
)
def test_failing_calls(make: MakeWorker, body: str, status: Status) -> None:
    assert failure(make(toy.hostile(body))).status == status


def test_memory_of_inputs_is_mapped_read_only(make: MakeWorker) -> None:
    """Also for code that goes around numpy, by the address or by a mapping of its own."""
    write = "import ctypes; ctypes.memset(x.ctypes.data, 0, 4)"
    assert failure(make(toy.hostile(write))).reason == "it was ended by SIGSEGV"
    remap = """
    import mmap, os
    for name in os.listdir('/proc/self/map_files'):
        if 'memfd:inputs' in os.readlink('/proc/self/map_files/' + name):
            mmap.mmap(os.open('/proc/self/map_files/' + name, os.O_RDWR), 64)[0] = 1
    """
    assert failure(make(toy.hostile(textwrap.dedent(remap).strip()))).status == Status.CRASHED


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Source("def ("), "SyntaxError"),
        (Source("import nothing_of_that_name"), "nothing_of_that_name"),
        (Source("x = 1"), "does not define scaled_sums"),
        (toy.variant(('"block": BLOCK', '"block": 5')), "must be one of (8, 16, 32)"),
        (toy.variant(('"block": BLOCK', '"block": "16"')), "must be one of (8, 16, 32)"),
        (toy.variant(('"block": BLOCK', '"block": BLOCK, "other": 1')), "must name exactly"),
        (toy.variant(('{"block": BLOCK}', "object()")), "numerics"),
        (toy.variant(('"block": BLOCK', '"block": {1}')), "not JSON serializable"),
        (toy.variant(('return {"tile"', 'raise OSError("no tile")\n    return {"tile"')), "no tile"),
    ],
)
def test_sources_that_do_not_build(make: MakeWorker, source: Source, reason: str) -> None:
    with pytest.raises(WorkerFailure, match=None) as caught:
        make(source).build(toy.CONTRACT, {"width": 4})
    assert caught.value.status == Status.BUILD_FAILED
    assert reason in caught.value.reason


def test_a_full_disk_is_not_the_candidates_fault(make: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelbraid.audit.confined.ROOM_BYTES", 1 << 62)
    worker = make(toy.hostile("raise OSError(28, 'No space left on device')"))
    worker.build()
    with pytest.raises(RuntimeError, match="free some disk space"):
        worker.execute(toy.small_program())
    assert worker.dead


def test_a_candidate_that_says_the_disk_is_full_is_not_believed(make: MakeWorker) -> None:
    found = failure(make(toy.hostile("raise OSError(28, 'No space left on device')")))
    assert found.status == Status.CRASHED


def test_an_exception_that_no_file_can_hold_is_recorded(make: MakeWorker) -> None:
    found = failure(make(toy.hostile("raise ValueError('bad ' + chr(0xD800))")))
    assert found.status == Status.CRASHED and found.reason.encode()


def test_a_declared_encoding_changes_nothing(make: MakeWorker) -> None:
    hidden = "# -*- coding: raw_unicode_escape -*-\n# \\u000araise OSError('unseen')\n"
    worker = make(Source(hidden + toy.root().text, "hidden"))
    worker.build()
    assert worker.execute(toy.small_program())


def test_a_hung_worker_is_ended(make: MakeWorker) -> None:
    start = time.monotonic()
    found = failure(make(toy.hostile("while True: pass"), run_seconds=0.3))
    assert found.status == Status.TIMED_OUT and time.monotonic() - start < 5


def test_a_hung_import_is_ended(make: MakeWorker) -> None:
    worker = make(toy.hostile("", top="import time; time.sleep(60)"), build_seconds=0.3)
    assert failure(worker).status == Status.TIMED_OUT


def test_a_memory_eater_is_ended(make: MakeWorker) -> None:
    eat = "kept = []\nwhile True: kept.append(bytearray(1 << 24))"
    found = failure(make(toy.hostile(eat), memory_bytes=300 << 20))
    assert found.status == Status.OUT_OF_MEMORY


def test_memory_of_children_counts(make: MakeWorker) -> None:
    eat = """
    import os, time
    for _ in range(4):
        if os.fork() == 0:
            kept = bytearray(b'1') * (200 << 20)
            time.sleep(60)
    time.sleep(60)
    """
    found = failure(make(toy.hostile(textwrap.dedent(eat).strip()), memory_bytes=500 << 20))
    assert found.status == Status.OUT_OF_MEMORY


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        open({mark!r} + str(os.getpid()), "w").close()
        while True: time.sleep(0.01)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("where", ["body", "top"])
def test_a_daemon_is_found_and_ended(make: MakeWorker, tmp_path: Path, where: str) -> None:
    """A double fork in a new session, at import or in a call."""
    daemon = DAEMON.format(mark=str(tmp_path / "daemon-")).strip()
    source = toy.hostile(daemon) if where == "body" else toy.hostile("", top=daemon)
    assert failure(make(source)).status == Status.TAMPERED
    for file in tmp_path.glob("daemon-*"):
        assert not psutil.pid_exists(int(file.name.removeprefix("daemon-")))


def test_a_fork_left_behind_is_tampering(make: MakeWorker) -> None:
    fork = "import os, time\nif os.fork() == 0:\n    while True: time.sleep(1)"
    assert failure(make(toy.hostile(fork))).status == Status.TAMPERED


def test_children_of_a_hung_worker_end_with_it(make: MakeWorker, tmp_path: Path) -> None:
    daemon = DAEMON.format(mark=str(tmp_path / "daemon-")).strip() + "\nwhile True: pass"
    assert failure(make(toy.hostile(daemon), run_seconds=0.5)).status == Status.TIMED_OUT
    (file,) = tmp_path.glob("daemon-*")
    assert not psutil.pid_exists(int(file.name.removeprefix("daemon-")))


def test_children_that_ended_unreaped_go_with_their_worker(make: MakeWorker, tmp_path: Path) -> None:
    file = tmp_path / "ended"
    ended = f"""
import os
pid = os.fork()
if pid == 0:
    os.setsid()
    os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
open({str(file)!r}, "w").write(str(pid))
"""
    other, worker = make(toy.root()), make(toy.hostile("", top=ended))
    with contextlib.suppress(WorkerFailure):
        worker.build()
    worker.kill()
    assert not psutil.pid_exists(int(file.read_text())), "an ended child of the worker was never reaped"
    assert not other.dead


def test_strays_of_nobody_end_with_the_last_worker(make: MakeWorker) -> None:
    worker = make(toy.root())
    daemon = """
import subprocess
print(subprocess.Popen(["/bin/sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""
    middle = [sys.executable, "-c", daemon]
    gone = {**os.environ, MARK: "of a worker long gone"}
    stray = int(subprocess.run(middle, env=gone, capture_output=True, text=True, check=True).stdout)
    assert psutil.Process(stray).ppid() == os.getpid()
    worker.kill()
    assert not psutil.pid_exists(stray)


def test_children_of_the_judge_are_left_alone(make: MakeWorker) -> None:
    before = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        worker = make(toy.root())
        during = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        worker.build()
        worker.kill()
        assert before.poll() is None and during.poll() is None
    finally:
        for process in (before, during):
            process.kill()
            process.communicate()


def test_flooding_output_is_read_and_capped(make: MakeWorker) -> None:
    flood = "import sys\nfor _ in range(64): sys.stdout.write('x' * (1 << 18))"
    worker = make(toy.hostile(flood), output_bytes=1000)
    worker.build()
    worker.execute(toy.small_program())
    assert worker.printed == "x" * 1000


def test_a_late_thread_is_frozen(make: MakeWorker) -> None:
    """A thread that writes the result after the call has returned does not get to."""
    late = """
    import threading, time
    def later(out=out):
        time.sleep(30)
        out[...] = 7
    threading.Thread(target=later).start()
    return
    """
    worker = make(toy.hostile(textwrap.dedent(late).strip()))
    worker.build()
    loaded = worker.load(toy.small_program())
    worker.run(loaded)
    states = [
        (task / "stat").read_text().rpartition(")")[2].split()[0]
        for task in Path(f"/proc/{worker.pid}/task").iterdir()
    ]
    assert len(states) >= 2 and set(states) == {"T"}, "a thread runs on"
    assert np.isnan(worker.outputs(loaded)["out"]).all()


def test_a_stale_output_stays_poison(make: MakeWorker) -> None:
    once = "global done\nif 'done' in globals(): return\ndone = True"
    worker = make(toy.hostile(once))
    worker.build()
    assert not np.isnan(worker.execute(toy.small_program())["out"]).any()
    assert np.isnan(worker.execute(toy.small_program())["out"]).all()


def forged(reply: str) -> Source:
    """A worker that writes a message of its own to its socket while it is asked to run."""
    body = f"""
    import json, os, socket, struct, sys
    message = sys._getframe(2).f_locals.get('message') or sys._getframe(3).f_locals['message']
    text = ({reply}).encode()
    os.write(int(sys.argv[1]), struct.pack('<I', len(text)) + text)
    """
    return toy.hostile(textwrap.dedent(body).strip())


@pytest.mark.parametrize(
    "reply",
    [
        "json.dumps({'id': message['id'], 'nonce': message['nonce'], 'elapsed': 0.0})",
        "json.dumps({'id': 1, 'nonce': 'guess', 'elapsed': 0.0})",
        "'not json'",
        "'[' * 1000",
    ],
)
def test_an_early_answer_is_tampering(make: MakeWorker, reply: str) -> None:
    assert failure(make(forged(reply))).status == Status.TAMPERED


def test_an_endless_answer_is_tampering(make: MakeWorker) -> None:
    body = "import os, sys\nwhile True: os.write(int(sys.argv[1]), b'\\xff' * 65536)"
    assert failure(make(toy.hostile(body))).status == Status.TAMPERED


def test_failures_carry_what_was_printed(make: MakeWorker) -> None:
    found = failure(make(toy.hostile("print('last words', flush=True)\nraise OSError('gone')")))
    assert "last words" in found.output and "gone" in found.reason


def test_a_worker_dies_with_its_judge(tmp_path: Path) -> None:
    """Even one that stands still, when the judge is killed without a chance to clean up."""
    script = f"""
    from pathlib import Path
    import sys, time
    sys.path[:0] = {[os.path.abspath("src"), os.path.abspath(".")]!r}
    from kernelbraid.audit.process import Worker
    from tests.audit import toy
    folder = Path({str(tmp_path)!r})
    worker = Worker(toy.root(), toy.SUMS.entry_points, scratch=folder, cache=folder)
    worker.build()
    print(worker.pid, flush=True)
    time.sleep(60)
    """
    judge = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert judge.stdout is not None
    pid = int(judge.stdout.readline())
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    judge.kill()
    judge.communicate()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_some_devices_have_graphs(make: MakeWorker) -> None:
    with pytest.raises(RuntimeError, match="device cpu has no graphs"):
        make(toy.root()).replay(toy.small_program(), toy.small_program())


def test_compiled_kernels_are_begun_with_once(tmp_path: Path) -> None:
    origin, target = tmp_path / "root" / "triton", tmp_path / "candidate" / "triton"
    target.parent.mkdir()
    _begin_with(target, origin)
    assert not target.exists(), "nothing is compiled yet"
    (origin / "kernel").mkdir(parents=True)
    (origin / "kernel" / "x.cubin").write_bytes(b"root's")
    _begin_with(target, origin)
    (target / "kernel" / "x.cubin").write_bytes(b"candidate's")
    _begin_with(target, origin)
    assert (target / "kernel" / "x.cubin").read_bytes() == b"candidate's"
    assert (origin / "kernel" / "x.cubin").read_bytes() == b"root's"
    assert [each.name for each in target.parent.iterdir()] == ["triton"]
