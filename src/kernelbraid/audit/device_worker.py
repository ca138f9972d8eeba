"""The worker on a GPU: what `worker.py` is on a CPU, with tensors over memory that the judge shares.

Run by path, as that file is, which it loads from beside itself. What it needs of torch it holds by references
taken before candidate code is imported. It answers when the device has done everything that it was given.
"""

import contextlib
import gc
import importlib.util
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kernelbraid.audit import driver as driver_file
    from kernelbraid.audit import worker as worker_file
else:

    def _beside(name: str) -> Any:
        path = Path(__file__).with_name(f"{name}.py")
        specification = importlib.util.spec_from_file_location(f"_{name}", path)
        module = importlib.util.module_from_spec(specification)
        sys.modules[f"_{name}"] = module
        specification.loader.exec_module(module)
        return module

    driver_file = _beside("driver")
    worker_file = _beside("worker")

Message = dict[str, Any]

SHARE_OF_MEMORY = 0.5
"""Share of the device's memory that torch may allocate here."""
GRAPH_CALLS = 256
"""Calls of one graph where a batch repeats them: capturing thousands takes longer than making them."""


class OpenedMemory:
    """An arena of the judge's, opened here until the last tensor over it is gone."""

    def __init__(self, driver: driver_file.Driver, handle: str, size: int) -> None:
        self._driver = driver
        self._pointer = driver.open(bytes.fromhex(handle))
        self.tensor: torch.Tensor = torch.as_tensor(
            driver_file.DeviceBytes(self._pointer, size), device="cuda"
        )

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, RuntimeError):
            self._driver.close(self._pointer)


class DeviceClock:
    """Seconds by the device's events, when everything that it was given is done."""

    def __init__(self) -> None:
        event = torch.cuda.Event
        self._base, self._now = event(enable_timing=True), event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._record, self._elapsed = event.record, event.elapsed_time
        self._synchronize = torch.cuda.synchronize
        self._record(self._base)

    def __call__(self) -> float:
        self._record(self._now)
        self._synchronize()
        return float(self._elapsed(self._base, self._now)) / 1e3


class DeviceSlot(worker_file.Slot):
    """A loaded program whose calls may be captured in a graph."""

    graph: torch.cuda.CUDAGraph | None = None
    replays: int = 1
    """Of the graph, one right after the other, in a batch."""
    captured: tuple[int, int, int] = (0, 0, 0)
    """First call, number of calls and repeats that all replays make."""

    def run(self, first: int, count: int, repeats: int, clock: Callable[[], float]) -> float:
        if self.graph is None or (first, count, repeats) != self.captured:
            return super().run(first, count, repeats, clock)
        start = clock()
        for _ in range(self.replays):
            self.graph.replay()
        return clock() - start

    def capture(self, repeats: int) -> None:
        """Capture all calls, for `repeats` times over; all were made before, so that all is compiled."""
        inside = repeats_of_a_graph(len(self.calls), repeats)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            super().run(0, len(self.calls), inside, _no_clock)
        graph.instantiate()
        self.graph, self.replays = graph, repeats // inside
        self.captured = (0, len(self.calls), repeats)

    def launches(self, driver: driver_file.Driver) -> list[tuple[str, float, int, int, int]]:
        """As of `Driver.launches`, with how many a call makes on average after the name."""
        if self.graph is None:
            return []
        counted = Counter(driver.launches(self.graph.raw_cuda_graph()))
        calls = len(self.calls) * self.captured[2] // self.replays
        return [(each[0], count / calls, *each[1:]) for each, count in sorted(counted.items())]


