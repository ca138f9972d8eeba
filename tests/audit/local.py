"""Runs programs in this process: for tests that need many implementations and no isolation."""

import importlib.util
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np

from kernelbraid.audit.cases import Process
from kernelbraid.ops.problem import Argument, Array, Program, View


def load(text: str, folder: Path) -> ModuleType:
    """Import a source text as a module of its own, from a file, as Numba's cache needs."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=folder, delete=False) as file:
        file.write(text)
    spec = importlib.util.spec_from_file_location(Path(file.name).stem, file.name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LocalRunner:
    """A `checks.Runner` of one source text; `fresh` is the text imported anew, `root` another text."""

    def __init__(self, text: str, folder: Path, root: str | None = None) -> None:
        self._folder = folder
        self._texts = {"main": text, "fresh": text, "root": root}
        self._modules: dict[str, ModuleType] = {}
        self._poison = itertools.count(1)
        self.programs = 0

    def module(self, process: Process) -> ModuleType:
        """The implementation as imported for a process, when it is first asked for."""
        if process not in self._modules:
            text = self._texts[process]
            assert text is not None, "no root"
            self._modules[process] = load(text, self._folder)
        return self._modules[process]

    def run(self, program: Program, process: Process) -> Mapping[str, Array]:
        module = self.module(process)
        self.programs += 1
        rng = np.random.default_rng(next(self._poison))
        buffers: dict[str, Array] = {}
        for name, array in program.inputs.items():
            buffers[name] = array.copy()
            buffers[name].flags.writeable = False
        buffers.update({name: array.copy() for name, array in program.state.items()})
        buffers.update({name: poisoned(rng, *about) for name, about in program.outputs.items()})
        for call in program.calls:
            arguments = {name: _resolve(value, buffers) for name, value in call.arguments.items()}
            getattr(module, call.entry_point)(**arguments)
        return {name: buffers[name] for name in program.outputs}


def poisoned(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """An array of NaNs with random payloads (bytes start 0x7fc or 0xffc), or of random integers."""
    if dtype == "int32":
        return rng.integers(-(2**31), 2**31, shape, np.int32)
    assert dtype == "float32", dtype
    bits = rng.integers(1, 1 << 22, shape, np.uint32) | np.uint32(0x7FC00000)
    return bits.view(np.float32)


def _resolve(value: Argument, buffers: Mapping[str, Array]) -> object:
    if isinstance(value, View):
        return buffers[value.buffer][value.start : value.stop]
    return value
