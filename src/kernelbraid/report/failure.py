"""Exit codes, and how an error becomes one sentence for a person."""

import errno
import os
from enum import IntEnum


class ExitCode(IntEnum):
    """What the command line answers with. Stable: scripts may rely on it."""

    OK = 0
    CHECK_FAILED = 1
    """A check failed: unequal bits, a mismatched certificate, a refused promotion, a promoted exploit."""
    BAD_INPUT = 2
    """The command or a file it was given is wrong; nothing was changed."""
    STOPPED = 3
    """The machine stood in the way: full disk, read-only folder, no memory. Run it again once fixed."""
    DEFECT = 70
    """KernelBraid itself is wrong; a traceback follows, please report it."""
    INTERRUPTED = 130
    """Ctrl-C; what was recorded stays, and `resume` continues."""


def classify(error: BaseException) -> ExitCode:
    """The exit code for an error that reached the command line."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | FileExistsError):
        return ExitCode.BAD_INPUT
    if isinstance(error, ValueError):
        return ExitCode.BAD_INPUT
    if isinstance(error, NotImplementedError | RecursionError):
        return ExitCode.DEFECT
    from_database = type(error).__module__.startswith("sqlalchemy")
    if from_database or isinstance(error, RuntimeError | OSError | MemoryError):
        return ExitCode.STOPPED
    return ExitCode.DEFECT


def sentence(error: BaseException) -> str:
    """One line that says what is wrong and, where the system's own words do not, what to do."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "out of memory: close other programs or use a machine with more"
    if isinstance(error, OSError) and error.errno is not None:
        where = f" ({os.fspath(error.filename)})" if isinstance(error.filename, str | os.PathLike) else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the device{where}: free some and run the same command again"
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return f"{_lower(error)}{where}: choose a folder you may write to"
        return f"{_lower(error)}{where}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _lower(error: OSError) -> str:
    words = error.strerror or os.strerror(error.errno or 0)
    return words[:1].lower() + words[1:]
