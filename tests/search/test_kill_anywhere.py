"""Kill -9 of a search, its audits, its workers, its Ray cluster: nothing is lost or counted twice."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kernelbraid.ir import query
from kernelbraid.ir.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
REPOSITORY = Path(__file__).parents[2]
AUDITS = 6
GRACE_SECONDS = 60.0
"""Time that a search has to notice that what it needs is gone, before it is killed as well."""


class Search:
    """A study that is searched by the command line, in a process of its own."""

    def __init__(self, folder: Path, home: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        paths = [str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {**os.environ, "KERNELBRAID_HOME": str(home), "PYTHONPATH": os.pathsep.join(paths)}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> psutil.Process:
        """Start or go on; returns the running controller."""
        if self.process is None or self.process.poll() is not None:
            verb = ["resume", str(self.folder)]
            if not self.folder.exists():
                verb = [
                    "search",
                    "rms_norm",
                    "--study",
                    str(self.folder),
                    "--audits",
                    str(AUDITS),
                    "--seed",
                    "3",
                ]
            command = [sys.executable, "-m", "kernelbraid", *verb, "--no-compare", *self.options]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, env=self.environment, **quiet)  # type: ignore[call-overload]
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def finish(self) -> None:
        for _ in range(10):
            self.start()
            assert self.process is not None
            if self.process.wait(600) == 0:
                return
        raise AssertionError("the search does not end")

    def check(self) -> None:
        """Every invariant holds, and every request has one answer at most."""
        if not (self.folder / "study.db").exists():
            return
        with Store.open(self.folder) as store:
            store.check()
            answered = Counter(each.request for each in query.audits(store))
            assert not answered or max(answered.values()) == 1


Victims = Callable[[psutil.Process], list[psutil.Process]]


def _named(tree: list[psutil.Process], *words: str) -> list[psutil.Process]:
    found = []
    for each in tree:
        try:
            if all(word in " ".join(each.cmdline()) for word in words):
                found.append(each)
        except psutil.Error:
            continue
    return found


def controller(root: psutil.Process) -> list[psutil.Process]:
    return [root]


def audit_run(root: psutil.Process) -> list[psutil.Process]:
    return _named(root.children(recursive=True), "audit", "run", "--output") or _named(
        root.children(recursive=True), "audit", "run"
    )


def worker(root: psutil.Process) -> list[psutil.Process]:
    return _named(root.children(recursive=True), "worker")


def ray_head(root: psutil.Process) -> list[psutil.Process]:
    return _named(root.children(recursive=True), "gcs_server")


def survives(tmp_path: Path, kills: int, seed: int, kinds: list[Victims], *options: str) -> Counter[str]:
    print(f"seed {seed}, {kills} kills")
    moments = random.Random(seed)
    search = Search(tmp_path / "study", tmp_path / "home", *options)
    killed: Counter[str] = Counter()
    for _ in range(kills):
        running = search.start()
        tree: list[psutil.Process] = []
        kind = moments.choice(kinds)
        due = time.monotonic() + moments.uniform(1.0, 10.0)
        victims: list[psutil.Process] = []
        while time.monotonic() < due or (
            not victims and running.is_running() and time.monotonic() < due + 20
        ):
            time.sleep(0.1)
            try:
                tree = running.children(recursive=True)
                victims = kind(running) if time.monotonic() >= due else []
            except psutil.Error:
                break
        if victims:
            moments.choice(victims).kill()
            killed[kind.__name__] += 1
        if kind in (controller, ray_head):
            assert search.process is not None
            try:
                search.process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                search.process.kill()
                search.process.wait()
            for each in tree:  # what a cluster leaves behind when its head was killed
                if each.is_running() and kind is ray_head:
                    each.kill()
        search.check()
    search.finish()
    search.check()
    with Store.open(tmp_path / "study") as store:
        assert not store.pending()
        screened = {each.implementation for each in query.audits(store)} - {store.study.root}
        assert len(screened) == AUDITS, "a candidate was lost, or counted twice"
    return killed


def test_fifty_kills(tmp_path: Path) -> None:
    command = f"{sys.executable} -m kernelbraid audit run {{job}} -o {{results}}"
    kinds: list[Victims] = [controller, audit_run, worker]
    killed = survives(
        tmp_path, 40, random.SystemRandom().randrange(1 << 30), kinds, "--audit-command", command
    )
    assert sum(killed.values()) >= 30 and set(killed) == {each.__name__ for each in kinds}


def test_ten_kills_of_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    kinds: list[Victims] = [controller, ray_head, worker]
    killed = survives(tmp_path, 10, random.SystemRandom().randrange(1 << 30), kinds, "--executor", "ray")
    assert sum(killed.values()) >= 7
