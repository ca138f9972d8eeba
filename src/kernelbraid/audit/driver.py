"""CUDA's driver through ctypes: plain device memory that another process can open, and copies.

Memory of torch's allocator cannot serve: it hands out parts of larger blocks, and what it shares stays
allocated until the receiver says that it is done, which a process that was ended never does. This file
imports nothing else of this package, so that a worker may load it by its path.
"""

import ctypes
import math
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

GRANULARITY = 2 << 20
"""Bytes: smaller allocations share a block, and opening a handle opens the whole block."""

_LAZY_PEER_ACCESS = 1
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76
_MULTIPROCESSORS = 16
_CACHE_BYTES = 38
_KERNEL_NODE = 0


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", c_char * 64),)


class _KernelNode(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v2`: a launch in a graph."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class Driver:
    """The driver, with the primary context of one device: the one that torch uses.

    Args:
        device: number among the visible ones.

    Raises (every method): RuntimeError, with the driver's own words.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError("this machine has no NVIDIA driver (libcuda.so.1)") from error
        self._call("cuInit", c_uint(0))
        self._device = c_int()
        self._call("cuDeviceGet", byref(self._device), c_int(device))
        self._context = c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(c_int(code), byref(text))
            said = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"CUDA: {said} (error {code} of {name})")

    def _enter(self) -> None:
        """Make the context the calling thread's."""
        if not self._context:
            self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)

    def count(self) -> int:
        """Number of visible devices."""
        found = c_int()
        self._call("cuDeviceGetCount", byref(found))
        return found.value

    def name(self) -> str:
        """Name of the device."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, c_int(len(text)), self._device)
        return text.value.decode(errors="replace")

    def version(self) -> str:
        """The newest CUDA version that the driver supports, such as `13.0`."""
        found = c_int()
        self._call("cuDriverGetVersion", byref(found))
        return f"{found.value // 1000}.{found.value % 1000 // 10}"

    def architecture(self) -> str:
        """Compute capability as the compilers write it, such as `sm_90`."""
        return f"sm_{self._attribute(_COMPUTE_MAJOR)}{self._attribute(_COMPUTE_MINOR)}"

    def multiprocessors(self) -> int:
        return self._attribute(_MULTIPROCESSORS)

    def cache_bytes(self) -> int:
        """Size of the second-level cache."""
        return self._attribute(_CACHE_BYTES)

    def memory_bytes(self) -> int:
        """Size of the device's memory."""
        found = c_size_t()
        self._call("cuDeviceTotalMem_v2", byref(found), self._device)
        return found.value

    def free_bytes(self) -> int:
        """Free memory of the device."""
        self._enter()
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def launches(self, graph: int) -> list[tuple[str, int, int, int]]:
        """Kernels that a captured graph launches, in no stated order.

        Args:
            graph: handle of a graph that was not destroyed.

        Returns:
            Of each launch the kernel's name, its blocks, the threads of a block, and how many blocks the
            device holds at a time.
        """
        self._enter()
        count = c_size_t()
        self._call("cuGraphGetNodes", c_void_p(graph), None, byref(count))
        nodes = (c_void_p * max(1, count.value))()
        self._call("cuGraphGetNodes", c_void_p(graph), nodes, byref(count))
        found = []
        for node in map(c_void_p, nodes[: count.value]):
            kind = c_int()
            self._call("cuGraphNodeGetType", node, byref(kind))
            if kind.value != _KERNEL_NODE:
                continue
            launch, name, fit = _KernelNode(), ctypes.c_char_p(), c_int()
            self._call("cuGraphKernelNodeGetParams_v2", node, byref(launch))
            function = c_void_p(launch.function)
            if not function:
                self._call("cuKernelGetFunction", byref(function), c_void_p(launch.kernel))
            self._call("cuFuncGetName", byref(name), function)
            threads = math.prod(launch.block)
            occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            self._call(occupancy, byref(fit), function, c_int(threads), c_size_t(launch.shared))
            called = (name.value or b"?").decode(errors="replace")
            found.append((called, math.prod(launch.grid), threads, fit.value * self.multiprocessors()))
        return found

    def _attribute(self, number: int) -> int:
        found = c_int()
        self._call("cuDeviceGetAttribute", byref(found), c_int(number), self._device)
        return found.value

    # ---- memory: addresses are integers, sizes bytes

    def allocate(self, size: int) -> int:
        """Allocate a block of its own; `size` is rounded up to `GRANULARITY`."""
        self._enter()
        pointer = c_uint64()
        self._call("cuMemAlloc_v2", byref(pointer), c_size_t(-(-size // GRANULARITY) * GRANULARITY))
        return pointer.value

    def free(self, pointer: int) -> None:
        self._enter()
        self._call("cuMemFree_v2", c_uint64(pointer))

    def share(self, pointer: int) -> bytes:
        """A handle by which another process can open an allocation."""
        self._enter()
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(pointer))
        return ctypes.string_at(byref(handle), ctypes.sizeof(handle))

    def open(self, handle: bytes) -> int:
        """The address here of another process's allocation."""
        self._enter()
        found, pointer = _Handle.from_buffer_copy(handle), c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(pointer), found, c_uint(_LAZY_PEER_ACCESS))
        return pointer.value

    def close(self, pointer: int) -> None:
        self._enter()
        self._call("cuIpcCloseMemHandle", c_uint64(pointer))

    def pin(self, address: int, size: int) -> None:
        """Keep host memory in place, so that copies run at the bus's speed."""
        self._enter()
        self._call("cuMemHostRegister_v2", c_void_p(address), c_size_t(size), c_uint(0))

    def unpin(self, address: int) -> None:
        self._enter()
        self._call("cuMemHostUnregister", c_void_p(address))

    def upload(self, pointer: int, address: int, size: int) -> None:
        """Copy host memory to the device; done when this returns."""
        self._enter()
        self._call("cuMemcpyHtoD_v2", c_uint64(pointer), c_void_p(address), c_size_t(size))
        self._call("cuCtxSynchronize")

    def download(self, address: int, pointer: int, size: int) -> None:
        """Copy device memory to the host; done when this returns."""
        self._enter()
        self._call("cuMemcpyDtoH_v2", c_void_p(address), c_uint64(pointer), c_size_t(size))

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device; done when this returns."""
        self._enter()
        self._call("cuMemcpyDtoD_v2", c_uint64(target), c_uint64(source), c_size_t(size))
        self._call("cuCtxSynchronize")


class DeviceBytes:
    """Device memory as CUDA's array interface describes it: torch makes a tensor over it without a copy."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }
