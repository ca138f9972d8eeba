"""The built-in proposer: edits of the knobs that a source declares, in the order that evidence supports.

It walks from branch point to branch point. At each it tries the single edits that promise most, by
measurement where there is one and written-out variants first where there is none, and joins the edits that
were each seen to gain into one candidate as soon as there are two. All it does follows from the recorded
evidence and the seed.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kernelbraid.contract import BitPolicy, Contract, KnobKind, KnobValue, Source
from kernelbraid.ir import query
from kernelbraid.ir.bulk import kept_objects
from kernelbraid.ir.evidence import Status
from kernelbraid.ir.files import read_checked
from kernelbraid.ir.schema import Opportunity, Outcome
from kernelbraid.ir.store import source_path
from kernelbraid.search.proposers import Proposal, edits
from kernelbraid.search.proposers.edits import DeclaredKnob, Edits
from kernelbraid.search.proposers.effects import Effects, Estimate, Point
from kernelbraid.search.proposers.templates import Templates
from kernelbraid.search.study import Study

STEP = 0.003
"""A branch point takes over when its aggregate is lower by this much (natural log) and by its error."""
WORTH_JOINING = 0.003
"""An edit seen to gain this much (natural log) and its error is joined with others, proven alone or not."""
WORTH_NEW_BITS = 0.01
"""So much for an edit that changes bits."""
SUSPICION = 0.1
"""An edit that was rejected among other functions is expected to gain this much less (natural log)."""

CIRCUMSTANCES = (Status.TIMED_OUT, Status.OUT_OF_MEMORY, Status.IMPLAUSIBLE)
"""A rejection that may be the machine's doing: the edit is suspect elsewhere, not ruled out."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A source's knobs."""

    knobs: tuple[DeclaredKnob, ...]
    settings: Edits
    skeleton: str

    @classmethod
    def of(cls, source: Source, contract: Contract, templates: Templates) -> "Declared":
        knobs, skeleton = templates.read(source, contract)
        return cls(knobs, edits.values(knobs), skeleton)

    @property
    def key(self) -> tuple[str, frozenset[tuple[str, KnobValue]]]:
        """Equal for sources that this proposer cannot tell apart."""
        return self.skeleton, frozenset(self.settings.items())

    def numerics(self, edit: Edits) -> frozenset[tuple[str, KnobValue]]:
        """The numeric knobs after an edit: what accuracy depends on."""
        numeric = [knob.name for knob in self.knobs if knob.kind is KnobKind.NUMERIC]
        return frozenset((name, edit.get(name, self.settings[name])) for name in numeric)

    def functions(self, name: str) -> tuple[object, ...]:
        """What code runs whatever the value of `name`: numeric edits act alike in every variant."""
        knob = next(each for each in self.knobs if each.name == name)
        if knob.kind is KnobKind.NUMERIC:
            return (self.skeleton,)
        variants = [each for each in self.knobs if each.selects_variant and each.name != name]
        return (self.skeleton, *((each.name, each.value) for each in variants))


class _Evidence:
    """A study's evidence at one moment, as knobs see it."""

    def __init__(self, study: Study, read: Callable[[str], Declared]) -> None:
        self._study = study
        self._read = read
        self._standings = study.standings()
        self.points = {each.sha256: each for each in self._accepted()}
        self.effects = Effects(self.points.values())
        self._tried = {read(sha).key for sha in query.hashes(study.store)}
        self._inaccurate: set[frozenset[tuple[str, KnobValue]]] = set()
        self._broken: dict[tuple[object, ...], str] = {}
        self._suspect: set[tuple[str, KnobValue]] = set()
        for sha, standing in self._standings.items():
            if not standing.accepted:
                self._learn(sha, standing.status)

    def _accepted(self) -> Iterator[Point]:
        for sha, standing in self._standings.items():
            if standing.log_objective is not None:
                read = self._read(sha)
                yield Point(
                    sha256=sha,
                    skeleton=read.skeleton,
                    knobs=read.knobs,
                    settings=read.settings,
                    log_ratios=standing.log_ratios,
                    shares=standing.shares,
                    log_objective=standing.log_objective,
                    error=standing.error,
                )

    def _learn(self, sha: str, status: Status) -> None:
        """Keep what a rejected edit says about the same edit elsewhere."""
        child = self._read(sha)
        if status is Status.INACCURATE:
            self._inaccurate.add(child.numerics({}))
        for parent in map(self._read, self._study.parents(sha)):
            edit = edits.differences(parent.settings, child.settings)
            if parent.skeleton == child.skeleton and len(edit) == 1:
                ((name, value),) = edit.items()
                self._suspect.add((name, value))
                if status not in CIRCUMSTANCES:
                    self._broken[(*child.functions(name), name, value)] = f"{status} at {sha[:12]}"

    def rejected(self, sha: str) -> bool:
        return sha in self._standings and not self._standings[sha].accepted

    def branch_point(self) -> Point | None:
        """The fastest implementation within its limits; a later one takes over if it is faster by STEP."""
        best: Point | None = None
        for sha, point in self.points.items():
            if self._standings[sha].within_limits and (best is None or _ahead(point, best)):
                best = point
        return best

    def obstacle(self, parent: Point, edit: Edits) -> str | None:
        """Why an edit is not worth an audit: the bits are pinned, or evidence speaks against it."""
        read = self._read(parent.sha256)
        kinds = {knob.name: knob.kind for knob in parent.knobs}
        if self._study.policy is BitPolicy.PINNED and any(kinds[name] is KnobKind.NUMERIC for name in edit):
            return "the study pins the root's bits"
        if read.numerics(edit) in self._inaccurate:
            return "these numeric knobs were found inaccurate"
        for name, value in edit.items():
            if (*read.functions(name), name, value) in self._broken:
                return f"the same edit ended {self._broken[(*read.functions(name), name, value)]}"
        return None

    def tried(self, parent: Point, edit: Edits) -> bool:
        return (parent.skeleton, frozenset({**parent.settings, **edit}.items())) in self._tried

    def single_edits(self, point: Point) -> Iterator[tuple[Edits, Estimate]]:
        for knob in point.knobs:
            for value in knob.alternatives:
                yield {knob.name: value}, self.effects.estimate(point, knob, value)

    def joint_edit(self, point: Point) -> tuple[Edits, Estimate] | None:
        """The edits of a point that were each seen to gain, one a knob; None unless two or more."""
        best: dict[str, tuple[KnobValue, Estimate]] = {}
        for knob in point.knobs:
            worth = WORTH_NEW_BITS if knob.kind is KnobKind.NUMERIC else WORTH_JOINING
            for value in knob.alternatives:
                each = self.effects.estimate(point, knob, value)
                seen = each.error is not None and each.gain >= max(worth, each.error)
                lawful = seen and not self.obstacle(point, {knob.name: value})
                if lawful and (knob.name not in best or each.gain > best[knob.name][1].gain):
                    best[knob.name] = value, each
        if len(best) < 2:
            return None
        estimates = [each for _, each in best.values()]
        joint = Estimate(
            gain=math.fsum(each.gain for each in estimates),
            grounds=f"{len(best)} edits were each seen to gain",
            evidence=tuple(dict.fromkeys(sha for each in estimates for sha in each.evidence)),
            workloads=tuple(dict.fromkeys(name for each in estimates for name in each.workloads)),
        )
        return {name: value for name, (value, _) in best.items()}, joint

    def expected_gain(self, parent: Point, edit: Edits) -> float:
        knobs = {knob.name: knob for knob in parent.knobs}
        each = [self.effects.estimate(parent, knobs[name], value) for name, value in edit.items()]
        suspicion = SUSPICION * sum(item in self._suspect for item in edit.items())
        return math.fsum(one.gain for one in each) - suspicion


