"""Walk what an audit or a benchmark would run on a GPU, without one, and compile what that launches.

    python scripts/dry_gpu.py linear                        every specialisation of a screen and a full check
    python scripts/dry_gpu.py linear moe_experts --list     count them only
    python scripts/dry_gpu.py rms_norm --levels screen --architectures 80 86 --limit 20

Every program of every scope and dtype is lowered as the audit does and its calls are made on tensors without
data, of the same shapes, strides and alignment, in the shipped implementation and in the one with another
schedule. Triton itself decides which specialisation a launch needs; instead of compiling and launching, it
is recorded here. Each is then compiled once an architecture; results are kept in a cache (--cache), so that
a run which was ended goes on where it was. Ends with exit code 1 if one spills or asks for more shared memory
than a program may have.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernelbraid import ops
from kernelbraid.audit import worker
from kernelbraid.audit.cases import cases, vacuous
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.verify import at_level, scopes_of, with_other_schedule
from kernelbraid.contract import Source
from kernelbraid.ir.evidence import Level
from kernelbraid.ops import numbers, rows
from kernelbraid.ops.problem import Layout, Operator, ProblemShape, Program, View

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that a program may have."""
NUMPY = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VARIANTS, POOL = 3, 64 << 20
"""Distinct calls of a timed program that are made, and bytes of their pool."""


@dataclass
class Launched:
    """A specialisation of a kernel, and where it was launched first."""

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]
    options: Any
    where: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.function.fn.__name__)

    @property
    def label(self) -> str:
        """What tells it from others: constants, which pointers are aligned, warps and stages."""
        names = self.function.arg_names
        shown = " ".join(f"{names[at[0]]}={_short(value)}" for at, value in sorted(self.constants.items()))
        types = ",".join(kind for kind in self.signature.values() if kind != "constexpr")
        aligned = ",".join(names[at[0]] for at in sorted(self.attributes) if self.attributes[at])
        warps = f"w{self.options.num_warps} s{self.options.num_stages}"
        return f"{self.name}({types}; {shown}; %16 {aligned}) {warps}"


def _short(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value).removeprefix("triton.language.")


class NoDevice:
    """What Triton asks its driver for before it compiles."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def recorded(architecture: int, found: dict[str, Launched]) -> Iterator[Callable[[str], None]]:
    """Record launches instead of making them, on no device; yields how to say where they come from."""
    where = [""]

    def record(
        self: Any,
        key: str,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attributes: Any,
        _: bool,
    ) -> None:
        each = Launched(self, signature, constants, attributes, options)
        # one kernel of two modules with the same text is one kernel
        same = f"{each.label} {options.hash()}"
        found.setdefault(same, each).where.append(where[0])
        self.device_caches[device][0][key] = lambda: None

    class Nothing:
        """Stands for a compiled kernel."""

        def launch_metadata(self, *_: Any) -> None:
            return None

        function = packed_metadata = None

        def run(self, *_: Any) -> None:
            return None

    def do_compile(self: Any, key: str, signature: Any, device: int, *rest: Any) -> Any:
        record(self, key, signature, device, *rest)
        kernel = self.device_caches[device][0][key] = Nothing()
        return kernel

    kept, active = JITFunction._do_compile, driver._active
    properties = types.SimpleNamespace(
        multi_processor_count={80: 108, 90: 132}.get(architecture, 128),
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=SHARED[architecture],
        total_memory=80 << 30,
    )
    patched = {
        "get_device_capability": lambda *_: divmod(architecture, 10),
        "get_device_properties": lambda *_: properties,
    }
    before = {name: getattr(torch.cuda, name) for name in patched}
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> torch.Tensor:
        """Indices that a kernel would have written are 0, so that others may follow them."""
        integers = options.get("dtype") in (torch.int32, torch.int64)
        return torch.zeros(*size, **options) if integers else empty(*size, **options)

    JITFunction._do_compile = do_compile
    driver.set_active(NoDevice(architecture))  # type: ignore[no-untyped-call]
    for name, value in patched.items():
        setattr(torch.cuda, name, value)
    torch.empty = filled  # type: ignore[assignment]

    def tell(text: str) -> None:
        where[0] = text

    try:
        yield tell
    finally:
        JITFunction._do_compile = kept
        driver._active = active
        torch.empty = empty
        for name, value in before.items():
            setattr(torch.cuda, name, value)


@contextmanager
def without_numbers() -> Iterator[None]:
    """Let problems be drawn without numbers, which no launch depends on; indices stay."""
    kept = rows.RowForm._drawn, rows.finite, rows._SHARED

    def drawn(self: Any, each: Any, axes: Any, size: Any, shape: Any, rng: Any) -> Any:
        if each.drawn == "numbers":
            return np.zeros(size, np.dtype(each.kept(shape.dtype)))
        return kept[0](self, each, axes, size, shape, rng)

    def zeros(rng: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        return np.zeros(shape, dtype)

    normal = numbers.normal
    modules = [module for name, module in sys.modules.items() if name.startswith("kernelbraid.ops.")]
    using = [m for m in modules if getattr(m, "normal", None) is normal]
    rows.RowForm._drawn, rows.finite, rows._SHARED = drawn, lambda block: block, {}  # type: ignore[method-assign]
    for module in using:
        module.normal = zeros  # type: ignore[attr-defined]
    try:
        yield
    finally:
        rows.RowForm._drawn, rows.finite, rows._SHARED = kept  # type: ignore[method-assign]
        for module in using:
            module.normal = normal  # type: ignore[attr-defined]


class Stage:
    """Implementations of an operator whose calls are made on tensors without data."""

    def __init__(self, operator: Operator, folder: Path) -> None:
        shipped = ops.source(operator)
        other = with_other_schedule(shipped)
        self.modules = {"main": self._imported(shipped, folder)}
        if other is not None:
            self.modules["root"] = self._imported(other, folder)
        self.seen: set[tuple[Any, ...]] = set()
        self.calls = 0

    @staticmethod
    def _imported(source: Source, folder: Path) -> Any:
        path = folder / f"{source.short}.py"
        path.write_text(source.text, encoding="utf-8")
        return worker.import_source(str(path))

    def run(self, program: Program, process: str) -> None:
        """Make those calls of a program that no call before was like."""
        buffers: dict[str, torch.Tensor] = {}
        for name, array in (*program.inputs.items(), *program.state.items()):
            buffers[name] = _tensor(array)
        for name, (shape, dtype) in program.outputs.items():
            buffers[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        for process_of in ("main", "root") if process == "both" else (process,):
            module = self.modules.get(process_of)
            for call in program.calls if module else ():
                arguments = {name: _argument(value, buffers) for name, value in call.arguments.items()}
                key = (process_of, call.entry_point, *((n, _alike(v)) for n, v in arguments.items()))
                if key not in self.seen:
                    self.seen.add(key)
                    self.calls += 1
                    getattr(module, call.entry_point)(**arguments)


def _tensor(array: Any) -> torch.Tensor:
    if array.dtype.kind in "iu":
        return torch.from_numpy(np.ascontiguousarray(array))
    return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)))


def _argument(value: Any, buffers: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, View):
        whole = buffers[value.buffer]
        return whole if value.start == 0 and value.stop is None else whole[value.start : value.stop]
    return value


def _alike(value: Any) -> Any:
    """What a launch can depend on of an argument."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.data_ptr() % 16
    return value


