"""Kill -9 of a search, its audits, its workers, its Ray cluster: nothing is lost or counted twice.

Fifty kills in all, at moments that no one chose. After each one the records are checked; at the end the
search has audited what an undisturbed one audits, with the same results.
"""

import random
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tests.search import killing
from tests.search.killing import Search, Victims

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
SOON, LATE = (0.2, 4.0), (4.0, 12.0)
"""Seconds from a start, or the kill before, to a kill; what is to be killed may then be waited for."""
LATE_SHARE = 0.25
"""Of kills that come late: an audit may be timed by then, and evidence be recorded."""
MOST_WAIT = 60.0
ENDS = (killing.controller, killing.cluster_head, killing.cluster_node)
"""Without these nothing goes on: the search ends by itself, and everything that it started."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a search finds that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    killing.new_study(folder / "study")
    search = Search(folder / "study", folder / "home")
    search.finish()
    search.check()
    found = killing.outcome(folder / "study")
    assert len(found) == killing.AUDITS and sum(each.startswith("accepted") for each in found.values()) > 3
    return found


def survives(
    tmp_path: Path, calm: dict[str, str], kills: int, kinds: list[Victims], *options: str
) -> Counter[str]:
    """Kill as often, in one study after another, and compare each with the undisturbed one when it ends."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}, {kills} kills")
    moments = random.Random(seed)
    left = moments.sample([kinds[number % len(kinds)] for number in range(kills)], kills)
    killed: Counter[str] = Counter()
    while left:
        folder = tmp_path / f"study-{len(left)}"
        killing.new_study(folder)
        search = Search(folder, tmp_path / "home", *options)
        workers = 0
        while left and kill(search, left[-1], moments):
            kind = left.pop()
            killed[kind.__name__] += 1
            workers += kind is killing.worker
            search.check()
        search.finish()
        search.check()
        compare(killing.outcome(folder), calm, workers)
    return killed


def kill(search: Search, kind: Victims, moments: random.Random) -> bool:
    """Wait for a moment and kill somebody; False if the search ends before, by itself and well."""
    due = time.monotonic() + moments.uniform(*(LATE if moments.random() < LATE_SHARE else SOON))
    while time.monotonic() < due + MOST_WAIT:
        running = search.start()
        time.sleep(max(0.02, min(0.5, due - time.monotonic())))
        if (code := search.ended()) is not None:
            if code == 0:
                return False
            continue  # it felt the kill before: the root's process was gone
        found = kind(running) if time.monotonic() >= due else []
        if found:
            below = running.children(recursive=True)
            moments.choice(found).kill()
            if kind in ENDS:
                search.wait(killing.GRACE_SECONDS)
                audits = [each for each in below if _audits(each)]
                assert killing.gone(audits, 10.0), "an audit goes on though its search was killed"
                killing.gone(below, 0.0)  # what Ray leaves behind for a while when its head was killed
            return True
    raise AssertionError(f"no {kind.__name__} to kill: {search.said()}")


def compare(found: dict[str, str], calm: dict[str, str], workers: int) -> None:
    """The same candidates with the same results, but for those whose own process was killed."""
    assert set(found) == set(calm), "a candidate was lost, or counted twice"
    different = {sha256 for sha256, how in found.items() if how != calm[sha256]}
    assert {found[sha256] for sha256 in different} <= {"killed"}
    assert len(different) <= workers, "a candidate was blamed for what did not happen to it"


def _audits(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "audit/worker.py" in line or "audit run" in line


def test_eighteen_kills_of_a_search_here(tmp_path: Path, calm: dict[str, str]) -> None:
    killed = survives(tmp_path, calm, 18, [killing.controller, killing.worker])
    assert killed == {"controller": 9, "worker": 9}


def test_eighteen_kills_of_an_audit_command(tmp_path: Path, calm: dict[str, str]) -> None:
    command = f"{sys.executable} -m kernelbraid audit run {{job}} -o {{results}}"
    kinds = [killing.controller, killing.audit_run, killing.worker]
    killed = survives(tmp_path, calm, 18, kinds, "--audit-command", command)
    assert killed == {"controller": 6, "audit_run": 6, "worker": 6}


def test_fourteen_kills_of_a_cluster(tmp_path: Path, calm: dict[str, str]) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    kinds: list[Victims] = [killing.controller, killing.cluster_head, killing.cluster_worker]
    kinds += [killing.cluster_node, killing.audit_run, killing.worker]
    killed = survives(tmp_path, calm, 14, kinds, "--executor", "ray")
    assert sum(killed.values()) == 14 and len(killed) == len(kinds)
