"""Rewards of mathematical answers by math-verify (extra `tasks`): 1 where an answer equals the right one.

A JSONL task names it as its reward: `kernelbraid.rl.tasks.math_answers:reward`.
"""

import threading
from collections.abc import Mapping
from typing import Any

SECONDS = 5
"""For reading an answer, and again for comparing it."""


def reward(completion: str, record: Mapping[str, Any]) -> float:
    """1 if the completion's final answer equals `record["answer"]`, else 0.

    The answer is what math-verify's `parse` finds, in LaTeX or as a plain expression. What it cannot read or
    compare within 5 seconds is wrong. It keeps time by a signal, so this runs in the main thread.

    Args:
        completion: the text of an answer.
        record: holds the right one under `answer`, as LaTeX with or without $, or as a number or expression.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
        ValueError: there is no right answer, or it cannot be read.
        RuntimeError: called in another thread than the main one.
    """
    from math_verify import parse, verify

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify must run in the main thread, where its time limits work")
    if "answer" not in record:
        raise ValueError("the record must hold the right answer under 'answer'")
    right = _right(str(record["answer"]))
    found = parse(completion, parsing_timeout=SECONDS)
    return float(bool(found) and verify(right, found, timeout_seconds=SECONDS))


def _right(answer: str) -> Any:
    from math_verify import parse

    texts = [answer] if "$" in answer or "\\boxed" in answer else [f"${answer}$", answer]
    for text in texts:
        found = parse(text, parsing_timeout=SECONDS)
        if found:
            return found
    raise ValueError(f"the right answer cannot be read: {answer!r}")
