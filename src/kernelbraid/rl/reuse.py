"""Whether a batch's recorded log-probabilities may stand for a recomputation, and if not, why.

A loss divides by the probabilities that a snapshot of the policy gave the tokens. Those that the rollout
recorded are bit for bit what a recomputation under the snapshot would give if every token was drawn under
exactly that snapshot and its arithmetic, and if the number that the objective names was recorded under equal
parameters. Then they are reused, for all minibatches and epochs of the batch: they stay the snapshot's while
the policy moves on. Otherwise all of the batch is recomputed, and every reason is reported. The promise is
tested by `spot_check`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

import torch
from torch import Tensor

from kernelbraid.rl.choices import choose
from kernelbraid.rl.records import Completion, RolloutBatch, Sampling, Snapshot


class Named(StrEnum):
    """Which log-probability of a token an objective names."""

    WHOLE = "whole"
    """Under the whole distribution at the temperature, whatever the token was drawn from."""
    PROCESSED = "processed"
    """Under what the token was drawn from: cut, penalised and biased."""


class Mode(StrEnum):
    """What a user asked for."""

    AUTO = "auto"
    """Reuse where it is valid, otherwise recompute and say why."""
    REQUIRE = "require"
    """Reuse, or stop with the reason."""
    NEVER = "never"
    """Recompute always."""


class Reason(Enum):
    """Why a batch is recomputed: the value is a name for machines and a sentence for people."""

    ASKED = ("asked", "Recomputation was asked for.")
    NO_LOGPROBS = ("no_logprobs", "The rollout recorded no log-probabilities.")
    NO_PROCESSED_LOGPROBS = (
        "no_processed_logprobs",
        "The objective names log-probabilities after cuts, penalties and biases, and none were recorded.",
    )
    NO_VALUES = ("no_values", "The objective needs the snapshot's values, and the rollout recorded none.")
    NOT_FINITE = ("not_finite", "A recorded number is NaN or infinite.")
    NOT_AS_DRAWN = (
        "not_as_drawn",
        "The tokens are not those that were drawn: the text was edited or tokenised again.",
    )
    GREEDY = ("greedy", "The tokens were drawn greedily, which has no log-probability at a temperature.")
    TEMPERATURE = ("temperature", "Log-probabilities were recorded at another temperature.")
    TRUNCATION = (
        "truncation",
        "Tokens were drawn with other top_p, top_k or min_p than the objective names.",
    )
    PENALTIES = ("penalties", "Tokens were drawn with other penalties than the objective names.")
    LOGIT_BIAS = ("logit_bias", "Tokens were drawn with another logit_bias than the objective names.")
    STALE_VERSION = ("stale_version", "Tokens were drawn under another version of the weights.")
    MIXED_VERSIONS = ("mixed_versions", "The weights changed while a completion was drawn.")
    WEIGHTS = ("weights", "Tokens were drawn with other weights than the snapshot's.")
    OTHER_RUN = (
        "other_run",
        "The batch comes from another process, and nothing recorded identifies its weights.",
    )
    BITS_ID = ("bits_id", "The rollout computed under another bits id.")
    DTYPE = ("dtype", "The rollout used the weights in another dtype.")
    DEVICE = ("device", "The rollout ran on another architecture.")
    SPOT_CHECK = ("spot_check", "A recomputed sample had other bits than recorded.")

    @property
    def code(self) -> str:
        """The name for machines."""
        return self.value[0]

    @property
    def sentence(self) -> str:
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Objective:
    """What a loss divides by."""

    sampling: Sampling = field(default_factory=Sampling)
    """Parameters that the update computes log-probabilities under: `whole` reads the temperature alone."""
    named: Named = Named.WHOLE
    values: bool = False
    """Whether it needs the snapshot's values too, as PPO does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", choose(Named, "named", self.named))
        if self.sampling.greedy:
            raise ValueError("temperature of an objective must be above 0: greedy has no log-probabilities")


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason that one completion gives."""

    reason: Reason
    completion: int | None
    """Its position in the batch; None for the whole batch."""
    detail: str = ""
    """What was recorded and what is wanted, where both are numbers or names."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Reuse, or recompute and why."""

    reuse: bool
    findings: tuple[Finding, ...] = ()

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Each once, in the order of `Reason`."""
        return tuple(each for each in Reason if any(finding.reason == each for finding in self.findings))

    def explain(self) -> str:
        """One line a reason: its sentence, how many completions give it, and the first one's detail."""
        lines = []
        for reason in self.reasons:
            found = [each for each in self.findings if each.reason == reason]
            where = [each for each in found if each.completion is not None]
            line = reason.sentence
            if where:
                many = f"{len(where)} completions, the first is" if len(where) > 1 else "It is completion"
                line += f" {many} number {where[0].completion}"
                line += f": {where[0].detail}." if where[0].detail else "."
            elif found[0].detail:
                line += f" {found[0].detail}."
            lines.append(line)
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        counts = {each.code: sum(f.reason == each for f in self.findings) for each in self.reasons}
        return {"reuse": self.reuse, "reasons": counts}


