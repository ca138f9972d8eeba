"""Compile attention's Triton kernels for named architectures, without a GPU: registers, spills, memory.

    python scripts/compile_gpu.py 80 90 100           every specialisation that the schedule chooses
    python scripts/compile_gpu.py 90 --only merge     those whose line contains a word

The entry points run on tensors without data and their launches are recorded instead of made, so that what is
compiled is what would be launched. Ends with exit code 1 if one spills or asks for more shared memory than
the architecture has.
"""

import argparse
import importlib.util
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

SOURCE = Path(__file__).resolve().parent.parent / "src" / "kernelbraid" / "ops" / "attention" / "gpu.py"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED = {80: 166912, 90: 232448, 100: 232448}
"""Bytes of shared memory that a program may have."""
POINTERS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
SHOWN = ("D", "BM", "BN", "PACK", "PAGE", "TMA", "SPLIT", "SWAP")
GROUPS = (1, 4, 8)
PAGES = (1, 7, 16, 64, 256)
SHAPES = tuple(
    (batch, rows, keys)
    for batch in (1, 8, 200)
    for rows in (1, 3, 6, 12, 20, 40, 100, 512)
    for keys in (200, 600, 5000, 131072)
    if rows <= keys
)
"""Batch, query length and key length of the calls that are compiled: both sides of every choice."""


