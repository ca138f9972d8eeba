"""Makes a recorded study's proposals again, to reproduce a derivation or to measure arms on them."""

from collections.abc import Mapping
from pathlib import Path

from kernelbraid.contract import Source
from kernelbraid.ir import query, replaying
from kernelbraid.ir.replaying import Recorded
from kernelbraid.ir.store import Store
from kernelbraid.search.proposers import Proposal
from kernelbraid.search.proposers.arms import Arm
from kernelbraid.search.study import Study


class Replay:
    """Proposes what was proposed, in the same order, each once its parents are audited here.

    A parent that this study's audits reject is replaced by its nearest ancestor that they accept: the source
    is the same, and only what it is said to be made from differs.

    Args:
        arm: `full` takes every proposal; `no-branching` those alone that were made from what is the incumbent
            here; `best-of-n` those that were made from the root.

    Raises:
        ValueError: the arm changes what a proposer knows, which recorded proposals cannot show.
    """

    name = "replay"

    def __init__(self, arm: Arm = Arm.FULL) -> None:
        if arm is Arm.NO_EVIDENCE:
            raise ValueError("arm no-evidence cannot be replayed: recorded proposals knew what they knew")
        self._arm = arm

    def observe(self, study: Study) -> None:
        """Write no opportunities: what is proposed does not depend on evidence."""

    def propose(self, study: Study, wanted: int) -> tuple[Proposal, ...]:
        """Return the next proposals in their order; none before the parents of the next one are audited."""
        recorded = replaying.recorded(study.store)
        ancestry = _Ancestry(study, {each.source.sha256: each.parents for each in recorded})
        have = set(query.hashes(study.store))
        proposals: list[Proposal] = []
        for each in recorded:
            sha256 = each.source.sha256
            if sha256 in have or study.store.duplicate_of(each.source) is not None:
                continue
            parents = ancestry.stand_ins(each.parents)
            if parents is None or len(proposals) == wanted:
                break
            if self._lawful(study, parents):
                proposals.append(_again(each, parents))
                ancestry.waiting.add(sha256)
        return tuple(proposals)

    def _lawful(self, study: Study, parents: tuple[str, ...]) -> bool:
        if self._arm is Arm.NO_BRANCHING:
            return parents == (study.incumbent,)
        return self._arm is not Arm.BEST_OF_N or parents == (study.root,)


class _Ancestry:
    """Who stands for recorded parents in the study that replays them."""

    def __init__(self, study: Study, parents: Mapping[str, tuple[str, ...]]) -> None:
        self._root = study.root
        self._parents = parents
        self._verified = {each.sha256 for each in query.verified(study.store)}
        self.waiting = {each.implementation for each in study.store.pending()}

    def stand_ins(self, named: tuple[str, ...]) -> tuple[str, ...] | None:
        """The parents themselves or their nearest verified ancestors; None while one waits for its audit."""
        found: dict[str, None] = {}
        for sha256 in named:
            if sha256 in self.waiting and sha256 not in self._verified:
                return None
            if sha256 in self._verified or sha256 not in self._parents:
                found[sha256 if sha256 in self._verified else self._root] = None
                continue
            above = self.stand_ins(self._parents[sha256])
            if above is None:
                return None
            found |= dict.fromkeys(above)
        return tuple(found)


def made_from(folder: Path) -> tuple[str, Source, list[Recorded]]:
    """Read a study to replay: the operator, the root, the proposals in their order.

    Raises:
        ValueError: there is no study, or it recorded no proposal.
    """
    with Store.open(folder) as store:
        proposals = replaying.read(store)
        if not proposals:
            raise ValueError(f"{folder} has no proposal to replay")
        return store.study.operator, store.source(store.study.root), proposals


def _again(each: Recorded, parents: tuple[str, ...]) -> Proposal:
    return Proposal(
        source=each.source,
        parents=parents,
        hypothesis=each.hypothesis,
        functions=each.functions,
        regimes=each.regimes,
        expected_effect=each.expected_effect,
        requirements_at_risk=each.requirements_at_risk,
        falsified_by=each.falsified_by,
        proposer=f"replay of {each.proposer}" if each.proposer else "replay",
    )
