"""Files beside the database: written whole and synced before a row names them, checked when they are read."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial-"


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `path`, synced, if the block succeeds, and vanishes if it does not.

    Raises:
        RuntimeError: the folder cannot be written, or the disk is full.
    """
    temporary = path.with_name(f"{PARTIAL}{secrets.token_hex(6)}-{path.name}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there either whole or not at all, whatever dies meanwhile."""
    with whole_file(path) as temporary:
        temporary.write_bytes(data)


def read_checked(path: Path, sha256: str) -> bytes:
    """Return the bytes of a file.

    Raises:
        RuntimeError: the file is gone, or its bytes no longer match `sha256`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"cannot read {path}: {error.strerror or error}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise RuntimeError(f"{path} was changed: its bytes no longer match the recorded hash {sha256[:12]}")
    return data


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` if the block succeeds, and vanishes if it does not.

    Raises:
        ValueError: `folder` exists and is not an empty folder.
        RuntimeError: it cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    temporary = folder.with_name(f"{PARTIAL}{secrets.token_hex(6)}-{folder.name}")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} exists already: name a new folder, or open the study that is there")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise RuntimeError(f"cannot write the study folder {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
