"""A process that writes to a study without end or in a race, for tests that kill it or start two."""

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.ir.plain import ROOT, answer, audited, child, new_store, source

from kernelbraid.ir import query
from kernelbraid.ir.evidence import AuditEvidence, Level, Status
from kernelbraid.ir.exchange import export_study, import_study
from kernelbraid.ir.schema import Lineage, Usage
from kernelbraid.ir.store import DuplicateSourceError, Store


def write_forever(folder: Path, seed: int, tell: Callable[[str], None]) -> None:
    """Search-like work; `tell` gets the hash of every child whose audit the store has acknowledged."""
    rng = random.Random(seed)
    with Store.open(folder) as store:
        for number in range(seed * 100_000, (seed + 1) * 100_000):
            parent = rng.choice(query.verified(store)).sha256
            opportunity = store.add_opportunity(
                parents=[parent], mechanism="m", edit={"N": number}, rationale="r"
            )
            sha = child(store, number, (parent,), opportunity=opportunity.id)
            screen = audited(store, sha)
            tell(sha)
            with store.transaction():
                full = store.request_audit(sha, Level.FULL)
                store.record(answer(store, full, output="x" * 3000))
                store.promote(screen_audit=screen, full_audit=full, granted=True, reason="faster")
                store.decide(sha, Lineage.CONTINUE, reason="r", decided_by="loop")
            audited(store, child(store, number + 50_000_000, (sha,)), Status.BITS_UNEQUAL)
            store.record_usage(Usage(purpose="search", wall_seconds=0.5))


def killed(
    work: Callable[[Callable[[str], None]], None], after: float, *, once_told: bool = False
) -> list[str]:
    """Fork a process that does `work`, kill it -9 some seconds after its start or after its first word.

    Returns:
        What it told until then.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            work(lambda word: os.write(writing, f"{word}\n".encode()) and None)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    if once_told:
        select.select([reading], [], [], 60.0)
    time.sleep(after)
    os.kill(process, signal.SIGKILL)
    _, ended = os.waitpid(process, 0)
    assert ended in (0, signal.SIGKILL), "the writer failed by itself"
    with os.fdopen(reading) as pipe:
        return pipe.read().split()


def check_kills(folder: Path, rounds: int) -> None:
    """Kill a writer again and again: each time the study must be sound and hold all that was acknowledged."""
    with new_store(folder / "study") as store:
        audited(store, ROOT.sha256)
    told: list[str] = []
    rng = random.Random(rounds)
    for number in range(rounds):
        told += killed(
            lambda tell, n=number: write_forever(folder / "study", n, tell),
            rng.uniform(0.0, 0.2),
            once_told=number % 2 == 0,
        )
        with Store.open(folder / "study") as store:
            store.check()
            assert {i.sha256 for i in query.verified(store)} >= {ROOT.sha256, *told}
            for request in store.pending():  # what was under way is repeated
                store.record(answer(store, request.id))
            assert query.totals(store).audits == query.audits(store)[-1].seq, (
                "an audit is missing, or counted twice"
            )
    assert len(told) >= rounds // 2
    export_study(store := Store.open(folder / "study"), folder / "study.jsonl")
    store.close()
    for number in range(rounds):
        copy, new = folder / f"copy {number}", folder / f"new {number}"
        killed(lambda tell, c=copy: import_study(folder / "study.jsonl", c).close(), rng.uniform(0.0, 0.3))
        killed(lambda tell, n=new: new_store(n).close(), rng.uniform(0.0, 0.05))
        for path in (copy, new):
            if path.exists():
                with Store.open(path) as whole:
                    whole.check()
    print(len(told))


def race(folder: Path, start: int, stop: int) -> None:
    """Add sources and record answers that another process has too; print how often this one was first."""
    answers = [AuditEvidence.from_json(item) for item in json.loads((folder / "answers.json").read_text())]
    added = recorded = 0
    with Store.open(folder / "study") as store:
        for number, evidence in zip(range(start, stop), answers, strict=True):
            try:
                child(store, number)
                added += 1
            except DuplicateSourceError as error:
                assert error.existing.sha256 == source(number).sha256
            recorded += store.record(evidence)
    print(added, recorded)


if __name__ == "__main__":
    command, where, *numbers = sys.argv[1:]
    {"kills": check_kills, "race": race}[command](Path(where), *map(int, numbers))  # type: ignore[operator]
