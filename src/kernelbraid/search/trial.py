"""Whether a source builds, tried in a process of its own before it is submitted: it counts as no evidence."""

import tempfile
from pathlib import Path
from typing import Any

from kernelbraid.audit.environment import fingerprint, require_device
from kernelbraid.audit.process import Worker, WorkerFailure
from kernelbraid.audit.stages import build, tripped
from kernelbraid.contract import Source, left_to_full
from kernelbraid.ops.installed import home
from kernelbraid.search.study import Study, check_source

MOST_OUTPUT = 6000
"""Characters kept of what compilers print, from the end."""


def try_build(study: Study, source: Source) -> dict[str, Any]:
    """Look at a source as an audit does first: what it imports and exports, then compile it by small calls.

    Args:
        study: for which; its device may be elsewhere, and then the source is only read.
        source: the whole text.

    Returns:
        JSON-able: `built` (None where the device is not here), `reason`, and `output` of the process.
    """
    try:
        check_source(source, study.operator)
    except ValueError as error:
        return _said(False, str(error))
    ended = tripped(source, study.operator.backend)
    if ended is not None:
        return _said(False, f"{ended.status}: {ended.reason}")
    record = study.store.study
    try:
        require_device(record.device)
    except ValueError as error:
        return _said(None, f"read, not compiled: {error}")
    with tempfile.TemporaryDirectory(prefix="kernelbraid-try-") as scratch:
        worker = Worker(
            source,
            study.operator.entry_points,
            scratch=Path(scratch),
            cache=home() / "compiled",
            device=record.device,
            kin=study.store.source(record.root),
        )
        architecture = fingerprint(record.device).architecture
        later = left_to_full(record.workloads)
        try:
            built = build(worker, study.operator, record.constant_axes, record.dtype, architecture, later)
        except WorkerFailure as failure:
            return _said(False, f"{failure.status}: {failure.reason}", failure.output)
        else:
            numerics = ", ".join(f"{name}={value}" for name, value in sorted(built.numerics.items()))
            return _said(True, f"it builds, with numerics {numerics}", worker.printed)
        finally:
            worker.kill()


def _said(built: bool | None, reason: str, output: str = "") -> dict[str, Any]:
    return {"built": built, "reason": reason, "output": output[-MOST_OUTPUT:]}
