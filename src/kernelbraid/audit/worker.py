"""The worker: a process of its own in which candidate code runs. It knows no expected value and no seed.

Run by path (`python -I worker.py SOCKET PARENT`): nothing else of this package enters its interpreter.
Requests and replies are JSON behind a length, over a private socket; arrays lie in shared memory whose
descriptors come along.
"""

import contextlib
import ctypes
import gc
import importlib.util
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

MODULE = "implementation"
MESSAGE_LIMIT = 8000
"""Characters of an error's text that reach the judge."""
EDGES = 8
"""Schedule edges reported an axis: the smallest four, and others spread over the rest."""

Message = dict[str, Any]
EntryPoints = dict[str, Callable[..., Any]]


class RequestError(Exception):
    """A request that candidate code failed; `kind` says in which step."""

    def __init__(self, kind: str, error: BaseException) -> None:
        super().__init__(kind)
        self.kind = kind
        self.error = error


class Slot:
    """One loaded program: arrays and calls, ready to run."""

    def __init__(self, message: Message, buffers: dict[str, Any], entry_points: EntryPoints) -> None:
        self.calls = [
            (entry_points[name], {key: _argument(value, buffers) for key, value in arguments.items()})
            for name, arguments in message["calls"]
        ]

    def run(self, first: int, count: int, repeats: int, clock: Callable[[], float]) -> float:
        """Make calls `first .. first+count`, `repeats` times over; returns seconds."""
        calls = self.calls[first : first + count]
        start = clock()
        for _ in range(repeats):
            for function, arguments in calls:
                function(**arguments)
        return clock() - start


def _mapped(descriptor: int, size: int, access: int) -> mmap.mmap:
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    memory = mmap.mmap(descriptor, size, flags=flags, prot=access)
    os.close(descriptor)
    return memory


def _argument(value: Any, buffers: dict[str, Any]) -> Any:
    if isinstance(value, list):
        name, start, stop = value
        return buffers[name] if start == 0 and stop is None else buffers[name][start:stop]
    return value


class Worker:
    """Answers requests until its socket closes."""

    slot: type[Slot] = Slot

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.clock: Callable[[], float] = time.perf_counter
        self.module: Any = None
        self.entry_points: EntryPoints = {}
        self.slots: dict[int, Any] = {}
        self.memories: dict[int, Any] = {}

    def serve(self) -> None:
        while (received := self._receive()) is not None:
            message, descriptors = received
            reply: Message = {"id": message["id"], "nonce": message["nonce"]}
            try:
                for slot in message["drop"]:
                    del self.slots[slot]
                for number in message["forget"]:
                    del self.memories[number]
                reply |= getattr(self, "do_" + message["do"])(message, descriptors)
            except RequestError as failure:
                reply |= {"failed": failure.kind, **_described(failure.error)}
            except BaseException as error:  # whatever candidate code raises, SystemExit too, is an answer
                reply |= {"failed": message["do"], **_described(error)}
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
            text = _encoded(reply)
            self.channel.sendall(struct.pack("<I", len(text)) + text)

    def _receive(self) -> tuple[Message, list[int]] | None:
        head, descriptors, _, _ = socket.recv_fds(self.channel, 4, 4, socket.MSG_WAITALL)
        if len(head) < 4:
            return None
        (length,) = struct.unpack("<I", head)
        text = bytearray()
        while len(text) < length:
            piece = self.channel.recv(min(length - len(text), 1 << 20))
            if not piece:
                return None
            text += piece
        return json.loads(text), descriptors

    def do_build(self, message: Message, _: list[int]) -> Message:
        """Import the source once; with constant axes also ask for its numerics and its schedule's edges."""
        if self.module is None:
            self.module = import_source(message["path"])
            for called, name in message["entry_points"].items():
                function = getattr(self.module, name, None)
                if not callable(function):
                    raise RequestError("import", AttributeError(f"the source does not define {name}()"))
                self.entry_points[called] = function
        if message["constant_axes"] is None:
            return {"numerics": None, "edges": {}}
        constant = message["constant_axes"]
        try:
            numerics = dict(self.module.numerics(dict(constant)))
        except Exception as error:
            raise RequestError("numerics", error) from error
        try:
            edges = schedule_edges(self.module, constant, message["axes"])
        except Exception as error:
            raise RequestError("schedule", error) from error
        return {"numerics": numerics, "edges": edges}

    def do_load(self, message: Message, descriptors: list[int]) -> Message:
        """Map a program's memory; with a `count`, make its first calls once."""
        buffers: dict[str, Any] = {}
        for arena, access in (
            (message["inputs"], mmap.PROT_READ),
            (message["memory"], mmap.PROT_READ | mmap.PROT_WRITE),
        ):
            if arena["new"]:
                self.memories[arena["number"]] = self.opened(arena, descriptors, access)
            for place in arena["arrays"]:
                buffers[place["name"]] = self.placed(self.memories[arena["number"]], place)
        self.slots[message["slot"]] = self.slot(message, buffers, self.entry_points)
        return self.do_run(message, []) if message["count"] else {}

    def opened(self, arena: Message, descriptors: list[int], access: int) -> Any:
        """Memory of an arena that is heard of first."""
        return _mapped(descriptors.pop(0), arena["size"], access)

    def placed(self, memory: Any, place: Message) -> Any:
        """One array of an arena."""
        shape = tuple(place["shape"])
        return np.ndarray(shape, place["dtype"], buffer=memory, offset=place["offset"])

    def do_run(self, message: Message, _: list[int]) -> Message:
        slot = self.slots[message["slot"]]
        return {"elapsed": slot.run(message["first"], message["count"], message["repeats"], self.clock)}

    def do_launches(self, message: Message, _: list[int]) -> Message:
        """What a call of a loaded program launches on a device: nothing here."""
        return {"launches": []}

    def do_specialisations(self, _: Message, __: list[int]) -> Message:
        """Compiled specialisations of the module's functions, wherever they are kept."""
        found = set()
        if "numba" in sys.modules:
            dispatcher = sys.modules["numba.core.dispatcher"].Dispatcher
            for item in gc.get_objects():
                if issubclass(type(item), dispatcher) and item.py_func.__module__ == MODULE:
                    name = item.py_func.__qualname__
                    found |= {f"{name}({', '.join(map(str, signature))})" for signature in item.signatures}
        return {"specialisations": sorted(found)}


