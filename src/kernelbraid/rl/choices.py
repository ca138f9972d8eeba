"""Options that are one of a few names."""

from enum import StrEnum
from typing import TypeVar

Choice = TypeVar("Choice", bound=StrEnum)


def choose(kind: type[Choice], name: str, value: str) -> Choice:
    """The member that a string or a member names.

    Raises:
        ValueError: there is none; the message lists them.
    """
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(each.value for each in kind)
        raise ValueError(f"{name} must be one of {known}, got {value!r}") from None
