"""Calls of a language model, each within what is left: its most is written down before, its usage after.

The most of a call is what it reads, estimated from the bytes sent, and the answer's limit, which shrinks to
what is left. What the endpoint reports replaces it; what nobody reports stays unknown in the record, and the
budget is charged the most.
"""

import time
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic_ai.exceptions import (
    AgentRunError,
    ModelAPIError,
    ModelConnectionError,
    ModelRequestTimeout,
    UnexpectedModelBehavior,
)
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import RequestUsage
from pydantic_core import to_json

from kernelbraid.ir import proposing
from kernelbraid.ir.schema import Usage
from kernelbraid.search.proposers.llm_settings import LlmSettings
from kernelbraid.search.study import Study

TOKENS_A_BYTE = 0.5
"""Taken for granted until an endpoint reports; source code has about 0.3."""
CAUTION = 1.2
"""Times the tokens a byte that were last reported."""
LEAST_ANSWER = 512
"""Tokens below which an answer is not worth asking for."""


class BudgetSpent(Exception):  # noqa: N818 - a result
    """The next call might exceed a limit, so it was not made; the text says which."""


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars a token."""

    read: float
    written: float

    @classmethod
    def of(cls, settings: LlmSettings, model: Model) -> "Prices | None":
        """Return what was given, or else what the list of known prices says; None where it is unknown."""
        if settings.price_in is not None and settings.price_out is not None:
            return cls(settings.price_in / 1e6, settings.price_out / 1e6)
        usages = (RequestUsage(input_tokens=10**6), RequestUsage(output_tokens=10**6))
        found = [_listed(each, settings.model, model) for each in usages]
        if found[0] is None or found[1] is None:
            return None
        return cls(found[0] / 1e6, found[1] / 1e6)

    def of_tokens(self, read: int, written: int) -> float:
        return self.read * read + self.written * written


class Metered(WrapperModel):
    """A model whose every call is checked against a study's budgets before, and recorded after.

    Args:
        model: what is called.
        study: whose budgets and record.
        settings: the limits.
    """

    def __init__(self, model: Model, study: Study, settings: LlmSettings) -> None:
        super().__init__(model)
        self._study = study
        self._limits = settings
        self._prices = Prices.of(settings, model)
        self._tokens_a_byte = TOKENS_A_BYTE
        if settings.max_money is not None and self._prices is None:
            raise ValueError(
                f"the price of {settings.model} at {settings.place} is unknown: give --price-in and "
                "--price-out, or no --max-money"
            )

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        """Make one call.

        Raises:
            BudgetSpent: it might exceed a limit, and was not made.
        """
        sent = len(ModelMessagesTypeAdapter.dump_json(messages)) + len(_tools(model_request_parameters))
        read = int(sent * self._tokens_a_byte) + 1
        answer = self._answer(read)
        most = None if self._prices is None else self._prices.of_tokens(read, answer)
        call = proposing.begin_call(self._study.store, read + answer, most)
        bounded: ModelSettings = {**(model_settings or {}), "max_tokens": answer}
        left = self._study.budget.seconds_left
        bounded["timeout"] = min(self._limits.timeout, left)
        bounded["request_timeout"] = min(self._limits.timeout * (1 + self._limits.retries), left)
        start = time.monotonic()
        try:
            response = await super().request(messages, bounded, model_request_parameters)
        except Exception as error:
            self._end(call, start, str(error) or type(error).__name__, unknown() if _cut(error) else None)
            if isinstance(error, AgentRunError):
                raise
            raise UnexpectedModelBehavior(f"the endpoint's answer is malformed: {error}") from error
        usage = self._usage(response)
        self._end(call, start, response.finish_reason or "unknown", usage, response.model_name)
        if usage.tokens_in:
            self._tokens_a_byte = CAUTION * usage.tokens_in / sent
        return response

    def _answer(self, read: int) -> int:
        """Tokens that the next answer may have within all limits."""
        limits, spent = self._limits, proposing.spent(self._study.store)
        if self._study.budget.seconds_left <= 0:
            raise BudgetSpent("the time to search is over")
        answer = limits.answer_tokens
        least = min(LEAST_ANSWER, answer)
        if limits.max_tokens is not None:
            answer = min(answer, limits.max_tokens - spent.tokens - read)
            if answer < least:
                raise BudgetSpent(
                    f"{spent.tokens:,} of {limits.max_tokens:,} tokens are spent, and the next call may take "
                    f"{read + least:,}"
                )
        if limits.max_money is not None and self._prices is not None:
            used = limits.max_money if spent.money is None else spent.money
            left = limits.max_money - used - self._prices.of_tokens(read, 0)
            if left < self._prices.of_tokens(0, least):
                need = self._prices.of_tokens(read, least)
                raise BudgetSpent(
                    f"${used:.4f} of ${limits.max_money:g} are spent, and the next call may cost ${need:.4f}"
                )
            if self._prices.written > 0:
                answer = min(answer, int(left / self._prices.written))
        return answer

    def _usage(self, response: ModelResponse) -> Usage:
        """What the endpoint reports; a number that it leaves out stays unknown."""
        told = response.usage
        if told.unmeasured_requests or not told.input_tokens:
            return unknown()
        money: float | None = None
        if self._limits.price_in is not None and self._prices is not None:
            money = self._prices.of_tokens(told.input_tokens, told.output_tokens)
        else:
            money = _listed(told, response.model_name or self._limits.model, self.wrapped)
        return Usage(
            purpose=proposing.PURPOSE,
            tokens_in=told.input_tokens,
            tokens_out=told.output_tokens,
            money=money,
        )

    def _end(
        self, call: int, start: float, outcome: str, usage: Usage | None, model: str | None = None
    ) -> None:
        proposing.end_call(
            self._study.store,
            call,
            outcome=outcome,
            model=model or self._limits.model,
            seconds=time.monotonic() - start,
            usage=usage,
        )


def unknown() -> Usage:
    """Usage of a call that nobody reported."""
    return Usage(purpose=proposing.PURPOSE)


def _cut(error: Exception) -> bool:
    """Whether a failed call may have cost something: the endpoint may have worked on it."""
    if isinstance(error, ModelConnectionError):
        return error.phase not in ("pool", "connect")
    return isinstance(error, ModelRequestTimeout) or not isinstance(error, ModelAPIError)


def _tools(parameters: ModelRequestParameters) -> bytes:
    tools: list[Any] = [*parameters.function_tools, *parameters.output_tools]
    return to_json([[each.name, each.description, each.parameters_json_schema] for each in tools])


def _listed(usage: RequestUsage, name: str, model: Model) -> float | None:
    """US dollars by the list of known prices."""
    from genai_prices import calc_price

    try:
        total: Decimal = calc_price(usage, name, provider_api_url=model.base_url).total_price
    except (LookupError, ValueError):
        return None
    return float(total)
