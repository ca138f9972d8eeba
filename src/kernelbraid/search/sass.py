"""The machine code of compiled kernels: which instructions multiply matrices and how wide memory is read.

Triton brings NVIDIA's disassembler; it needs no GPU.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SECONDS = 60.0
"""Limit for one kernel."""
WARP_GROUP = ("HGMMA", "QGMMA", "IGMMA", "WGMMA")
"""Matrix products of a warp group, operands in shared memory: sm_90 alone."""
WARP = ("HMMA", "QMMA", "IMMA", "DMMA")
"""Matrix products of a warp (`mma.sync`)."""
LOADS = ("LDG", "LDGSTS")
"""Loads from global memory, into registers or shared memory."""

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_TARGET = re.compile(r"EF_CUDA_SM(\d+)|\.target\s+sm_(\d+)")


@dataclass(frozen=True, slots=True)
class Mix:
    """Instructions of one kernel, counted where they stand and not how often they run."""

    architecture: str
    """Such as `sm_90`."""
    warp_group_products: int
    warp_products: int
    loads: tuple[tuple[int, int], ...]
    """(bits a thread, instructions), widest first; copies by the tensor memory accelerator are none."""
    bulk_copies: int
    """Copies by the tensor memory accelerator (UBLKCP, UTMALDG)."""
    total: int

    @property
    def narrow_share(self) -> float:
        """Share of the global loads that read less than 64 bits a thread."""
        count = sum(each for _, each in self.loads)
        return sum(each for bits, each in self.loads if bits < 64) / count if count else 0.0


def mix(cubin: bytes) -> Mix:
    """Count the instructions of a compiled kernel.

    Raises:
        RuntimeError: the disassembler is not installed, or does not read these bytes.
    """
    return counted(disassembled(cubin))


def disassembled(cubin: bytes) -> str:
    """Return the machine code as text; raises as `mix` does."""
    program = disassembler()
    if program is None:
        raise RuntimeError("no disassembler: triton brings one (pip install 'kernelbraid[gpu]')")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            ended = subprocess.run(
                [str(program), "-hex", file.name], capture_output=True, text=True, timeout=SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"the disassembler did not end well: {error}") from error
    if ended.returncode != 0:
        last = ended.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise RuntimeError(f"the disassembler refuses the kernel: {last[0]}")
    return ended.stdout


def counted(text: str) -> Mix:
    """Count the instructions of disassembled code."""
    found = _TARGET.search(text)
    names = Counter(_INSTRUCTION.findall(text))
    widths: Counter[int] = Counter()
    products: Counter[bool] = Counter()
    bulk = 0
    for name, count in names.items():
        operation, *modifiers = name.split(".")
        if operation in LOADS:
            widths[_bits(modifiers)] += count
        elif operation in WARP_GROUP or operation in WARP:
            products[operation in WARP_GROUP] += count
        elif operation in ("UBLKCP", "UTMALDG"):
            bulk += count
    number = next((each for each in found.groups() if each), "") if found else ""
    return Mix(
        architecture=f"sm_{number}" if number else "",
        warp_group_products=products[True],
        warp_products=products[False],
        loads=tuple(sorted(widths.items(), reverse=True)),
        bulk_copies=bulk,
        total=sum(names.values()),
    )


def _bits(modifiers: list[str]) -> int:
    """Width of a load by its modifiers; 32 where none says another."""
    for each in modifiers:
        if each in ("64", "128"):
            return int(each)
        if each in ("U8", "S8"):
            return 8
        if each in ("U16", "S16"):
            return 16
    return 32


@cache
def disassembler() -> Path | None:
    """Where `nvdisasm` is; None where triton is not installed or brings none."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return path if path.is_file() else None


def cubin_of(folder: Path, name: str, digest: str) -> bytes | None:
    """Find a kernel among compiled code: by its name and the first digits of its hash, as audits list them.

    Args:
        folder: of compiled code.
        name: of the kernel's function.
        digest: at least eight hexadecimal digits.
    """
    for about in _described(folder, name):
        if f'"hash": "{digest}' in about.read_text(encoding="utf-8", errors="replace"):
            cubin = about.with_suffix(".cubin")
            return cubin.read_bytes() if cubin.is_file() else None
    return None


def _described(folder: Path, name: str) -> Iterator[Path]:
    if folder.is_dir():
        yield from (each for each in folder.rglob(f"{name}.json") if each.is_file())
