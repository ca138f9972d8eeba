"""What an audit ran on: the machine, the versions, and the rates that bound how fast anything can be."""

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from kernelbraid.audit.driver import Driver
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
    flops, bandwidth = measured_rates(device) if rates else (0.0, 0.0)
    if device == "cuda":
        return _gpu(flops, bandwidth)
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


def _gpu(flops: float, bandwidth: float) -> Environment:
    """The first visible GPU: its multiprocessors, memory and second-level cache."""
    driver = Driver()
    tools = (("driver", _driver_release()), ("cuda", driver.version()), ("ptxas", _ptxas()))
    return Environment(
        architecture=driver.architecture(),
        device=driver.name(),
        cores=driver.multiprocessors(),
        memory_gib=round(driver.memory_bytes() / 2**30, 1),
        cache_bytes=driver.cache_bytes(),
        versions=(*versions(), *((name, version) for name, version in tools if version)),
        flops=flops,
        bandwidth=bandwidth,
    )


def _driver_release() -> str:
    """The driver's release, such as `580.159.04`; empty where the kernel module does not tell."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        pass
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\d+\.\d+(?:\.\d+)?", text)
    return found[0] if found else ""


@cache
def _ptxas() -> str:
    """Release of the assembler that Triton uses; empty where there is no Triton."""
    try:
        files = importlib.metadata.files("triton") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for file in files:
        if file.name == "ptxas":
            said = subprocess.run([str(file.locate()), "--version"], capture_output=True, text=True)
            found = re.search(r"V(\d+\.\d+\.\d+)", said.stdout)
            return found[1] if found else ""
    return ""


def require_device(device: str) -> None:
    """Raise ValueError, saying what is missing, unless implementations can be audited on `device` here."""
    if device == "cpu":
        return
    if device != "cuda":
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    try:
        driver = Driver()
    except RuntimeError as error:
        raise ValueError(f"device cuda: {error}; choose device cpu") from error
    if not torch_has_cuda():
        raise ValueError(f"device cuda: {driver.name()} is here, but torch was installed without CUDA")


def gpus() -> tuple[str, ...]:
    """Names of the visible NVIDIA GPUs; none where there is no driver."""
    try:
        return tuple(Driver(number).name() for number in range(Driver().count()))
    except RuntimeError:
        return ()


def torch_has_cuda() -> bool:
    """Whether the installed torch can use a GPU."""
    import torch

    return torch.cuda.is_available()


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


def measured_rates(device: str = "cpu", *, again: bool = False) -> tuple[float, float]:
    """Operations a second and bytes a second.

    On the CPU: float32 multiply-adds in registers, and reading, of all cores. On a GPU: a bf16 matrix
    product, and a copy, read and written. The best of every try of this process, tries being short: other
    load only makes a machine look slower than it is, and rarely does so for every millisecond.

    Args:
        device: `cpu` or `cuda`.
        again: measure once more and longer, where a first measurement is there already.
    """
    known = _rates.setdefault(device, [])
    if again or not known:
        seconds = AGAIN_SECONDS if again else FIRST_SECONDS
        known.append(_tried_rates(device, seconds))
    return max(flops for flops, _ in known), max(bandwidth for _, bandwidth in known)


_rates: dict[str, list[tuple[float, float]]] = {}


def _tried_rates(device: str, seconds: float) -> tuple[float, float]:
    if device == "cpu":
        return fma_rate(seconds), _reading_rate(seconds)
    from kernelbraid.audit.device import rates

    return rates(seconds)


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