def repeats_of_a_graph(calls: int, repeats: int) -> int:
    """Return the largest divisor of `repeats` with at most `GRAPH_CALLS` calls, at least 1."""
    most = max(1, min(repeats, GRAPH_CALLS // max(1, calls)))
    return next(inside for inside in range(most, 0, -1) if repeats % inside == 0)


def _no_clock() -> float:
    return 0.0


class DeviceWorker(worker_file.Worker):
    """Answers requests until its socket closes."""

    slot = DeviceSlot

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(channel)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_per_process_memory_fraction(SHARE_OF_MEMORY)
        self._driver = driver_file.Driver()
        self._synchronize = torch.cuda.synchronize
        self.clock = DeviceClock()
        self._types = {
            name: getattr(torch, name)
            for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8")
        }

    def opened(self, arena: Message, descriptors: list[int], access: int) -> Any:
        return OpenedMemory(self._driver, arena["handle"], arena["size"])

    def placed(self, memory: Any, place: Message) -> Any:
        kind = self._types[place["dtype"]]
        size = kind.itemsize
        for length in place["shape"]:
            size *= length
        if not size:
            return torch.empty(place["shape"], dtype=kind, device="cuda")
        piece = memory.tensor[place["offset"] : place["offset"] + size]
        return piece.view(kind).view(place["shape"])

    def do_build(self, message: Message, descriptors: list[int]) -> Message:
        reply = super().do_build(message, descriptors)
        self._synchronize()
        return reply

    def do_load(self, message: Message, descriptors: list[int]) -> Message:
        """Open a program's memory; `capture` says how often a graph repeats its calls, 0 for no graph."""
        reply = super().do_load(message, descriptors)
        if message["capture"]:
            try:
                self.slots[message["slot"]].capture(message["capture"])
                self._synchronize()
            except Exception as error:
                raise worker_file.RequestError("capture", error) from error
        return reply

    def do_launches(self, message: Message, descriptors: list[int]) -> Message:
        """What a call of a loaded program launches, where its calls were captured."""
        return {"launches": self.slots[message["slot"]].launches(self._driver)}

    def do_specialisations(self, message: Message, descriptors: list[int]) -> Message:
        """Compiled specialisations of the module's functions, Triton's among them."""
        reply = super().do_specialisations(message, descriptors)
        return {"specialisations": sorted({*reply["specialisations"], *triton_kernels()})}


def triton_kernels() -> set[str]:
    """Every kernel that Triton compiled for the implementation's functions, with what it was compiled for."""
    found: set[str] = set()
    if "triton" not in sys.modules:
        return found
    kind = sys.modules["triton.runtime.jit"].JITFunction
    for item in gc.get_objects():
        if issubclass(type(item), kind) and getattr(item.fn, "__module__", "") == worker_file.MODULE:
            for kept in item.device_caches.values():
                found |= {_described(item, kernel) for kernel in list(kept[0].values())}
    return found


def _described(function: Any, kernel: Any) -> str:
    """`name(types; constants) warps=.. stages=.. registers=.. spills=.. shared=.. hash`; shared in bytes."""
    source, about = kernel.src, kernel.metadata
    names = list(getattr(function, "arg_names", ()))
    types = ", ".join(f"{name}: {kind}" for name, kind in source.signature.items() if kind != "constexpr")
    constants = ", ".join(f"{_place(at, names)}={value!r}" for at, value in sorted(source.constants.items()))
    attributes = ", ".join(f"{_place(at, names)}%16" for at in sorted(source.attrs) if source.attrs[at])
    return (
        f"{function.fn.__qualname__}({types}; {constants}; {attributes}) "
        f"warps={about.num_warps} stages={about.num_stages} registers={_known(kernel, 'n_regs')} "
        f"spills={_known(kernel, 'n_spills')} shared={about.shared} {kernel.hash[:12]}"
    )


def _known(kernel: Any, name: str) -> int | str:
    """What the driver said when it loaded a kernel."""
    value = getattr(kernel, name, None)
    return value if isinstance(value, int) else "?"


def _place(at: Any, names: list[str]) -> str:
    """The argument at a path of indices, by name where it has one."""
    path = at if isinstance(at, tuple) else (at,)
    first = names[path[0]] if isinstance(path[0], int) and path[0] < len(names) else str(path[0])
    return ".".join((first, *map(str, path[1:])))


if __name__ == "__main__":
    worker_file._settle(int(sys.argv[2]))
    DeviceWorker(socket.socket(fileno=int(sys.argv[1]))).serve()
