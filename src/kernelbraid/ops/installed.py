"""Winners of studies on this machine: a source an operator, architecture and device, hash-checked at load.

They live in the user's data folder; environment variable KERNELBRAID_HOME names another place, nothing else.

    <home>/installed/<operator>/<architecture>/<device>/record.json     which source, promoted on what
    <home>/installed/<operator>/<architecture>/<device>/<sha256>.py

The source is written first, then the record replaces the old one in one step; no record, nothing installed.
"""

import hashlib
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from platformdirs import user_data_path

from kernelbraid.contract import Source

RECORD = "record.json"


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed winner and what it was promoted on."""

    source: Source
    path: Path
    contract: str
    """Hash of the contract whose requirements it holds."""
    record: Mapping[str, object]
    """What `install` was given, such as its certificate."""


def home() -> Path:
    """Return the folder for this user's certificates and winners; it may not exist yet."""
    named = os.environ.get("KERNELBRAID_HOME")
    return Path(named) if named else user_data_path("kernelbraid", appauthor=False)


@cache
def cpu_model() -> str:
    """Return the name of this machine's CPU model, as the operating system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name[^:]*:(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def folder(operator: str, architecture: str, device: str) -> Path:
    """Return where the winner for one device lives; different devices never share a folder."""
    digest = hashlib.sha256(device.encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-")[:60]
    return home() / "installed" / operator / architecture / f"{name}-{digest}"


def install(
    operator: str,
    source: Source,
    *,
    architecture: str,
    device: str,
    contract: str,
    record: Mapping[str, object],
) -> Path:
    """Make `source` the implementation that the public operator finds on this device, at once or not at all.

    Args:
        operator: name of the operator.
        source: an implementation that held every requirement.
        architecture: `cpu`, or a CUDA architecture.
        device: CPU or GPU model.
        contract: hash of the contract that it holds.
        record: JSON-able facts to keep beside it, such as its certificate.

    Returns:
        The path of the installed source.

    Raises:
        RuntimeError: the folder cannot be written; what was installed before stays.
    """
    place = folder(operator, architecture, device)
    path = place / f"{source.sha256}.py"
    facts = {"sha256": source.sha256, "label": source.label, "contract": contract, "record": dict(record)}
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    try:
        place.mkdir(parents=True, exist_ok=True)
        _write(path, source.text.encode())
        _write(place / RECORD, text.encode())
    except OSError as error:
        raise RuntimeError(f"cannot install {operator} into {place}: {error.strerror}") from error
    for other in place.glob("*.py"):
        if other != path:
            other.unlink(missing_ok=True)
    return path


def read(operator: str, architecture: str, device: str) -> Installed | None:
    """Return what is installed for a device, None if nothing is.

    Raises:
        RuntimeError: the record or the source was changed or lost since it was promoted.
    """
    place = folder(operator, architecture, device)
    advice = f"run `kernelbraid demote {operator}` to go back to the shipped implementation"
    try:
        facts = json.loads((place / RECORD).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"the record of the installed {operator} in {place} is unreadable; {advice}"
        ) from error
    try:
        sha256, label, contract, record = (facts[key] for key in ("sha256", "label", "contract", "record"))
        path = place / f"{sha256}.py"
        text = path.read_bytes().decode()
    except (KeyError, TypeError, OSError, UnicodeDecodeError) as error:
        raise RuntimeError(f"the installed {operator} in {place} is incomplete; {advice}") from error
    source = Source(text, label=str(label))
    if source.sha256 != sha256:
        raise RuntimeError(f"the installed {operator} {path} changed since it was promoted; {advice}")
    return Installed(source, path, str(contract), record)


def active(operator: str, architecture: str, device: str) -> Source | None:
    """Return the source installed for a device, None if nothing is; raises as `read` does."""
    found = read(operator, architecture, device)
    return None if found is None else found.source


def remove(operator: str, architecture: str, device: str) -> bool:
    """Uninstall, whatever state the files are in; return whether something was installed.

    Raises:
        RuntimeError: the folder cannot be written.
    """
    place = folder(operator, architecture, device)
    try:
        present = (place / RECORD).exists()
        (place / RECORD).unlink(missing_ok=True)
        for source in place.glob("*.py"):
            source.unlink(missing_ok=True)
    except OSError as error:
        raise RuntimeError(f"cannot remove {operator} from {place}: {error.strerror}") from error
    return present


def load(installed: Installed, operator: str) -> ModuleType:
    """Import an installed implementation from the text whose hash was checked."""
    name = f"_kernelbraid_{operator}_{installed.source.sha256}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(installed.path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(installed.path)
    # Numba's disk cache finds a module again by its name.
    sys.modules[name] = module
    try:
        exec(compile(installed.source.text, installed.path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _write(path: Path, data: bytes) -> None:
    """Replace a file in one step, after its contents have reached the disk."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
