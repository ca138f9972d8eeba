"""Scopes of a verification that are done, kept on disk until all are, so that an interrupted one goes on."""

import contextlib
import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kernelbraid.contract import content_hash
from kernelbraid.ir.evidence import Verdict, verdict_from_json
from kernelbraid.ops import installed


@dataclass(frozen=True, slots=True)
class Part:
    """What was found in one scope."""

    scope: str
    """Constant axes and dtype."""
    bits_id: str
    verdicts: tuple[Verdict, ...]
    untested: Mapping[str, str]
    specialisations: tuple[str, ...]


class Finished:
    """The finished scopes of one subject: an implementation, its contract, the judge and the machine.

    Args:
        subject: all that the findings depend on, but the seed.
        folder: where such folders live; by default in the user's data folder.
    """

    def __init__(self, subject: object, folder: Path | None = None) -> None:
        self.folder = (folder or installed.home() / "verifying") / content_hash(subject)[:32]

    def seed(self, otherwise: int) -> int:
        """The seed of the verification that was interrupted, or this one, which is kept."""
        path = self.folder / "seed"
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text())
        self._write(path, str(otherwise))
        return otherwise

    def keep(self, part: Part) -> None:
        """Write one scope's findings, whole or not at all."""
        self._write(self._path(part.scope), json.dumps(asdict(part)))

    def find(self, scope: str) -> Part | None:
        """What was found in a scope, None if it is not done or cannot be read."""
        try:
            data = json.loads(self._path(scope).read_text())
            verdicts = tuple(verdict_from_json(item) for item in data["verdicts"])
            specialisations = tuple(map(str, data["specialisations"]))
            found = Part(data["scope"], data["bits_id"], verdicts, dict(data["untested"]), specialisations)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if found.scope == scope else None

    def clear(self) -> None:
        """Forget all of it: the verification is done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, scope: str) -> Path:
        return self.folder / f"{content_hash(scope)[:32]}.json"

    def _write(self, path: Path, text: str) -> None:
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
            temporary.replace(path)
        except OSError as error:
            raise RuntimeError(f"cannot write {path}: {error.strerror or error}") from error
