"""Whoever writes candidates: a proposer reads a study's evidence and returns complete sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kernelbraid.contract import Source

if TYPE_CHECKING:
    from kernelbraid.search.study import Study


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate and the modification that led to it, stated before its audit."""

    source: Source
    parents: tuple[str, ...]
    hypothesis: str
    functions: tuple[str, ...] = ()
    regimes: tuple[str, ...] = ()
    expected_effect: str = ""
    requirements_at_risk: tuple[str, ...] = ()
    falsified_by: str = ""
    proposer: str = ""
    opportunity: int | None = None


class ProposerSpent(Exception):  # noqa: N818 - a result
    """A proposer's own budget is spent, or it came to nothing too often; the text says which."""


class Proposer(Protocol):
    """Anything that proposes; its state is the study's record alone, so that a search can be resumed."""

    @property
    def name(self) -> str: ...

    def observe(self, study: "Study") -> None:
        """Write the opportunities that the evidence so far supports, and close those it took away."""
        ...

    def propose(self, study: "Study", wanted: int) -> Sequence[Proposal]:
        """Return up to `wanted` proposals, the most promising first; none when nothing is left to try.

        Raises:
            ProposerSpent: there will be no more, for a reason of the proposer's own.
            RuntimeError: what it needs cannot be reached; the search can go on later.
        """
        ...
