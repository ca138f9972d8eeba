"""What a language model can do while it writes one candidate: read, try a build, submit or decline."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_ai import ModelRetry

from kernelbraid.contract import Source
from kernelbraid.ir import query
from kernelbraid.ir.held_out import shown
from kernelbraid.ir.store import DuplicateSourceError
from kernelbraid.search.proposers import Proposal, external
from kernelbraid.search.study import Study, check_source
from kernelbraid.search.trial import try_build

MOST_TEXT = 24_000
"""Characters of one tool's answer; a source is read in pieces of lines."""


class Replacement(BaseModel):
    """A piece of a source and what stands there instead."""

    model_config = ConfigDict(extra="forbid")
    old: str
    """Text that occurs exactly once."""
    new: str


class Declined(BaseModel):
    """The model does not want to submit a candidate."""

    reason: str


class Tools:
    """The tools of one attempt, as methods; their docstrings are what the model reads.

    Args:
        study: what they read.
        parent: hash of the implementation that is offered.
        evidence: whether the model may see what the study found out.
        by: who proposes.
    """

    def __init__(self, study: Study, parent: str, *, evidence: bool, by: str) -> None:
        self._study = study
        self._parent = parent
        self._evidence = evidence
        self._by = by
        self._drafts: dict[str, Source] = {}

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """The tools that answer and let the model go on."""
        always = (self.read_contract, self.read_requirements, self.read_source, self.try_build)
        if not self._evidence:
            return always
        reading = (self.read_outlook, self.read_evidence, self.read_lineage, self.read_output)
        return (*always, *reading, self.merge)

    @property
    def outputs(self) -> Sequence[Callable[..., Any]]:
        """The tools that end the attempt."""
        return (self.submit, self.decline)

    # Reading

    async def read_contract(self) -> str:
        """The numerical contract: domain, rounding points, operations, the order of every sum, relations."""
        page = files("kernelbraid.ops") / self._study.operator.name / "README.md"
        derived = page.read_text(encoding="utf-8") if page.is_file() else ""
        return _cut(f"{derived}\n{_text(asdict(self._study.contract))}", "the rest is not needed")

    async def read_requirements(self) -> str:
        """The ids of all requirements that the audit checks, each with its regime."""
        return _text([asdict(each) for each in self._study.contract.requirements])

    async def read_source(self, implementation: str, first_line: int = 1, last_line: int = 100_000) -> str:
        """The text of an implementation or of a draft, with line numbers left out.

        Args:
            implementation: its hash or the first digits; a draft's id.
            first_line: first line to read, from 1.
            last_line: last line to read.
        """
        lines = self._source(implementation).text.splitlines(keepends=True)
        return _cut("".join(lines[max(0, first_line - 1) : last_line]), "read fewer lines at a time")

    async def read_outlook(self, most: int = 10) -> str:
        """Verified parents with their ratios, open opportunities, failures, pending audits, the budget.

        Args:
            most: entries of each list, the most promising or latest first.
        """
        return _text(external.outlook(self._study, max(1, most)))

    async def read_evidence(self, implementation: str) -> str:
        """What audits found about an implementation: verdicts, first differences, latencies, decisions.

        Args:
            implementation: its hash or the first digits.
        """
        found = external.evidence_of(self._study, _known(self._study, implementation))
        for audit in found["audits"]:
            audit.pop("output", None)
        return _text(found)

    async def read_lineage(self, implementation: str) -> str:
        """Where an implementation comes from, step by step, each with its hypothesis.

        Args:
            implementation: its hash or the first digits.
        """
        sha256 = _known(self._study, implementation)
        return _text(external.source_of(self._study, sha256)["lineage"])

    async def read_output(self, implementation: str) -> str:
        """What compilers and the implementation printed in its audits.

        Args:
            implementation: its hash or the first digits.
        """
        sha256 = _known(self._study, implementation)
        kept = self._study.held_out
        found = query.audits(self._study.store, sha256)
        logs = (shown(each.evidence(self._study.store.log(each.request)), kept).output for each in found)
        return "\n".join(logs)[-MOST_TEXT:] or "nothing was printed"

    # Writing

    async def try_build(
        self, source: str = "", base: str = "", replacements: list[Replacement] | None = None
    ) -> str:
        """Compile a draft by small calls, without checking its bits or its speed. Free of charge.

        Args:
            source: the complete text of the draft; or leave it empty and give `base` and `replacements`.
            base: an implementation or an earlier draft to edit.
            replacements: pieces of it to replace, in order.
        """
        draft = self._draft(source, base, replacements)
        self._drafts[draft.short] = draft
        return _text({"draft": draft.short, **try_build(self._study, draft)})

    async def merge(self, ours: str, theirs: str) -> str:
        """Compose two verified implementations over their common ancestor; a draft, or what conflicts.

        Args:
            ours: an implementation's hash or the first digits.
            theirs: another one's.
        """
        try:
            found = external.merge_of(self._study, _known(self._study, ours), _known(self._study, theirs))
        except ValueError as error:
            raise ModelRetry(str(error)) from error
        if found["text"] is not None:
            draft = Source(found.pop("text"))
            self._drafts[draft.short] = draft
            found["draft"] = draft.short
        return _text(found)

    async def submit(
        self,
        hypothesis: str,
        expected_effect: str,
        falsified_by: str,
        functions: list[str],
        regimes: list[str],
        requirements_at_risk: list[str],
        parents: list[str] | None = None,
        source: str = "",
        base: str = "",
        replacements: list[Replacement] | None = None,
        opportunity: int | None = None,
    ) -> Proposal:
        """Submit a candidate for its audit, and end.

        Args:
            hypothesis: why it should be faster, in one or two sentences.
            expected_effect: what the audit should show.
            falsified_by: what would show the hypothesis wrong.
            functions: names of the functions that change together.
            regimes: regimes whose calls they serve.
            requirements_at_risk: ids of requirements that the change could break.
            parents: verified implementations that it was made from; by default the one you were given.
            source: the complete text; or leave it empty and give `base`.
            base: an implementation or a draft that is submitted, after `replacements` if there are any.
            replacements: pieces of it to replace, in order.
            opportunity: id of the listed opportunity that it carries out.
        """
        made = self._draft(source, base, replacements)
        named = [_known(self._study, each) for each in parents or [self._parent]]
        if not self._evidence and (named != [self._parent] or opportunity is not None):
            raise ModelRetry(f"the parent must be {self._parent}, and no opportunity can be named")
        proposal = Proposal(
            source=Source(
                made.text, label=hypothesis.strip().splitlines()[0][:60] if hypothesis.strip() else ""
            ),
            parents=tuple(named),
            hypothesis=hypothesis,
            functions=tuple(functions),
            regimes=tuple(regimes),
            expected_effect=expected_effect,
            requirements_at_risk=tuple(requirements_at_risk),
            falsified_by=falsified_by,
            proposer=self._by,
            opportunity=opportunity,
        )
        self._check(proposal)
        return proposal

    async def decline(self, reason: str) -> Declined:
        """Submit nothing, and end.

        Args:
            reason: why nothing is worth an audit.
        """
        return Declined(reason=reason)

    def _check(self, proposal: Proposal) -> None:
        """Let the model mend what the study would refuse."""
        try:
            check_source(proposal.source, self._study.operator)
            self._study.rehearse(proposal)
        except (DuplicateSourceError, ValueError) as error:
            raise ModelRetry(str(error)) from error

    def _draft(self, source: str, base: str, replacements: Sequence[Replacement] | None) -> Source:
        if bool(source.strip()) == bool(base.strip()):
            raise ModelRetry("give either the complete source, or base and replacements")
        if source.strip():
            if replacements:
                raise ModelRetry("replacements are made in base, not in source")
            return Source(source if source.endswith("\n") else source + "\n")
        text = self._source(base).text
        for each in replacements or ():
            count = text.count(each.old) if each.old else 0
            if count != 1:
                raise ModelRetry(
                    f"each `old` must occur exactly once; this one occurs {count} times: {each.old!r}"
                )
            text = text.replace(each.old, each.new)
        return Source(text)

    def _source(self, name: str) -> Source:
        for draft in self._drafts.values():
            if len(name) >= 4 and draft.sha256.startswith(name):
                return draft
        sha256 = _known(self._study, name)
        if not self._evidence and sha256 != self._parent:
            raise ModelRetry(f"only the parent {self._parent} can be read")
        return self._study.store.source(sha256)


def _known(study: Study, name: str) -> str:
    try:
        return study.store.implementation(name.strip().lower()).sha256
    except ValueError as error:
        raise ModelRetry(str(error)) from error


def _text(document: Any) -> str:
    return _cut(json.dumps(document, separators=(",", ":"), default=str), "ask for less")


def _cut(text: str, advice: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]}\n[{len(text) - MOST_TEXT} characters more: {advice}]"
