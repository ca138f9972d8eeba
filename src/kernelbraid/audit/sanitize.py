"""A few small programs under CUDA's compute-sanitizer, which sees every access outside an allocation.

Right numbers do not prove that a kernel stays inside its buffers. Here every buffer is an allocation of its
own, so that the tool knows where it ends. The tool runs this file again, as a module, on one source.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelbraid import ops
from kernelbraid.audit.buffers import Poison
from kernelbraid.audit.verify import in_use, scopes_of
from kernelbraid.audit.worker import import_source
from kernelbraid.contract import Source
from kernelbraid.ops.problem import Array, Layout, Operator, ProblemShape, Program, View

if TYPE_CHECKING:
    import torch

TOOL = "compute-sanitizer"
TOOLS = ("memcheck",)
FOUND = 86
"""Exit code by which the tool says that it found something."""
LENGTHS = (1, 40, 300)
SECONDS = 900.0
TOLD = 4000
"""Characters of the tool's output that are reported."""


def sanitize(operator: Operator, source: Source | None = None) -> dict[str, Any]:
    """Run small programs of every regime and dtype under each of the tool's checkers.

    Args:
        operator: with backend `cuda`.
        source: an implementation; by default the one in use on this machine.

    Returns:
        A JSON-able document: `held`, and for each checker its `output` where it found something.

    Raises:
        ValueError: the operator is not for GPUs, or the tool is not there.
        RuntimeError: the implementation failed by itself, or the tool could not run.
    """
    if operator.backend != "cuda":
        raise ValueError(f"--sanitize checks kernels on a GPU, not on {operator.backend}: use --device cuda")
    tool = shutil.which(TOOL)
    if tool is None:
        raise ValueError(f"--sanitize needs {TOOL} on the PATH: it comes with the CUDA toolkit")
    source = source or in_use(operator)
    with tempfile.TemporaryDirectory(prefix="kernelbraid-") as folder:
        path = Path(folder) / "implementation.py"
        path.write_text(source.text, encoding="utf-8")
        found = {checker: _check(tool, checker, operator, path) for checker in TOOLS}
    return {
        "operator": operator.name,
        "implementation": source.sha256,
        "held": not any(found.values()),
        "checkers": [{"checker": name, "held": not text, "output": text} for name, text in found.items()],
    }


def _check(tool: str, checker: str, operator: Operator, path: Path) -> str:
    """What one checker found; empty where it found nothing."""
    command = [tool, "--tool", checker, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    command += [sys.executable, "-m", __name__, operator.name, str(path)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_CACHE_DIR": str(path.parent)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{TOOL} --tool {checker} took more than {SECONDS:.0f} s") from error
    said = done.stdout + done.stderr
    if done.returncode == FOUND:
        return said[-TOLD:]
    if done.returncode:
        raise RuntimeError(f"{TOOL} --tool {checker} ended with code {done.returncode}: {said[-TOLD:]}")
    return ""


def programs(operator: Operator) -> Iterator[Program]:
    """Small padded programs of every regime and dtype, under the first set of constant axes."""
    rng = np.random.default_rng(0)
    axes = scopes_of(operator)[0]
    constant = tuple((a.name, axes[a.name]) for a in operator.contract.axes if a.constant)
    for dtype in operator.contract.dtypes:
        for regime in operator.regimes:
            rows = (1, 1, 1) if regime == "decode" else LENGTHS
            problem = operator.draw(ProblemShape(constant, LENGTHS, rows, "normal", dtype), rng)
            yield operator.lower(problem, Layout(regime, tuple(range(len(LENGTHS))), padding=3))


def _run(operator: Operator, path: Path) -> None:
    import torch

    module = import_source(str(path))
    for program in programs(operator):
        buffers = {name: _on_device(array) for name, array in {**program.inputs, **program.state}.items()}
        poison = Poison(np.random.default_rng(1))
        for name, (shape, dtype) in program.outputs.items():
            array = np.empty(shape, dtype)
            poison.fill(array)
            buffers[name] = _on_device(array)
        for call in program.calls:
            arguments = {name: _argument(value, buffers) for name, value in call.arguments.items()}
            getattr(module, call.entry_point)(**arguments)
        torch.cuda.synchronize()


def _on_device(array: Array) -> "torch.Tensor":
    import torch

    bits = torch.from_numpy(np.ascontiguousarray(array).view(f"i{array.dtype.itemsize}"))
    return bits.cuda().view(getattr(torch, array.dtype.name))


def _argument(value: Any, buffers: Mapping[str, Any]) -> Any:
    return buffers[value.buffer][value.start : value.stop] if isinstance(value, View) else value


if __name__ == "__main__":
    _run(ops.get(sys.argv[1], "cuda"), Path(sys.argv[2]))
