"""Checkpoints: whole or not there at all, and read only if every byte is as it was written."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

PREFIX = "rollout-"
STATE, MANIFEST = "state.pt", "manifest.json"
FORMAT = 1


class Checkpoints:
    """The checkpoints of one run, newest last.

    Each is a folder `rollout-N` with the state after N rollouts. It is written beside, synced, and renamed
    into place: a process that is killed at any moment leaves the one before as it was.

    Args:
        folder: where they are; made where needed.
        keep: how many are kept.

    Raises:
        RuntimeError: the folder cannot be written, or another process trains in it.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        from filelock import FileLock, Timeout

        self.folder, self.keep = folder, keep
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / ".lock")
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RuntimeError(f"another process trains in {folder}") from None
        except OSError as error:
            raise RuntimeError(f"{folder} cannot be written: {error}") from None
        for left in (*folder.glob(".new-*"), *folder.glob(".old-*")):
            shutil.rmtree(left, ignore_errors=True)

    def close(self) -> None:
        self._lock.release()

    def numbers(self) -> list[int]:
        """Rollouts after which there is a checkpoint, ascending."""
        names = [each.name.removeprefix(PREFIX) for each in self.folder.glob(f"{PREFIX}*")]
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, number: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint and remove the oldest ones.

        Args:
            number: rollouts done.
            state: tensors, numbers, texts, and lists and dictionaries of them.

        Raises:
            OSError: no room, for instance; those before are as they were.
        """
        new = self.folder / f".new-{number}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            with (new / STATE).open("wb") as file:
                torch.save(dict(state), file)
                _synced(file)
            manifest = {"format": FORMAT, "rollouts": number, "sha256": _digest(new / STATE)}
            with (new / MANIFEST).open("w", encoding="utf-8") as text:
                json.dump(manifest, text)
                _synced(text)
            _sync_folder(new)
            place = self.folder / f"{PREFIX}{number:06d}"
            self._remove(place)
            new.rename(place)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        _sync_folder(self.folder)
        for each in self.numbers()[: -self.keep]:
            self._remove(self.folder / f"{PREFIX}{each:06d}")
        return place

    def load(self, number: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Read the newest checkpoint, or that of a number; None where there is none.

        Raises:
            ValueError: it is damaged, or of another format; the message names it.
        """
        numbers = self.numbers()
        if number is None and not numbers:
            return None
        number = numbers[-1] if number is None else number
        place = self.folder / f"{PREFIX}{number:06d}"
        try:
            manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
            found = _digest(place / STATE)
        except (OSError, ValueError) as error:
            raise ValueError(f"checkpoint {place} cannot be read: {error}") from None
        if manifest.get("format") != FORMAT:
            raise ValueError(f"checkpoint {place} has format {manifest.get('format')}, not {FORMAT}")
        if manifest.get("sha256") != found:
            raise ValueError(
                f"checkpoint {place} is damaged: its bytes are not those that were written. Remove it to go "
                "on from the one before"
            )
        state: dict[str, Any] = torch.load(place / STATE, map_location="cpu", weights_only=True)
        return number, state

    def _remove(self, place: Path) -> None:
        """Take a checkpoint away by one rename, then its files."""
        if place.exists():
            old = self.folder / f".old-{place.name}"
            shutil.rmtree(old, ignore_errors=True)
            place.rename(old)
            shutil.rmtree(old, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _synced(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
