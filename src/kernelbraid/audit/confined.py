"""A process that runs untrusted code: asked over a socket, limited, stopped when it answers, ended whole."""

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kernelbraid.audit.descendants import HOUSEHOLD, children, end_tree, resident
from kernelbraid.ir.evidence import Status

MARK = "KERNELBRAID_WORKER"
"""Environment variable by which a process is known as some worker's."""

ROOM_BYTES = 16 << 20
"""Free disk space below which a failed write is the machine's fault."""
_REPLY_LIMIT = 1 << 20
_POLL_SECONDS = 0.02
_WRITING = ("read-only", "readonly", "not writable", "writeable flag")
"""Words of the errors that numpy and Numba give for writing to an input."""
_NO_MEMORY = frozenset({"builtins.MemoryError", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"})
_COMPILERS = ("numba.", "llvmlite.", "triton.")
"""Packages whose exceptions say that a source does not compile."""

_INHERITED = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
_THREAD_VARIABLES = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker may use."""

    build_seconds: float = 120.0
    run_seconds: float = 30.0
    memory_bytes: int = 4 << 30
    """Resident memory of a worker and everything below it, beyond the shared buffers it was given."""
    output_bytes: int = 64 << 10
    """Standard output and error kept; the rest is read and dropped."""


def limits_of(device: str) -> Limits:
    """The usual limits on `cpu` or `cuda`: there a call may have to compile several kernels."""
    return (
        Limits() if device == "cpu" else Limits(build_seconds=300.0, run_seconds=120.0, memory_bytes=8 << 30)
    )


class WorkerFailure(RuntimeError):  # noqa: N818 - most are the candidate's failure, not an error
    """A worker that did not do what it was asked: how the audit ends, why, and what the worker printed."""

    def __init__(self, status: Status, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason.encode(errors="backslashreplace").decode()  # also what no file could hold
        self.output = output


class Confined:
    """A fresh Python process that answers one request at a time.

    It stands still (SIGSTOP) from the moment it answers until the next request, threads included. A request
    that is not answered in time, or answered out of turn, or that leaves processes behind, ends it and raises
    WorkerFailure.

    Args:
        program: the script it runs; the socket's descriptor and the judge's process id are its arguments.
        folder: its working folder: made here, removed at the end.
        environment: variables beside the fixed ones; nothing else is inherited.
        limits: time, memory and output.
    """

    def __init__(self, program: str, folder: Path, environment: Mapping[str, str], limits: Limits) -> None:
        self.limits = limits
        self.dead = False
        self._ending = threading.Lock()
        self.killed = False
        """Ended by SIGKILL, which was not the judge's."""
        self.shared_bytes = 0
        """Size of the shared buffers it maps, which its memory limit does not count."""
        self.elapsed = 0.0
        """Seconds from the last request to its answer, by the judge's clock."""
        self._judge = os.getpid()
        self._mark = secrets.token_hex(8)
        self._folder = folder
        self._printed = bytearray()
        self._stopped = False
        self._serial = 0
        self._expected: dict[str, Any] | None = None
        folder.mkdir(parents=True)
        self._channel, theirs = socket.socketpair()
        with HOUSEHOLD.starting:
            HOUSEHOLD.enter()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-B", program, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={**self._fixed_environment(), **environment},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                HOUSEHOLD.leave()
                raise
            finally:
                theirs.close()
            HOUSEHOLD.add(self._process.pid)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._output_ended = False
        os.set_blocking(self._output, False)
        self._channel.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    def _fixed_environment(self) -> dict[str, str]:
        return {
            **{name: os.environ[name] for name in _INHERITED if name in os.environ},
            **dict.fromkeys(_THREAD_VARIABLES, str(len(os.sched_getaffinity(0)))),
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "HOME": str(self._folder),
            "TMPDIR": str(self._folder),
            MARK: self._mark,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def printed(self) -> str:
        """What it printed so far, capped."""
        if not self.dead:
            self._drain()
        return self._printed.decode(errors="replace")

    def begin(self, message: Mapping[str, Any], *, seconds: float, descriptors: Sequence[int] = ()) -> None:
        """Send a request without waiting for its answer, and let the process run."""
        assert not self.dead and self._expected is None, "a worker answers one request at a time"
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self._channel.recv(1, socket.MSG_PEEK):
                raise self.fail(Status.TAMPERED, "the worker answered before it was asked")
        self._serial += 1
        stamp = {"id": self._serial, "nonce": secrets.token_hex(8)}
        text = json.dumps({**message, **stamp}).encode()
        self._deadline = time.monotonic() + seconds
        self._allowed = seconds
        self._expected = stamp
        self._started = time.perf_counter()
        try:
            self._send(text, descriptors)
        except TimeoutError as error:
            raise self.fail(Status.TIMED_OUT, f"the request was not taken within {seconds:g} s") from error
        except ConnectionError as error:
            raise self._ended("it ended before the request") from error

    def _send(self, text: bytes, descriptors: Sequence[int]) -> None:
        frame = struct.pack("<I", len(text)) + text
        sent = socket.send_fds(self._channel, [frame], list(descriptors)) if descriptors else 0
        self._resume()
        self._channel.settimeout(self._allowed)
        try:
            self._channel.sendall(frame[sent:])
        finally:
            self._channel.setblocking(False)

    def finish(self) -> dict[str, Any]:
        """Wait for the answer; the process stands still when this returns."""
        assert self._expected is not None, "nothing was asked"
        reply = self._received()
        expected, self._expected = self._expected, None
        alone = HOUSEHOLD.running == {self.pid}
        self._stop()
        if self._channel_has_more() or any(reply.get(key) != value for key, value in expected.items()):
            raise self.fail(Status.TAMPERED, "the worker answered out of turn")
        if self._left_behind(alone):
            raise self.fail(Status.TAMPERED, "the worker left processes behind")
        if "failed" in reply:
            raise self._reported(reply)
        return reply

    def _received(self) -> dict[str, Any]:
        text = bytearray()
        while True:
            for key, _ in self._selector.select(_POLL_SECONDS):
                if key.fileobj is not self._channel:
                    self._drain()
                    continue
                try:
                    piece = self._channel.recv(1 << 16)
                except ConnectionError:
                    piece = b""
                if not piece:
                    raise self._ended("it ended without answering")
                text += piece
                if len(text) >= 4 and len(text) >= 4 + (length := struct.unpack_from("<I", text)[0]):
                    self.elapsed = time.perf_counter() - self._started
                    return self._parsed(bytes(text[4:]), length)
                if len(text) > _REPLY_LIMIT:
                    raise self.fail(Status.TAMPERED, "the worker's answer is longer than any answer")
            self._within_limits()

    def _parsed(self, text: bytes, length: int) -> dict[str, Any]:
        try:
            reply = json.loads(text) if len(text) == length else None
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise self.fail(Status.TAMPERED, "the worker's answer is malformed")
        return reply

    def _within_limits(self) -> None:
        if time.monotonic() > self._deadline:
            raise self.fail(Status.TIMED_OUT, f"no answer within {self._allowed:g} s")
        used = resident(self.pid) - self.shared_bytes
        if used > self.limits.memory_bytes:
            sizes = f"{used >> 20} MiB of memory, {self.limits.memory_bytes >> 20} MiB are allowed"
            raise self.fail(Status.OUT_OF_MEMORY, f"it uses {sizes}")

    def _reported(self, reply: dict[str, Any]) -> WorkerFailure:
        """Turn an exception that the worker reports into a failure."""
        text, kinds, step = str(reply.get("error")), reply.get("kinds"), reply["failed"]
        names = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
        with contextlib.suppress(Exception):
            self._print((str(reply.get("trace", "")) + text + "\n").encode(errors="backslashreplace"))
        if "builtins.OSError" in names and "No space left on device" in text and self._disk_is_full():
            self.kill()
            raise RuntimeError("no space left on device for compiled code: free some disk space, then go on")
        line = text.splitlines()[-1][:400] if text.strip() else "an exception without a text"
        if any(words in text.lower() for words in _WRITING):
            return self.fail(Status.TAMPERED, f"it writes to its inputs: {line}")
        if not _NO_MEMORY.isdisjoint(names):
            return self.fail(Status.OUT_OF_MEMORY, line)
        if step not in ("run", "load") or any(name.startswith(_COMPILERS) for name in names):
            first = next((part for part in text.splitlines() if part.strip()), line)[:400]
            return self.fail(Status.BUILD_FAILED, f"{step}: {first}" + f" ... {line}" * (first != line))
        return self.fail(Status.CRASHED, line)

    def _ended(self, how: str) -> WorkerFailure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        self.killed = code == -signal.SIGKILL
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"it was ended by {signal.Signals(-code).name}"
        elif code is not None:
            how = f"it exited with code {code} instead of answering"
        return self.fail(Status.CRASHED, how)

    def fail(self, status: Status, reason: str) -> WorkerFailure:
        """End the process and everything below it; returns what to raise."""
        self.kill()
        return WorkerFailure(status, reason, self._printed.decode(errors="replace"))

    def _disk_is_full(self) -> bool:
        """Whether compiled code finds no room; that a candidate says so is no proof."""
        return shutil.disk_usage(self._folder).free < ROOM_BYTES

    # ---- signals

    def _stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self._stopped = True
        HOUSEHOLD.running.discard(self.pid)

    def _resume(self) -> None:
        HOUSEHOLD.running.add(self.pid)
        if self._stopped:
            os.kill(self.pid, signal.SIGCONT)
            self._stopped = False

    def _left_behind(self, alone: bool) -> bool:
        return bool(children(self.pid)) or any(self._to_blame(pid, alone) for pid in HOUSEHOLD.strays())

    def _to_blame(self, pid: int, alone: bool) -> bool:
        """Whether an orphan is this worker's; one that hides whose it is, if nobody else was running."""
        known = self._carries_mark(pid)
        return alone if known is None else known

    def _ours(self, pid: int) -> bool:
        """Whether an orphan is to be ended with this worker: it may be this worker's."""
        return self._carries_mark(pid) is not False

    def _carries_mark(self, pid: int) -> bool | None:
        """Whether an orphan shows that it comes from this worker; None if it shows nothing."""
        try:
            if os.getsid(pid) == self.pid:
                return True
        except ProcessLookupError:
            return False  # gone by now
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except FileNotFoundError:
            return False
        except OSError:
            return None  # it has ended and waits to be reaped, or it is closed to us
        mark = environment.partition(f"{MARK}=".encode())[2][: len(self._mark)]
        return mark == self._mark.encode() if mark else None

    def _channel_has_more(self) -> bool:
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, ConnectionError):
            return False

    # ---- output and the end

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError, ValueError, OSError):
            while piece := os.read(self._output, 1 << 16):
                self._print(piece)
            if not self._output_ended:
                self._output_ended = True
                self._selector.unregister(self._output)

    def _print(self, piece: bytes) -> None:
        room = self.limits.output_bytes - len(self._printed)
        self._printed += piece[: max(room, 0)]

    def kill(self) -> None:
        """End the process and everything below it. Harmless when it is dead."""
        with self._ending:
            if self.dead or os.getpid() != self._judge:
                return
            self.dead = True
        self._expected = None
        if self._process.returncode is None:
            end_tree(self.pid)
        self._drain()
        self._process.wait()
        HOUSEHOLD.sweep(self._ours)
        HOUSEHOLD.leave(self.pid)
        self._selector.close()
        self._channel.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):
            self.kill()