def walk(
    operator: Operator,
    levels: Sequence[Level],
    architecture: int,
    told: Callable[[str], None] = lambda _: None,
    grids: bool = True,
    scopes: Sequence[Mapping[str, int]] | None = None,
) -> tuple[dict[str, Launched], dict[str, int]]:
    """Return every specialisation that a verification at these levels and a benchmark launch, and its cost.

    The second is the number of specialisations that each part meets, whatever the others met.
    """
    found: dict[str, Launched] = {}
    parts: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        recorded(architecture, found) as tell,
        without_numbers(),
    ):
        stage = Stage(operator, Path(folder))
        known = scopes_of(operator) if scopes is None else scopes
        for scope in known:
            for dtype in operator.contract.dtypes:
                for level in [each for each in levels if at_level(operator, [dict(scope)], each)]:
                    part = f"{level.value} {','.join(f'{k}={v}' for k, v in scope.items())} {dtype}"
                    tell(part)
                    before = len(found)
                    _verify(operator, stage, level, dict(scope), dtype)
                    parts[part] = len(found) - before
                    told(f"{part}: {stage.calls} calls, {len(found)} specialisations")
        for name, grid in operator.grids.items() if grids else ():
            tell(f"grid {name}")
            before = len(found)
            for workload in grid:
                stage.run(
                    operator.timed(workload, np.random.default_rng(0), VARIANTS, POOL, contiguous=False),
                    "both",
                )
            parts[f"grid {name}"] = len(found) - before
            told(f"grid {name}: {stage.calls} calls, {len(found)} specialisations")
    return found, parts