@dataclass(frozen=True)
class Specialisation:
    """A kernel with all that it is compiled from."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    """Places of the arguments that are multiples of 16."""
    warps: int
    stages: int
    options: tuple[tuple[str, Any], ...]

    @property
    def label(self) -> str:
        constants = dict(self.constants)
        shown = " ".join(f"{n}={constants[n]}" for n in SHOWN if constants.get(n) not in (None, False, 0))
        return f"{self.kernel.__name__:22s} {shown}"


@dataclass(frozen=True)
class Compiled:
    """What became of a specialisation."""

    registers: int
    spills: int
    shared: int
    ptx: str

    def fits(self, architecture: int) -> bool:
        return not self.spills and self.shared <= SHARED[architecture]


def module(architecture: int) -> Any:
    """The implementation as a module of its own that believes to be on `architecture`."""
    specification = importlib.util.spec_from_file_location(f"attention_sm_{architecture}", SOURCE)
    assert specification is not None and specification.loader is not None
    loaded = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loaded)
    loaded.architecture_of = lambda _: architecture
    return loaded


def specialisations(
    architecture: int,
    *,
    pages: tuple[int, ...] = PAGES,
    groups: tuple[int, ...] = GROUPS,
) -> tuple[Specialisation, ...]:
    """Every specialisation that calls of all shapes launch, in bfloat16, in the order of first calls."""
    loaded = module(architecture)
    found: dict[tuple[Any, ...], Specialisation] = {}

    def record(kernel: Any, _: int, warps: int, stages: int, *arguments: Any, **options: Any) -> None:
        each = _specialised(kernel, arguments, warps, stages, options)
        # Head counts alone make no other code.
        key = (kernel, each.signature, warps, stages)
        key += tuple(item for item in each.constants if item[0] not in ("HQ", "HK", "G"))
        if any(name == "PACK" and value > 1 for name, value in each.constants):
            key = tuple(item for item in key if not (isinstance(item, tuple) and item[0] == "PACK"))
        found.setdefault(key, each)

    loaded.launch = record
    for depth, group in itertools.product((128, 64), groups):
        for batch, rows, keys in SHAPES:
            _calls(loaded, depth, group, batch, rows, keys, pages)
    return tuple(found.values())


def _calls(
    loaded: Any, depth: int, group: int, batch: int, rows: int, keys: int, pages: tuple[int, ...]
) -> None:
    """Every entry point once, on tensors without data."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    kv_heads, total = 8, batch * rows
    q, k = empty(total, kv_heads * group, depth), empty(total, kv_heads, depth)
    lse, offsets = empty(kv_heads * group, total, dtype=torch.float32), empty(batch + 1, dtype=torch.int32)
    scale = depth**-0.5
    loaded.attention(q, k, k, offsets, rows, scale, q, lse)
    loaded.attention_backward(q, k, k, q, lse, q, offsets, rows, scale, q, k, k)
    # no descriptors: keys that are not multiples of 16 bytes apart
    wide = empty(total, kv_heads, depth + 4)[..., :depth]
    loaded.attention(q, wide, wide, offsets, rows, scale, q, lse)
    lengths = empty(batch, dtype=torch.int32)
    for page in pages:
        cache = empty(64, page, kv_heads, depth)
        table = empty(batch, -(-keys // page), dtype=torch.int32)
        loaded.write_kv_cache(k, k, cache, cache, table, offsets, lengths)
        loaded.paged_attention(q, cache, cache, table, offsets, lengths, rows, keys, scale, q, lse)


def _specialised(
    kernel: Any, arguments: tuple[Any, ...], warps: int, stages: int, options: Mapping[str, Any]
) -> Specialisation:
    signature, constants, aligned = [], [], []
    for place, (parameter, argument) in enumerate(zip(kernel.params, arguments, strict=True)):
        kind = "constexpr" if parameter.is_constexpr else _kind(argument)
        if isinstance(argument, torch.Tensor) or (
            kind == "i32" and not parameter.do_not_specialize and argument % 16 == 0
        ):
            aligned.append(place)
        elif kind == "i32" and not parameter.do_not_specialize and argument == 1:
            kind = "constexpr"
        if kind == "constexpr":
            constants.append((parameter.name, argument))
        signature.append((parameter.name, kind))
    kept = tuple(item for item in options.items() if item[0] != "launch_pdl")
    return Specialisation(kernel, tuple(signature), tuple(constants), tuple(aligned), warps, stages, kept)


def _kind(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return "*" + POINTERS[argument.dtype]
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{POINTERS[argument.base.dtype]}{list(argument.block_shape)}>".replace(" ", "")
    return "fp32" if isinstance(argument, float) else "i32"


def compile_for(each: Specialisation, architecture: int) -> Compiled:
    """Compile a specialisation for an architecture."""
    source = ASTSource(
        fn=each.kernel,
        signature=dict(each.signature),
        constexprs=dict(each.constants),
        attrs={(place,): [["tt.divisibility", 16]] for place in each.aligned},
    )
    options = {
        "num_warps": each.warps,
        "num_stages": each.stages,
        "enable_fp_fusion": False,
        **dict(each.options),
    }
    done = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(done.asm["cubin"])
        usage, machine = (
            subprocess.run([CUOBJDUMP, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None:
        raise RuntimeError(f"cuobjdump reports no registers for {each.label}: {usage[-300:]}")
    spills = len(re.findall(r"\b(?:STL|LDL)\b", machine))
    return Compiled(int(registers[1]), spills, int(done.metadata.shared), done.asm["ptx"])


def table(architectures: list[int], only: str, pages: tuple[int, ...]) -> Iterator[tuple[str, bool]]:
    """A line for each specialisation, and whether it fits."""
    for architecture in architectures:
        for each in specialisations(architecture, pages=pages):
            if only not in each.label:
                continue
            done = compile_for(each, architecture)
            usage = f"{done.registers:3d} registers {done.spills:3d} spills {done.shared:6d} B shared"
            yield f"sm_{architecture} {each.label:62s} {each.warps} warps {usage}", done.fits(architecture)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("architectures", nargs="+", type=int, choices=sorted(SHARED))
    parser.add_argument("--only", default="", help="specialisations whose line contains this")
    parser.add_argument("--pages", nargs="+", type=int, default=PAGES, help="page sizes")
    arguments = parser.parse_args()
    failed = 0
    for line, fits in table(arguments.architectures, arguments.only, tuple(arguments.pages)):
        print(line, "" if fits else "  <- does not fit", flush=True)
        failed += not fits
    print(f"{failed} do not fit")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
