"""Implementations of operators on rows, broken on purpose by short edits of the shipped CPU sources."""

from dataclasses import dataclass
from importlib import import_module

from kernelbraid import ops

OPERATORS = (
    "linear",
    "rms_norm",
    "add_rms_norm",
    "qk_norm",
    "rope",
    "qk_norm_rope_cache",
    "swiglu",
    "embedding",
    "moe_router",
    "moe_experts",
    "logprob",
    "sample",
)
"""Operators on rows; each has a file of controls beside this one, CONTROLS and AXES."""


@dataclass(frozen=True)
class Control:
    """One mistake."""

    name: str
    rejected_by: str
    """relation/regime, or accuracy_quantity/regime."""
    edits: tuple[tuple[str, str], ...]
    tokens: tuple[int, ...] = ()
    """Numbers of tokens in a call at which the broken source says that its schedule changes."""

    def text(self, operator: str) -> str:
        text = ops.source(ops.get(operator)).text
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{operator}/cpu.py contains {text.count(old)} times, not once: {old!r}")
            text = text.replace(old, new)
        return text


def controls(operator: str) -> tuple[Control, ...]:
    found: tuple[Control, ...] = import_module(f"tests.controls.{operator}").CONTROLS
    return found


def axes(operator: str) -> dict[str, int]:
    """Constant axes under which an operator's controls are tried."""
    found: dict[str, int] = import_module(f"tests.controls.{operator}").AXES
    return found