@dataclass(frozen=True, slots=True)
class _Ranked:
    """An open opportunity with its expected result."""

    opportunity: Opportunity
    parent: Point
    edit: Edits
    gain: float

    @property
    def expected(self) -> float:
        """Log of the expected aggregate latency over the root's."""
        return round(self.parent.log_objective - self.gain, 6)


class KnobProposer:
    """Proposes knob edits of verified implementations.

    Args:
        seed: decides among edits that evidence does not tell apart.
    """

    name = "knobs"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._declared: dict[str, Declared] = {}
        self._templates = Templates()
        self._latest: tuple[Study, tuple[int, int], _Evidence] | None = None

    def observe(self, study: Study) -> None:
        """Write the branch point's untried edits as opportunities; close those that evidence took away."""
        evidence = self._evidence(study)
        self._retire(study, evidence)
        point = self._point(study, evidence)
        if point is None:
            return
        candidates = list(evidence.single_edits(point))
        joint = evidence.joint_edit(point)
        if joint is not None:
            candidates.append(joint)
        with study.store.transaction():
            for edit, estimate in candidates:
                if not evidence.tried(point, edit) and evidence.obstacle(point, edit) is None:
                    _write(study, point, edit, estimate)

    def propose(self, study: Study, wanted: int) -> tuple[Proposal, ...]:
        """Return up to `wanted` candidates from the study's open opportunities, the best expected first."""
        evidence = self._evidence(study)
        ranked = sorted(self._ranked(study, evidence), key=lambda each: (each.expected, self._tie(each)))
        chosen: list[_Ranked] = []
        for distinct in (True, False):
            for each in ranked:
                if len(chosen) < wanted and each not in chosen and not (distinct and _overlaps(each, chosen)):
                    chosen.append(each)
        return tuple(self._proposal(study, each) for each in chosen)

    def expectations(self, study: Study) -> dict[int, float]:
        """Return what each open knob edit promises: the log of its expected aggregate over the root's."""
        ranked = self._ranked(study, self._evidence(study))
        return {each.opportunity.id: each.expected for each in ranked}

    def _point(self, study: Study, evidence: _Evidence) -> Point | None:
        """The implementation to edit next."""
        return evidence.branch_point()

    def _evidence(self, study: Study) -> _Evidence:
        """A study's evidence now: read again only if an audit or an implementation came since."""
        with study.store.read(), kept_objects():
            extent = query.extent(study.store)
            if self._latest is None or self._latest[:2] != (study, extent):
                self._latest = study, extent, _Evidence(study, lambda sha: self._read(study, sha))
            return self._latest[2]

    def _read(self, study: Study, sha: str) -> Declared:
        if sha not in self._declared:
            text = read_checked(source_path(study.folder, sha), sha).decode()
            self._declared[sha] = Declared.of(Source(text), study.contract, self._templates)
        return self._declared[sha]

    def _open(self, study: Study, evidence: _Evidence) -> Iterator[tuple[Opportunity, Point, Edits]]:
        for opportunity in query.open_opportunities(study.store):
            edit = (opportunity.edit or {}).get("knobs")
            point = evidence.points.get(opportunity.parents[0])
            if edit and point is not None:
                yield opportunity, point, edit

    def _retire(self, study: Study, evidence: _Evidence) -> None:
        for opportunity in query.open_opportunities(study.store):
            if any(evidence.rejected(parent) for parent in opportunity.parents):
                _close(study, opportunity, Outcome.EXPIRED, "its parent was rejected")
        for opportunity, point, edit in list(self._open(study, evidence)):
            obstacle = evidence.obstacle(point, edit)
            if evidence.tried(point, edit):
                _close(study, opportunity, Outcome.DUPLICATE, "another edit led to the same source")
            elif obstacle is not None:
                _close(study, opportunity, Outcome.EXPIRED, obstacle)

    def _ranked(self, study: Study, evidence: _Evidence) -> Iterator[_Ranked]:
        for opportunity, point, edit in self._open(study, evidence):
            if not evidence.tried(point, edit) and evidence.obstacle(point, edit) is None:
                yield _Ranked(opportunity, point, edit, evidence.expected_gain(point, edit))

    def _tie(self, ranked: _Ranked) -> bytes:
        text = f"{self._seed} {ranked.parent.sha256} {sorted(ranked.edit.items())}"
        return hashlib.sha256(text.encode()).digest()

    def _proposal(self, study: Study, ranked: _Ranked) -> Proposal:
        parent, edit = study.store.source(ranked.parent.sha256), ranked.edit
        numeric = {knob.name for knob in ranked.parent.knobs if knob.kind is KnobKind.NUMERIC} & set(edit)
        kind = "accuracy" if numeric else "relation"
        label = ", ".join(f"{name}={value}" for name, value in edit.items())
        phases = {each.name: each.phase for each in study.workloads}
        moved = ranked.opportunity.workloads or tuple(phases)
        return Proposal(
            source=edits.apply(parent, edit, study.contract, label=label),
            parents=(parent.sha256,),
            hypothesis=f"{ranked.opportunity.mechanism}: {ranked.opportunity.rationale}",
            functions=edits.functions_using(parent, edit),
            regimes=tuple(dict.fromkeys(phases[name] for name in moved)),
            expected_effect=f"aggregate latency {100 * math.expm1(-ranked.gain):+.1f}% of the parent's",
            requirements_at_risk=tuple(r.id for r in study.contract.requirements if r.kind == kind),
            falsified_by=f"an aggregate latency not below that of {parent.short}",
            proposer=self.name,
            opportunity=ranked.opportunity.id,
        )


def _ahead(point: Point, other: Point) -> bool:
    ahead = other.log_objective - point.log_objective
    return ahead > max(STEP, math.hypot(point.error, other.error))


def _write(study: Study, point: Point, edit: Edits, estimate: Estimate) -> None:
    moves = ", ".join(f"{name} {point.settings[name]} -> {value}" for name, value in edit.items())
    standings = study.standings()
    supporting = dict.fromkeys((point.sha256, *estimate.evidence))
    study.store.add_opportunity(
        parents=(point.sha256,),
        mechanism=moves if len(edit) == 1 else f"joint edit {moves}",
        edit={"knobs": dict(edit)},
        workloads=estimate.workloads,
        evidence=[standings[sha].evidence.job for sha in supporting],
        source_audit=standings[point.sha256].evidence.job,
        rationale=estimate.grounds,
    )


def _close(study: Study, opportunity: Opportunity, outcome: Outcome, reason: str) -> None:
    study.store.close_opportunity(opportunity.id, outcome, reason=reason)


def _overlaps(each: _Ranked, chosen: Iterable[_Ranked]) -> bool:
    """Whether a single edit moves a knob that another chosen single edit moves."""
    return len(each.edit) == 1 and any(set(each.edit) == set(other.edit) for other in chosen)
