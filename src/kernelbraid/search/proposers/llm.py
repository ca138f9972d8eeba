"""Candidates by a language model: it reads what it may see, tries builds, submits a whole source or an edit.

Each proposal is a conversation of its own, so that a search can be resumed from its record. An attempt that
comes to nothing (a refusal, a truncated or malformed answer, an endpoint that keeps failing) is written down
and costs one of the proposer's calls; the study goes on.
"""

import asyncio
import math
from collections.abc import Mapping
from string import Template
from typing import Any

from kernelbraid.ir import proposing, query
from kernelbraid.ir.schema import Usage
from kernelbraid.search.proposers import Proposal, ProposerSpent, external
from kernelbraid.search.proposers.knobs import KnobProposer
from kernelbraid.search.proposers.llm_settings import LlmSettings
from kernelbraid.search.study import Study

try:
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.exceptions import (
        AgentRunError,
        ModelAPIError,
        ModelAuthenticationError,
        ModelConnectionError,
        ModelNotFoundError,
        ModelQuotaExceededError,
        ModelRequestTimeout,
        ModelTimeoutError,
        UsageLimitExceeded,
    )
    from pydantic_ai.models import Model
    from pydantic_ai.usage import UsageLimits
except ImportError as error:  # pragma: no cover - a test takes the library away in a process of its own
    raise RuntimeError("proposer llm needs the extra `llm`: pip install 'kernelbraid[llm]'") from error

from kernelbraid.search.proposers.llm_meter import BudgetSpent, Metered
from kernelbraid.search.proposers.llm_tools import Declined, Tools

MOST_FAILURES = 5
"""Attempts in a row that came to nothing, after which a search ends."""
MENDINGS = 4
"""Times in a row that a model may call a tool wrongly."""


class LlmProposer:
    """Asks a language model for one candidate at a time.

    Args:
        settings: the model and its limits.
        prompts: name -> text, as `prompts.shipped` gives them.

    Raises:
        ValueError: the endpoint needs a key that is not set.
    """

    name = "llm"

    def __init__(self, settings: LlmSettings, prompts: Mapping[str, str]) -> None:
        self.settings = settings
        self._prompts = dict(prompts)
        self._key = settings.key()
        self._failures = 0

    @classmethod
    def of(cls, study: Study) -> "LlmProposer":
        """Return the proposer that a study was made with, its prompts included."""
        found = proposing.settings(study.store)
        if found is None:
            raise ValueError(f"{study.folder} names no language model: start a new study with --model")
        return cls(LlmSettings.from_json(found.values), found.prompts)

    def observe(self, study: Study) -> None:
        """Write the knob edits that the evidence supports: a model may carry them out, or do better."""
        KnobProposer(study.store.study.seed).observe(study)

    def propose(self, study: Study, wanted: int) -> tuple[Proposal, ...]:
        """Return one candidate.

        Raises:
            ProposerSpent: a limit is reached, or MOST_FAILURES attempts in a row came to nothing.
            RuntimeError: the endpoint cannot be reached, or refuses the key or the model.
        """
        while True:
            outcome, reason, proposal = self._attempt(study)
            proposing.record_attempt(study.store, self.name, outcome, reason)
            if proposal is not None:
                self._failures = 0
                return (proposal,)
            self._failures += 1
            study.store.record_usage(Usage(purpose="proposal", proposer_calls=1))
            if self._failures >= MOST_FAILURES:
                raise ProposerSpent(f"{self._failures} attempts in a row came to nothing, the last: {reason}")
            if study.budget.proposer_calls_left < 1 or study.budget.seconds_left <= 0:
                raise ProposerSpent(f"the last attempt that the study allows came to nothing: {reason}")

    def _attempt(self, study: Study) -> tuple[str, str, Proposal | None]:
        """How one conversation ends: outcome, reason, and the candidate if there is one."""
        try:
            found = asyncio.run(self._conversation(study))
        except BudgetSpent as spent:
            raise ProposerSpent(str(spent)) from spent
        except (AgentRunError, TimeoutError) as error:
            self._raise_if_out_of_reach(error)
            return "failed", _sentence(error), None
        if isinstance(found, Declined):
            return "declined", found.reason, None
        return "proposed", found.hypothesis, found

    async def _conversation(self, study: Study) -> Proposal | Declined:
        parent = _parent(study)
        full = self.settings.evidence == "full"
        tools = Tools(study, parent, evidence=full, by=f"{self.name}:{self.settings.model}")
        metered = Metered(_model(self.settings, self._key), study, self.settings)
        agent: Agent[None, Any] = Agent(
            metered,
            instructions=self._prompts["rules"] + (self._prompts["evidence"] if full else ""),
            tools=list(tools.functions),
            output_type=[ToolOutput(each, name=each.__name__) for each in tools.outputs],
            model_settings={"max_retries": self.settings.retries},
            retries=MENDINGS,
            end_strategy="early",
        )
        asked = Template(self._prompts["candidate"]).substitute(
            task=external.task_text(study), parent=parent, source=study.store.source(parent).text
        )
        left = study.budget.seconds_left
        async with asyncio.timeout(None if math.isinf(left) else left), agent:
            run = await agent.run(asked, usage_limits=UsageLimits(request_limit=self.settings.calls))
        found = run.output
        assert isinstance(found, Proposal | Declined)
        return found

    def _raise_if_out_of_reach(self, error: Exception) -> None:
        """Raise RuntimeError for what no further attempt mends: say what is wrong in one sentence."""
        place, model = self.settings.place, self.settings.model
        if isinstance(error, ModelAuthenticationError):
            raise RuntimeError(
                f"{place} refuses the key in {self.settings.key_variable}: set it, then `resume`"
            ) from error
        if isinstance(error, ModelNotFoundError):
            raise RuntimeError(
                f"{place} knows no model {model}: `resume` with another --model or --base-url"
            ) from error
        if isinstance(error, ModelQuotaExceededError):
            raise RuntimeError(
                f"the account at {place} has no credit left: add some, then `resume`"
            ) from error
        if isinstance(error, ModelConnectionError) and not isinstance(error, ModelTimeoutError):
            raise RuntimeError(
                f"{place} cannot be reached: start the endpoint or check --base-url, then `resume`"
            ) from error


def _model(settings: LlmSettings, key: str | None) -> Model:
    if settings.api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel(
            settings.model,
            provider=AnthropicProvider(api_key=key or "none", base_url=settings.base_url),
        )
    from pydantic_ai.models.openai import OpenAIChatModel

    if settings.base_url is None:
        from pydantic_ai.providers.openai import OpenAIProvider

        assert key is not None
        return OpenAIChatModel(settings.model, provider=OpenAIProvider(api_key=key, base_url=settings.place))
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    provider = OpenAICompatibleProvider("endpoint", base_url=settings.base_url, api_key=key)
    return OpenAIChatModel(settings.model, provider=provider)


def _parent(study: Study) -> str:
    """The fastest verified implementation within its limits, the incumbent where it is as fast."""
    ready = {each.sha256 for each in query.verified(study.store)}
    timed = [
        (each.log_objective, each.sha256 != study.incumbent, each.sha256)
        for each in study.standings().values()
        if each.log_objective is not None and each.within_limits and each.sha256 in ready
    ]
    return min(timed)[2] if timed else study.incumbent


def _sentence(error: Exception) -> str:
    if isinstance(error, UsageLimitExceeded):
        return f"no candidate was submitted within the calls that one may take ({error})"
    if isinstance(error, ModelRequestTimeout | TimeoutError):
        return "the model did not answer in time"
    if isinstance(error, ModelAPIError):
        return f"the endpoint failed: {error}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