class ReuseError(RuntimeError):
    """Reuse was required and is not valid; `decision` holds the reasons."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(f"reuse of log-probabilities is required and not valid: {decision.explain()}")
        self.decision = decision


def decide(
    batch: RolloutBatch, objective: Objective, snapshot: Snapshot, mode: Mode | str = Mode.AUTO
) -> Decision:
    """Decide whether a batch's recorded numbers stand for what the snapshot would compute.

    Ask once, before the first optimizer step on the batch; the answer holds for all of its minibatches and
    epochs. Truncated completions and those that ended at a stop string keep their log-probabilities; those
    without tokens have nothing to reuse and give no reason.

    Args:
        batch: what was recorded.
        objective: what the loss names.
        snapshot: the policy that the loss divides by, and the arithmetic of the update.
        mode: what the user asked for.

    Returns:
        The decision, with every reason of every completion.

    Raises:
        ReuseError: mode is `require` and there is a reason not to reuse.
        ValueError: mode has another value.
    """
    mode = choose(Mode, "reuse", mode)
    if mode == Mode.NEVER:
        return Decision(False, (Finding(Reason.ASKED, None),))
    findings = tuple(
        Finding(reason, position, detail)
        for position, completion in enumerate(batch.completions)
        if len(completion.tokens)
        for reason, detail in _against(completion, objective, snapshot)
    )
    decision = Decision(not findings, findings)
    if findings and mode == Mode.REQUIRE:
        raise ReuseError(decision)
    return decision


def recorded_logprobs(completion: Completion, objective: Objective) -> Tensor | None:
    """What was recorded of the log-probabilities that an objective names, or None."""
    if objective.named == Named.PROCESSED and completion.sampling.processed:
        return completion.processed_logprobs
    return completion.logprobs


def _against(
    completion: Completion, objective: Objective, snapshot: Snapshot
) -> Iterator[tuple[Reason, str]]:
    """Every reason not to reuse a completion's numbers."""
    if not completion.as_drawn:
        yield Reason.NOT_AS_DRAWN, ""
    yield from _other_weights(completion, snapshot)
    for reason, recorded, wanted in (
        (Reason.BITS_ID, completion.snapshot.bits_id, snapshot.bits_id),
        (Reason.DTYPE, completion.snapshot.dtype, snapshot.dtype),
        (Reason.DEVICE, completion.snapshot.device, snapshot.device),
    ):
        if recorded != wanted:
            yield reason, _both(recorded, wanted)
    yield from _other_parameters(completion.sampling, objective)
    found = recorded_logprobs(completion, objective)
    if found is None:
        processed = objective.named == Named.PROCESSED and completion.sampling.processed
        yield (Reason.NO_PROCESSED_LOGPROBS if processed else Reason.NO_LOGPROBS), ""
    if objective.values and completion.values is None:
        yield Reason.NO_VALUES, ""
    numbers = [found, completion.values if objective.values else None]
    if any(each is not None and not bool(torch.isfinite(each).all()) for each in numbers):
        yield Reason.NOT_FINITE, ""


def _other_weights(completion: Completion, snapshot: Snapshot) -> Iterator[tuple[Reason, str]]:
    """Within one run a version names weights; between runs nothing but their identity does."""
    recorded, versions = completion.snapshot, completion.versions
    if len(versions) > 1:
        yield Reason.MIXED_VERSIONS, f"versions {', '.join(map(str, versions))}"
    elif recorded.run == snapshot.run and versions[0] != snapshot.version:
        yield Reason.STALE_VERSION, _both(versions[0], snapshot.version)
    if recorded.weights is not None and snapshot.weights is not None:
        if recorded.weights != snapshot.weights:
            yield Reason.WEIGHTS, _both(recorded.weights, snapshot.weights)
    elif recorded.run != snapshot.run:
        yield Reason.OTHER_RUN, _both(recorded.run, snapshot.run)


def _other_parameters(drawn: Sampling, objective: Objective) -> Iterator[tuple[Reason, str]]:
    wanted = objective.sampling
    if drawn.greedy:
        yield Reason.GREEDY, ""
    elif drawn.inverse_temperature != wanted.inverse_temperature:
        yield Reason.TEMPERATURE, _both(drawn.temperature, wanted.temperature)
    if objective.named == Named.WHOLE:
        return
    for reason, names in (
        (Reason.TRUNCATION, ("top_p", "top_k", "min_p")),
        (Reason.PENALTIES, ("repetition_penalty", "presence_penalty", "frequency_penalty")),
        (Reason.LOGIT_BIAS, ("logit_bias",)),
    ):
        for name in names:
            recorded, named = getattr(drawn, name), getattr(wanted, name)
            if recorded != named:
                yield reason, f"{name} {_both(recorded, named)}"
                break


def _both(recorded: object, wanted: object) -> str:
    return f"recorded {recorded}, wanted {wanted}"
