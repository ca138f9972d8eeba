"""What an audit ran on: the machine, the versions, and the rates that bound how fast anything can be."""

import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kernelbraid.audit.peak import fma_rate
from kernelbraid.ir.evidence import Environment
from kernelbraid.ops.installed import cpu_model

PACKAGES = ("numpy", "numba", "llvmlite", "torch", "triton")
"""Packages whose version belongs to the fingerprint where they are installed."""

UNKNOWN_CACHE_BYTES = 64 << 20
"""Taken for the last-level cache where the system does not tell: too much makes a cold figure no warmer."""

COLD_CACHES = 4
"""Bytes that nothing in a cache can serve: this many times the last-level cache."""

FIRST_SECONDS, AGAIN_SECONDS = 0.12, 1.0
"""Seconds of tries for each rate: at first, and before a time is called impossible."""

_PIECE = 16 << 20


def fingerprint(device: str = "cpu", *, rates: bool = True) -> Environment:
    """Describe this machine and its software.

    Args:
        device: `cpu` or `cuda`.
        rates: also measure operations and bytes a second, once a process, about 1 s on all cores.

    Raises:
        ValueError: the device is unknown or not there.
    """
    require_device(device)
    flops, bandwidth = measured_rates() if rates else (0.0, 0.0)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Environment(
        architecture="cpu",
        device=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory / 2**30, 1),
        cache_bytes=cache_bytes(),
        versions=versions(),
        flops=flops,
        bandwidth=bandwidth,
    )


def require_device(device: str) -> None:
    """Raise ValueError, saying what is missing, unless implementations can be audited on `device` here."""
    if device == "cpu":
        return
    if device != "cuda":
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    found = gpus()
    if not found:
        raise ValueError("device cuda: this machine has no NVIDIA GPU that can be used; choose device cpu")
    raise ValueError(
        f"device cuda: this version audits on the CPU alone (found {found[0]}); choose device cpu"
    )


def gpus() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that can be used here; none where nvidia-ml-py or its driver is missing."""
    if importlib.util.find_spec("pynvml") is None:
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def versions() -> tuple[tuple[str, str], ...]:
    """Versions of Python and of the packages that can change a result or a time, without importing them."""
    found = [("python", platform.python_version())]
    for package in PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def cache_bytes() -> int:
    """Bytes of last-level cache that the cores of this process's affinity can use together."""
    caches: dict[tuple[int, str], int] = {}
    for core in os.sched_getaffinity(0):
        for index in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            try:
                level = int((index / "level").read_text())
                size = _bytes((index / "size").read_text().strip())
                caches[level, (index / "shared_cpu_list").read_text().strip()] = size
            except (OSError, ValueError):
                continue
    if not caches:
        return UNKNOWN_CACHE_BYTES
    last = max(level for level, _ in caches)
    return sum(size for (level, _), size in caches.items() if level == last)


def _bytes(text: str) -> int:
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)


def measured_rates(*, again: bool = False) -> tuple[float, float]:
    """Operations a second (float32 multiply-adds in registers) and bytes a second (reading) of all cores.

    The best of every try of this process, tries being short: other load only makes a machine look slower than
    it is, and rarely does so for every millisecond.

    Args:
        again: measure once more and longer, where a first measurement is there already.
    """
    if again or not _rates:
        seconds = AGAIN_SECONDS if again else FIRST_SECONDS
        _rates.append((fma_rate(seconds), _reading_rate(seconds)))
    return max(flops for flops, _ in _rates), max(bandwidth for _, bandwidth in _rates)


_rates: list[tuple[float, float]] = []


def _reading_rate(seconds: float) -> float:
    """Bytes a second, over pieces of a memory that no cache holds, one after the other."""
    cores = len(os.sched_getaffinity(0))
    memory = np.ones(COLD_CACHES * cache_bytes() // 4, np.float32)
    pieces = [
        np.array_split(piece, cores) for piece in np.array_split(memory, max(1, memory.nbytes // _PIECE))
    ]
    with ThreadPoolExecutor(cores) as pool:
        best = _fastest(lambda i: list(pool.map(np.max, pieces[i % len(pieces)])), seconds)
    return memory.nbytes / len(pieces) / best


def _fastest(work: Callable[[int], object], seconds: float) -> float:
    """The least seconds that one try of `work` took; it is told the number of the try."""
    best, number = np.inf, 0
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        work(number)
        best = min(best, time.perf_counter() - start)
        number += 1
    return float(best)