def _verify(operator: Operator, stage: Stage, level: Level, scope: dict[str, int], dtype: str) -> None:
    """Make the calls of `verify` in one scope."""
    module = stage.modules["main"]
    axes = [{"name": a.name, "low": a.low, "high": a.high} for a in operator.contract.axes if not a.constant]
    constant = tuple((a.name, scope[a.name]) for a in operator.contract.axes if a.constant)
    for regime in operator.regimes:
        lengths = (3, 40)
        shape = ProblemShape(constant, lengths, (1, 1) if regime == "decode" else lengths, "normal", dtype)
        problem = operator.draw(shape, np.random.default_rng(0))
        stage.run(operator.lower(problem, Layout(regime, (0, 1))), "both")
    edges = {name: tuple(at) for name, at in worker.schedule_edges(module, scope, axes).items()}
    plan = Plan(level, (scope,), dict(module.numerics(scope)), edges, dtype, 1, root_agrees=True)
    problems: dict[Any, Any] = {}
    done: set[Any] = set()
    for requirement in operator.contract.requirements:
        if vacuous(requirement, plan):
            continue
        for case in cases(operator, requirement, plan):
            key = case.shape, case.seed
            for execution in (case.left, case.right, *case.between):
                for layout in (execution.layout, execution.captured) if execution else ():
                    if layout is None:
                        continue
                    process = "root" if execution.process == "root" else "main"
                    once = (*key, replace(layout, poison_seed=1, page_seed=0), process)
                    if once in done:
                        continue
                    done.add(once)
                    if key not in problems:
                        if len(problems) > 6:
                            problems.pop(next(iter(problems)))
                        problems[key] = operator.draw(case.shape, np.random.default_rng(case.seed))
                    stage.run(operator.lower(problems[key], layout), process)


@dataclass(frozen=True)
class Compiled:
    """What became of a specialisation."""

    registers: int
    spills: int
    shared: int
    seconds: float
    """Of processors, not of a clock."""

    def fits(self, architecture: int) -> bool:
        return not self.spills and self.shared <= SHARED[architecture]


def compiled(each: Launched, architecture: int, cache: Path) -> Compiled:
    """Compile a specialisation for an architecture, unless the cache knows what came of it."""
    source = ASTSource(each.function, each.signature, each.constants, each.attributes)
    target = GPUTarget("cuda", architecture, 32)
    options = make_backend(target).parse_options(
        {
            k: v
            for k, v in each.options.__dict__.items()
            if k in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
        }
    )
    name = hashlib.sha256(
        f"{triton.__version__} {source.hash()} {target} {options.hash()}".encode()
    ).hexdigest()
    kept = cache / f"{name[:32]}.json"
    if kept.exists():
        return Compiled(**json.loads(kept.read_text()))
    start = os.times()
    done = triton.compile(source, target=target, options=options.__dict__)
    seconds = sum(now - before for now, before in zip(os.times()[:4], start[:4], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(done.asm["cubin"])
        usage, machine = (
            subprocess.run([CUOBJDUMP, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage[-300:]
    spills = len(re.findall(r"\b(?:STL|LDL)\b", machine))
    result = Compiled(int(registers[1]), spills, int(done.metadata.shared), round(seconds, 2))
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(result.__dict__))
    return result


def default_cache() -> Path:
    return Path(os.environ.get("KERNELBRAID_DRY", Path(tempfile.gettempdir()) / "kernelbraid-dry"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("operators", nargs="+")
    parser.add_argument("--levels", nargs="+", default=[Level.SCREEN, Level.FULL], type=Level)
    parser.add_argument("--architectures", nargs="+", type=int, default=[90], choices=sorted(SHARED))
    parser.add_argument("--list", action="store_true", help="do not compile")
    parser.add_argument("--only", default="", help="specialisations whose line contains this")
    parser.add_argument("--limit", type=int, default=0, help="compile this many at most")
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--quiet", action="store_true", help="only what does not fit, and totals")
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.operators:
        for architecture in arguments.architectures:
            failed += _report(name, architecture, arguments)
    print(f"{failed} do not fit")
    return int(failed > 0)


def _report(name: str, architecture: int, arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    told = (lambda _: None) if arguments.quiet else (lambda text: print("  ", text, flush=True))
    found, _ = walk(ops.get(name, "cuda"), arguments.levels, architecture, told)
    seconds = time.perf_counter() - start
    print(f"{name} sm_{architecture}: {len(found)} specialisations, walked in {seconds:.0f} s")
    chosen = [each for each in found.values() if arguments.only in each.label]
    if arguments.list:
        for each in chosen:
            print(f"   {each.label}  <- {each.where[0]}")
        return 0
    failed, results = 0, []
    for each in chosen[: arguments.limit or None]:
        try:
            done = compiled(each, architecture, arguments.cache)
        except Exception as error:
            failed += 1
            print(
                f"   {each.label}  <- {each.where[0]}: {type(error).__name__}: {str(error)[:300]}", flush=True
            )
            continue
        results.append(done)
        failed += not done.fits(architecture)
        if not arguments.quiet or not done.fits(architecture):
            usage = f"{done.registers} registers {done.spills} spills {done.shared} B {done.seconds:.1f} s"
            print(
                f"   {usage} {each.label}{'' if done.fits(architecture) else '  <- does not fit'}", flush=True
            )
    if results:
        print(
            f"{name} sm_{architecture}: {len(results)} compiled in {sum(r.seconds for r in results):.0f} s, "
            f"at most {max(r.registers for r in results)} registers, {max(r.shared for r in results)} B, "
            f"{sum(r.spills > 0 for r in results)} spill"
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
