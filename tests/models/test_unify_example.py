"""The example of docs/unify.md runs, and does what it says."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from kernelbraid.models.shared import parts_of, shares

pytest.importorskip("transformers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "unify.md"


def test_the_example_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code, names)
    decoder, model = names["decoder"], names["model"]
    held = dict(decoder.weights.tensors())
    assert decoder.version == 1
    assert all(shares(held[name], parts) for name, parts in parts_of(model).items())
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
