"""The judge's side of a GPU: memory that it shares with workers, caches that it sweeps, rates it measures.

The judge fills and reads numpy arrays in pinned host memory, a mirror of the device memory that a worker
opens: `push` copies the mirror there, `pull` copies it back. Inputs cannot be mapped read-only on a GPU, so
the judge keeps a copy of its own on the device, and `intact` compares.
"""

import contextlib
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from kernelbraid.audit.buffers import Arena, size_of
from kernelbraid.audit.driver import DeviceBytes, Driver

MATRIX = 8192
"""Rows and columns of the matrices whose product measures the rate of operations."""
COPIED_BYTES = 1 << 30
"""Bytes whose copy measures the bandwidth."""


@cache
def driver() -> Driver:
    """The driver of the first visible device, with torch's context."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return Driver()


class DeviceArena(Arena):
    """An arena whose arrays are a mirror of device memory; see `buffers.Arena`.

    Args:
        size: bytes.
        label: of the mirror.

    Raises:
        RuntimeError: the device or the host has no memory for it.
    """

    def __init__(self, size: int, label: str) -> None:
        self._pointer = self._pristine = 0
        self._pinned = False
        super().__init__(size, label)
        self._driver = driver()
        self._address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self._sealed = False
        try:
            self._driver.pin(self._address, self.size)
            self._pinned = True
            self._pointer = self._driver.allocate(self.size)
            self.handle = self._driver.share(self._pointer).hex()
        except RuntimeError as error:
            raise RuntimeError(f"no memory for {self.size >> 20} MiB of {label}: {error}") from error

    @property
    def used(self) -> int:
        """Bytes that the arrays take."""
        return size_of({p["name"]: (tuple(p["shape"]), p["dtype"]) for p in self.placements})

    def seal(self) -> None:
        """From here on `intact` knows whether a worker wrote to the arena."""
        if not self._sealed:
            self._pristine = self._driver.allocate(self.size)
            self._sealed = True

    def push(self) -> None:
        start, self.pushed = self.pushed, 0
        size = self.used - start
        if size <= 0:
            return
        if not self._sealed:
            self._driver.upload(self._pointer + start, self._address + start, size)
            return
        self._driver.upload(self._pristine + start, self._address + start, size)
        self._driver.copy(self._pointer + start, self._pristine + start, size)

    def pull(self) -> None:
        if self.used:
            self._driver.download(self._address, self._pointer, self.used)

    def intact(self) -> bool:
        if not self._sealed or not self.used:
            return True
        return torch.equal(_words(self._pointer, self.used), _words(self._pristine, self.used))

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):
            for pointer in (self._pointer, self._pristine):
                if pointer:
                    self._driver.free(pointer)
            if self._pinned:
                self._driver.unpin(self._address)
        super().__del__()


def _words(pointer: int, size: int) -> torch.Tensor:
    whole: torch.Tensor = torch.as_tensor(DeviceBytes(pointer, size), device="cuda")
    return whole.view(torch.int64)


class DeviceSweep:
    """Writes several times the second-level cache, so that what was used before is not in it."""

    def __init__(self, size: int) -> None:
        self._memory = torch.zeros(size // 4, dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        self._memory.add_(1)
        torch.cuda.synchronize()


def rates(seconds: float) -> tuple[float, float]:
    """Operations a second of a bf16 matrix product, and bytes a second of a copy, read and written.

    The best of every try in about that time each. Random numbers: zeros draw less power and run faster.
    """
    flops, bandwidth = _product_rate(seconds), _copy_rate(seconds)
    torch.cuda.empty_cache()
    return flops, bandwidth


def _product_rate(seconds: float) -> float:
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda").to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return 2.0 * MATRIX**3 / _fastest(lambda: torch.mm(left, right, out=product), seconds)


def _copy_rate(seconds: float) -> float:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2.0 * COPIED_BYTES / _fastest(lambda: target.copy_(source), seconds)


def _fastest(work: Callable[[], Any], seconds: float) -> float:
    """The least seconds of one try by the device's clock."""
    work()
    torch.cuda.synchronize()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
        start.record()
        work()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    return best
