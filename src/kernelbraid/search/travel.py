"""A study whose audits travel: what a search would audit next leaves as a job file, and evidence comes back.

The machine that searches needs no device: export, run the job elsewhere, import its results, export again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelbraid.ir import proposing
from kernelbraid.search import audits, loop
from kernelbraid.search.proposers import Proposer
from kernelbraid.search.proposers.external import External
from kernelbraid.search.proposers.knobs import KnobProposer
from kernelbraid.search.proposers.llm_settings import LlmSettings
from kernelbraid.search.proposers.replay import Replay
from kernelbraid.search.study import Study


def proposer_of(study: Study) -> Proposer:
    """Return the proposer that a study was made with."""
    record = study.store.study
    if record.proposer == "llm":
        from kernelbraid.search.proposers.llm import LlmProposer

        return LlmProposer.of(study)
    if record.proposer == "replay":
        return Replay()
    return External() if record.proposer == "external" else KnobProposer(record.seed)


def change_model(study: Study, model: str | None, base_url: str | None) -> None:
    """Go on with another model or at another address; limits, prompts and what was spent stay.

    Raises:
        ValueError: the model or the address is out of its range, or there is no key.
    """
    found = proposing.settings(study.store)
    if found is None or (model is None and base_url is None):
        return
    before = LlmSettings.from_json(found.values)
    after = before.moved(model, base_url)
    after.require()
    if after != before:
        proposing.record_settings(study.store, after.to_json(), found.prompts)


def export(
    study: Study,
    path: Path,
    most: int | None = None,
    *,
    propose: bool = False,
    progress: Callable[[loop.Progress], None] = lambda _: None,
) -> dict[str, Any]:
    """Write pending audits into a job file, and return what was written, JSON-able.

    Args:
        study: an open study.
        path: file to write.
        most: audits at most; by default all that are pending, or a usual job's number where candidates are
            proposed.
        propose: go on as a search would: promote, confirm, propose candidates.
        progress: told of decisions and proposals.

    Raises:
        ValueError: nothing is pending, or the search is at its end.
        RuntimeError: the file cannot be written, or another process searches the study.
    """
    requests = None
    if propose:
        requests = loop.upcoming(study, proposer_of(study), most or loop.BATCH, progress)
        if not requests:
            raise ValueError(f"{study.folder} has nothing left to audit: its search is at its end")
    written = audits.export(study, path, most, requests)
    return {"study": str(study.folder), "job": str(path), "audits": written}
