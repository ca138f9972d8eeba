"""Which language model proposes, where it is reached, and what it may spend."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any, Self
from urllib.parse import urlsplit

APIS = ("openai", "anthropic")
EVIDENCE = ("full", "none")
KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
OWN_KEY = "KERNELBRAID_API_KEY"
"""Variable that holds the key of an endpoint given by its address: a vendor's key never goes elsewhere."""
PLACES = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmSettings:
    """What a study records of its language model; keys are never part of it.

    Raises ValueError on construction where an argument is out of its range.
    """

    model: str
    """Its name at the endpoint."""
    api: str = "openai"
    """`openai` (chat completions) or `anthropic` (messages)."""
    base_url: str | None = None
    """Address of the endpoint, such as `http://localhost:11434/v1`; None for the vendor's own."""
    key_variable: str = ""
    """Environment variable that holds the key."""
    max_tokens: int | None = None
    """Tokens of all calls of the study together, read and written; None for no limit."""
    max_money: float | None = None
    """US dollars of all calls together; None for no limit."""
    price_in: float | None = None
    """US dollars for a million tokens read; by default from the list of known prices."""
    price_out: float | None = None
    """US dollars for a million tokens written."""
    evidence: str = "full"
    """`full`, or `none`: the model sees the contract and one parent's source, nothing that was found out."""
    answer_tokens: int = 16_000
    """Tokens that one answer may have."""
    calls: int = 30
    """Calls of the model that one candidate may take."""
    retries: int = 4
    """Times a call is repeated after a rate limit, a server's error or a lost connection, waiting longer."""
    timeout: float = 600.0
    """Seconds that one answer may take."""

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ValueError("model must name the language model: give --model")
        if self.api not in APIS:
            raise ValueError(f"api must be one of {', '.join(APIS)}, got {self.api!r}")
        if self.evidence not in EVIDENCE:
            raise ValueError(f"evidence must be one of {', '.join(EVIDENCE)}, got {self.evidence!r}")
        for name in ("max_tokens", "max_money", "answer_tokens", "calls", "timeout"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, got {value}")
        for name in ("price_in", "price_out", "retries"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must not be below 0, got {value}")
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("price_in and price_out go together: give both or neither")
        if self.base_url is not None:
            _check_address(self.base_url)

    @classmethod
    def of(
        cls, model: str | None, *, api: str | None = None, base_url: str | None = None, **given: Any
    ) -> Self:
        """Return settings with what follows from the model's name and the address filled in.

        Raises:
            ValueError: there is no model, or an argument is out of its range.
        """
        if model is None:
            raise ValueError("proposer llm needs a model: give --model, or set KERNELBRAID_MODEL")
        host = (urlsplit(base_url).hostname or "") if base_url else ""
        ours = model.startswith("claude") if not base_url else host.endswith("anthropic.com")
        api = api or ("anthropic" if ours else "openai")
        given["key_variable"] = given.get("key_variable") or (OWN_KEY if base_url else KEYS.get(api, OWN_KEY))
        return cls(model=model, api=api, base_url=base_url, **given)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def moved(self, model: str | None, base_url: str | None) -> Self:
        """Return settings with another model or address; the API follows an address that changes."""
        if base_url is None or base_url == self.base_url:
            return replace(self, model=model or self.model)
        fresh = self.of(model or self.model, base_url=base_url)
        return replace(
            self, model=fresh.model, base_url=base_url, api=fresh.api, key_variable=fresh.key_variable
        )

    def require(self) -> None:
        """Raise unless the library for language models is installed and the key is set.

        Raises:
            ValueError: there is no key.
            RuntimeError: the extra is not installed.
        """
        if find_spec("pydantic_ai") is None:
            raise RuntimeError("proposer llm needs the extra `llm`: pip install 'kernelbraid[llm]'")
        self.key()

    @property
    def place(self) -> str:
        """The address that calls go to."""
        return self.base_url or PLACES[self.api]

    def key(self) -> str | None:
        """Return the key from the environment; None for an endpoint given by its address that needs none.

        Raises:
            ValueError: the vendor's own endpoint needs one and the variable is not set.
        """
        key = os.environ.get(self.key_variable, "").strip()
        if not key and self.base_url is None:
            raise ValueError(f"there is no key for {self.place}: set the variable {self.key_variable}")
        return key or None


def _check_address(base_url: str) -> None:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url must be an address such as http://localhost:8000/v1, got {base_url!r}")
    if parts.username or parts.password:
        raise ValueError("base_url must hold no user or password: the study records it")
