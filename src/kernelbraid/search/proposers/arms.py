"""The knob proposer with something taken away: the arms of an ablation.

All arms select parents and promote by the same rules and have the same budgets; what differs is what the
proposer may know and where it may branch.
"""

import random
from collections.abc import Iterator, Sequence
from enum import StrEnum

from kernelbraid.contract import BitPolicy, KnobKind
from kernelbraid.ir import query
from kernelbraid.search.proposers import Proposal, Proposer, edits
from kernelbraid.search.proposers.edits import DeclaredKnob, Edits
from kernelbraid.search.proposers.effects import Point
from kernelbraid.search.proposers.knobs import KnobProposer, _Evidence
from kernelbraid.search.study import Study

CHANGED = 0.5
"""Chance that a knob is moved in a proposal that starts from the root."""


class Arm(StrEnum):
    FULL = "full"
    """Everything that is recorded, and any verified parent."""
    NO_EVIDENCE = "no-evidence"
    """The parent's source and the contract alone: no audits, failures or opportunities."""
    NO_BRANCHING = "no-branching"
    """The parent is always the incumbent."""
    BEST_OF_N = "best-of-n"
    """Independent proposals from the root."""


def proposer_of(arm: Arm, seed: int) -> Proposer:
    """Return the proposer of an arm."""
    if arm is Arm.FULL:
        return KnobProposer(seed)
    if arm is Arm.NO_BRANCHING:
        return Unbranched(seed)
    return Blind(seed, from_root=arm is Arm.BEST_OF_N)


class Unbranched(KnobProposer):
    """Edits the incumbent alone."""

    def _point(self, study: Study, evidence: _Evidence) -> Point | None:
        return evidence.points.get(study.incumbent)

    def propose(self, study: Study, wanted: int) -> tuple[Proposal, ...]:
        incumbent = (study.incumbent,)
        return tuple(each for each in super().propose(study, 1 << 20) if each.parents == incumbent)[:wanted]


class Blind(KnobProposer):
    """Edits drawn without regard to evidence, but none twice.

    Args:
        seed: of the draws.
        from_root: edit several knobs of the root; otherwise one knob of the branch point.
    """

    def __init__(self, seed: int = 0, *, from_root: bool) -> None:
        super().__init__(seed)
        self._from_root = from_root

    def observe(self, study: Study) -> None:
        """Write no opportunities: evidence is not looked at."""

    def propose(self, study: Study, wanted: int) -> tuple[Proposal, ...]:
        evidence = self._evidence(study)
        point = evidence.points.get(study.root) if self._from_root else evidence.branch_point()
        if point is None:
            return ()
        made = len(query.hashes(study.store))
        rng = random.Random(f"{self._seed} {made} {point.sha256}")
        knobs = [each for each in point.knobs if self._lawful(study, each)]
        drawn = self._several(rng, knobs) if self._from_root else self._one_each(rng, knobs)
        chosen: list[Edits] = []
        for edit in drawn:
            if len(chosen) == wanted:
                break
            if edit not in chosen and not evidence.tried(point, edit):
                chosen.append(edit)
        return tuple(self._drawn(study, point.sha256, edit) for edit in chosen)

    def _lawful(self, study: Study, knob: DeclaredKnob) -> bool:
        return study.policy is not BitPolicy.PINNED or knob.kind is not KnobKind.NUMERIC

    def _one_each(self, rng: random.Random, knobs: Sequence[DeclaredKnob]) -> Iterator[Edits]:
        single = [{knob.name: value} for knob in knobs for value in knob.alternatives]
        rng.shuffle(single)
        yield from single

    def _several(self, rng: random.Random, knobs: Sequence[DeclaredKnob]) -> Iterator[Edits]:
        for _ in range(1000):
            moved = [knob for knob in knobs if knob.alternatives and rng.random() < CHANGED]
            if moved:
                yield {knob.name: rng.choice(knob.alternatives) for knob in moved}

    def _drawn(self, study: Study, sha256: str, edit: Edits) -> Proposal:
        parent = study.store.source(sha256)
        label = ", ".join(f"{name}={value}" for name, value in edit.items())
        return Proposal(
            source=edits.apply(parent, edit, study.contract, label=label),
            parents=(parent.sha256,),
            hypothesis=f"{label}, drawn at random",
            functions=edits.functions_using(parent, edit),
            proposer=self.name,
        )
