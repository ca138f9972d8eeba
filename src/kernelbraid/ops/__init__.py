"""Operators: mathematical functions with a numerical contract, one folder each."""

from importlib.resources import files

from kernelbraid.contract import Source
from kernelbraid.ops.attention.spec import ATTENTION
from kernelbraid.ops.problem import Operator

OPERATORS: tuple[Operator, ...] = (ATTENTION,)


def get(name: str) -> Operator:
    """Return the operator called `name`.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    for operator in OPERATORS:
        if operator.name == name:
            return operator
    raise ValueError(f"unknown operator {name!r}; operators are {', '.join(o.name for o in OPERATORS)}")


def source(operator: Operator, backend: str, file: str | None = None) -> Source:
    """Return a shipped source of `operator`: by default its first implementation for `backend`.

    Args:
        operator: the operator.
        backend: `cpu` or `cuda`; must be one that the operator has.
        file: name of another source in the operator's folder, such as its peers.

    Raises:
        ValueError: no such backend or file.
    """
    if backend not in operator.backends:
        known = ", ".join(operator.backends)
        raise ValueError(f"{operator.name} has no backend {backend!r}; it has {known}")
    name = operator.backends[backend][0] if file is None else file
    if name not in (*operator.backends[backend], operator.peer_file):
        known = ", ".join((*operator.backends[backend], operator.peer_file))
        raise ValueError(f"{operator.name} ships no {name!r} for {backend}; it ships {known}")
    text = (files("kernelbraid.ops") / operator.name / name).read_text(encoding="utf-8")
    return Source(text, label=f"{operator.name}/{name}")
