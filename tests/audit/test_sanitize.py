"""Small programs for compute-sanitizer: what they cover, and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.audit import toy
from tests.gpu import toy_cuda

from kernelbraid.audit import sanitize


def test_programs_cover_every_regime() -> None:
    found = list(sanitize.programs(toy_cuda.SUMS))
    assert len(found) == len(toy_cuda.SUMS.regimes)
    for program in found:
        assert program.constant_axes == {"width": 4} and program.calls
        assert sum(len(np.atleast_1d(program.inputs[name])) for name in program.inputs) > 0


def test_only_gpus_are_sanitized() -> None:
    with pytest.raises(ValueError, match="use --device cuda"):
        sanitize.sanitize(toy.SUMS, toy.root())


def test_the_tool_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="needs compute-sanitizer on the PATH"):
        sanitize.sanitize(toy_cuda.SUMS, toy_cuda.root())


@pytest.mark.parametrize(("code", "held"), [(0, True), (sanitize.FOUND, False)])
def test_what_the_tool_says_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, held: bool
) -> None:
    tool = tmp_path / sanitize.TOOL
    tool.write_text(f"#!/bin/sh\necho ERROR: Invalid __global__ read\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = sanitize.sanitize(toy_cuda.SUMS, toy_cuda.root())
    assert found["held"] is held and [each["checker"] for each in found["checkers"]] == list(sanitize.TOOLS)
    assert all(("Invalid" in each["output"]) is not held for each in found["checkers"])


def test_a_tool_that_fails_by_itself_is_no_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / sanitize.TOOL
    tool.write_text("#!/bin/sh\necho no device\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(RuntimeError, match="ended with code 3: no device"):
        sanitize.sanitize(dataclasses.replace(toy_cuda.SUMS), toy_cuda.root())
