"""Scopes of a verification judged side by side, each judge a process of its own.

Drawing inputs, the float64 reference and comparing bits keep an interpreter busy: judges that shared one
would wait for each other, and the device for all of them.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue

from kernelbraid.audit.partial import Part
from kernelbraid.contract import Source
from kernelbraid.ir.evidence import Level

Scope = tuple[tuple[tuple[str, int], ...], str]
"""Constant axes and dtype."""
Told = Callable[[Scope, str, float], None]
"""Told of a requirement that was checked in a scope, and how many scopes are done, parts of them counted."""
Messages = SimpleQueue[tuple[Scope, str, float]]

WAIT_SECONDS = 0.2
"""Between two looks at what the judges have told."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a judge needs to know beside its scope."""

    operator: str
    backend: str
    architecture: str
    source: Source
    against: Source | None
    level: Level
    seed: int


Judge = Callable[[Order, Scope, Callable[[str, float], None]], Part]
"""Judges a scope: told of each requirement, and of the share of them that is done."""

_messages: Messages
"""Of a judge to the process that started it."""


def judged(
    judge: Judge, order: Order, scopes: Sequence[Scope], judges: int, told: Told
) -> Iterator[tuple[Scope, Part]]:
    """Let so many processes judge scopes; yields what each one finds as it comes.

    Args:
        judge: a function of a module, which processes can import.
        order: the same for all scopes.
        scopes: distinct ones.
        judges: processes at a time.
        told: called in this process, with a sum that never falls.

    Raises:
        RuntimeError: a judge did, or its process ended. The others and all workers are ended then.
    """
    context = multiprocessing.get_context("spawn")
    messages: Messages = context.SimpleQueue()
    done: dict[Scope, float] = dict.fromkeys(scopes, 0.0)
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(judges, context, _begin, (messages,)) as pool:
        waiting: dict[Future[Part], Scope] = {pool.submit(_task, judge, order, s): s for s in scopes}
        try:
            while waiting:
                ended, _ = wait(waiting, WAIT_SECONDS, FIRST_COMPLETED)
                while not messages.empty():
                    scope, requirement, share = messages.get()
                    done[scope] = share
                    told(scope, requirement, sum(done.values()))
                for each in ended:
                    yield waiting.pop(each), each.result()
        except BaseException:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def _begin(messages: Messages) -> None:
    global _messages
    _messages = messages


def _task(judge: Judge, order: Order, scope: Scope) -> Part:
    return judge(order, scope, lambda requirement, share: _messages.put((scope, requirement, share)))