def _encoded(reply: Message) -> bytes:
    try:
        return json.dumps(reply).encode()
    except (TypeError, ValueError) as error:  # candidate code answered with what JSON cannot say
        stamp = {"id": reply["id"], "nonce": reply["nonce"]}
        return json.dumps({**stamp, "failed": "answer", **_described(error)}).encode()


def import_source(path: str) -> Any:
    specification = importlib.util.spec_from_file_location(MODULE, path)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[MODULE] = module  # Numba looks its functions' module up by name
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        exec(compile(text, path, "exec"), module.__dict__)  # a loader would follow a declared encoding
    except BaseException as error:
        raise RequestError("import", error) from error
    return module


def _described(error: BaseException) -> Message:
    """What the judge needs to know of an exception; a hostile one describes itself with nothing."""
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_tb(error.__traceback__)[-6:])
    except Exception:
        text, trace = type(error).__name__, ""
    kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__]
    return {"error": text[:MESSAGE_LIMIT], "kinds": kinds[:16], "trace": trace[-MESSAGE_LIMIT:]}


def schedule_edges(module: Any, constant: Message, axes: list[Message]) -> dict[str, list[int]]:
    """Values of each load axis at which `schedule` answers otherwise than just below.

    The other axes stand at their smallest, middle and largest values in turn. Where every value has an answer
    of its own, as while a tile follows a length, the first and the last of them are the edges.
    """
    declared = getattr(module, "KNOBS", {})
    knobs = {name: getattr(module, name) for name, (kind, _) in declared.items() if kind == "schedule"}
    edges: dict[str, list[int]] = {}
    for axis in axes:
        found: set[int] = set()
        for share in (0.0, 0.5, 1.0):
            point = {**constant, **{a["name"]: _between(a["low"], a["high"], share) for a in axes}}

            def at(value: int, point: Message = point, name: str = axis["name"]) -> Any:
                try:
                    return dict(module.schedule({**point, name: value}, dict(knobs)))
                except Exception as error:
                    if value == 1:
                        raise  # the smallest size of anything must have a schedule
                    return type(error).__name__

            low, high = max(axis["low"], 1), axis["high"]
            for v in _changes(at, low, high):
                inside = low + 1 < v < high and at(v - 2) != at(v - 1) and at(v) != at(v + 1)
                if not inside:
                    found.add(v)
        ordered = sorted(found)
        near, far = ordered[: EDGES // 2], ordered[EDGES // 2 :]
        edges[axis["name"]] = near + far[:: max(1, -(-len(far) // (EDGES - EDGES // 2)))]
    return edges


def _between(low: int, high: int, share: float) -> int:
    low = max(low, 1)
    return round(float(low * (max(high, low) / low) ** share))


def _changes(at: Callable[[int], Any], low: int, high: int) -> set[int]:
    """First values of new answers, by bisection between points at most a sixteenth apart."""
    points = [low]
    while points[-1] < high:
        points.append(min(high, points[-1] + max(1, points[-1] // 16)))
    found = set()
    answers = [at(point) for point in points]
    for left, right, before, after in zip(points, points[1:], answers, answers[1:], strict=False):
        if before != after:
            while right - left > 1:
                middle = (left + right) // 2
                left, right = (middle, right) if at(middle) == before else (left, middle)
            found.add(right)
    return found


def _settle(parent: int) -> None:
    """Die with the judge, leave no core file, and be the first to go when memory runs out."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


if __name__ == "__main__":
    _settle(int(sys.argv[2]))
    Worker(socket.socket(fileno=int(sys.argv[1]))).serve()
