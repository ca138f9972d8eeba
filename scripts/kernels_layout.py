"""Write the operators as a project of huggingface/kernels: what kernel-builder builds and publishes.

    python scripts/kernels_layout.py OUT --repo-id ORGANISATION/kernelbraid-ops
    python scripts/kernels_layout.py OUT --local cpu

Written from the package as it is: sources are taken with their imports made relative, operators register
under the namespace that kernel-builder gives them, and nothing but torch, numpy and triton is imported.
`--local` adds a build variant as kernel-builder would lay it out, for `kernels.get_local_kernel`; with `cpu`
it holds the Numba implementations, whose dependencies kernel-builder does not allow: for tests alone.
docs/publishing.md says what to do with it.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "kernelbraid"
NAME = "kernelbraid-ops"
MODULE = "kernelbraid_ops"
VERSION = 0
"""Of the kernel's interface; 0 is for those that may still change."""
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
LEFT_OUT = ("reference.py", "peers.py", "peers_gpu.py", "oracle.py")
"""Needed to judge an operator, not to call it."""
IMPLEMENTATIONS = {"cuda": ("gpu.py", "gpu_sm90.py"), "cpu": ("cpu.py",)}

FORMATS = '''"""Floating-point formats; two bytes, which nothing here reads, stand for bfloat16 in numpy."""

from typing import Any

import numpy as np

BFLOAT16: np.dtype[Any] = np.dtype("V2")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether the elements are floating-point numbers, bfloat16 included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def information(dtype: np.dtype[Any]) -> Any:
    """`finfo` of a floating-point dtype."""
    return np.finfo(dtype)


def bits_type(dtype: np.dtype[Any]) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integer type as wide as `dtype`."""
    return np.dtype(f"u{dtype.itemsize}")
'''
INSTALLED = '''"""A published kernel has no promoted implementations: those are of `kernelbraid`."""

from typing import Any


def cpu_model() -> str:
    """Not asked for here."""
    return ""


def read(operator: str, architecture: str, model: str) -> Any:
    """None: the shipped implementation is the one."""
    return None


def load(found: Any, operator: str) -> Any:
    """Never called."""
    raise RuntimeError(f"{operator} has no installed implementation in a published kernel")
'''
REPLACED = {"ops/formats.py": FORMATS, "ops/installed.py": INSTALLED}
"""Files whose dependencies kernel-builder does not allow, and what stands for them."""

FLAKE = """{
  description = "KernelBraid's operators";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
OPS = '''"""The namespace of this build's operators; kernel-builder writes its own."""

import torch

_OPS_NAME = "{identifier}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{{_OPS_NAME}}::{{op_name}}"
'''
CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernel
- reinforcement-learning
- reproducibility
---

# KernelBraid's operators

Operators of decoder-only language models whose bits agree between rollout (prefill, chunked prefill, decode
on a paged cache) and policy update (packed forward). Each follows a numerical contract that fixes every
rounding and the order of every sum.

```python
from kernels import get_kernel

# trust_remote_code=True unless the publisher is a trusted one
ops = get_kernel("{{ repo_id }}", version={{ version }})
out = ops.attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
```

Triton, on NVIDIA GPUs of compute capability 8.0 and newer; bfloat16 and float16. What a contract does not
cover is refused with a `ValueError` that names the argument. This card claims no certificate: certificates
are issued for one source on one machine, by the audit of the package `kernelbraid`.

## Functions

@FUNCTIONS@
"""
TEST = '''"""Packed, paged and alone: one set of bits."""

import pytest
import torch

import @MODULE@ as ops

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
LENGTHS = (33, 1, 17)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(sum(LENGTHS), heads, 64, generator=generator) for heads in (4, 2, 2)]
    q, k, v = (x.to(DEVICE, DTYPE) for x in made)
    return q, k, v


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


@pytest.mark.kernels_ci
def test_packed_is_alone() -> None:
    q, k, v = drawn()
    packed = ops.attention(q, k, v, cu_seqlens=offsets(*LENGTHS), max_seqlen=max(LENGTHS))
    begin = 0
    for length in LENGTHS:
        own = slice(begin, begin + length)
        alone = ops.attention(q[own], k[own], v[own], cu_seqlens=offsets(length), max_seqlen=length)
        assert torch.equal(bits(packed[own]), bits(alone))
        begin += length


@pytest.mark.kernels_ci
def test_decode_is_packed() -> None:
    q, k, v = (x[:33] for x in drawn())
    packed = ops.attention(q, k, v, cu_seqlens=offsets(33), max_seqlen=33)
    caches = [torch.zeros(3, 16, 2, 64, dtype=DTYPE, device=DEVICE) for _ in "kv"]
    for cache, x in zip(caches, (k, v), strict=True):
        cache.view(48, 2, 64)[:33] = x
    found = ops.paged_attention(
        q[32:],
        *caches,
        page_table=torch.arange(3, dtype=torch.int32, device=DEVICE)[None],
        cu_seqlens_q=offsets(1),
        seqlens_k=torch.tensor([33], dtype=torch.int32, device=DEVICE),
        max_seqlen_q=1,
        max_seqlen_k=33,
    )
    assert torch.equal(bits(found), bits(packed[32:]))
'''
CONFTEST = """def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "kernels_ci: run by the CI of huggingface/kernels")
"""


def functions() -> dict[str, str]:
    """The public functions of operators, and the modules that they come from."""
    from kernelbraid import _HOMES

    return {
        name: home.removeprefix("kernelbraid.")
        for name, home in sorted(_HOMES.items())
        if home.startswith("kernelbraid.ops.")
    }


def relative(text: str, depth: int) -> str:
    """A source with imports relative to a package `depth` folders above, and that package's namespace.

    Raises:
        ValueError: it names the package in a way that this does not understand.
    """
    dots = "." * (depth + 1)
    text = re.sub(r"(?m)^(\s*)from kernelbraid(?:\.([\w.]+))? import", rf"\1from {dots}\2 import", text)
    text = re.sub(r'import_module\(f"kernelbraid\.ops\.', 'import_module(f"{__package__}.', text)
    text = re.sub(r'files\("kernelbraid\.ops(?:\.\w+)?"\)', "files(__package__)", text)
    text, registered = re.subn(
        r'custom_op\("kernelbraid::(\w+)"', r'custom_op(add_op_namespace_prefix("\1")', text
    )
    if registered:
        text = text.replace(
            "\nimport torch\n", f"\nimport torch\n\nfrom {dots}_ops import add_op_namespace_prefix\n", 1
        )
    if found := re.search(r"(?m)^\s*(from|import) kernelbraid|[\"']kernelbraid[.:]", text):
        raise ValueError(f"a source names the package where it cannot be made relative: {found[0]!r}")
    return text


def sources(backend: str) -> Iterator[tuple[str, str]]:
    """Files of the kernel's Python package and their texts, for a backend."""
    others = {file for name, files in IMPLEMENTATIONS.items() if name != backend for file in files}
    for path in (SRC / "contract.py", *sorted((SRC / "ops").rglob("*.py"))):
        name = path.relative_to(SRC).as_posix()
        if path.name not in others and path.name not in LEFT_OUT:
            yield name, REPLACED.get(name) or relative(path.read_text(), name.count("/"))
    exported = functions()
    lines = [f"from .{home} import {name}" for name, home in exported.items()]
    listed = "".join(f'    "{name}",\n' for name in exported)
    head = '"""Operators whose bits agree between rollout and policy update."""'
    yield "__init__.py", "\n".join([head, "", *lines, "", f"__all__ = [\n{listed}]", ""])


def build_file(backend: str, repo_id: str) -> str:
    lines = [
        "[general]",
        f'name = "{NAME}"',
        f"version = {VERSION}",
        "edition = 5",
        'license = "Apache-2.0"',
        f'backends = ["{backend}"]',
        "",
        "[general.hub]",
        f'repo-id = "{repo_id}"',
        "",
        "[torch-noarch]",
    ]
    if backend == "cuda":
        lines.append(f"cuda-capabilities = {json.dumps(CAPABILITIES)}")
    return "\n".join(lines) + "\n"


def project(backend: str, repo_id: str) -> dict[str, str]:
    """Every file of the layout, by its path."""
    package = dict(sources(backend))
    listed = "\n".join(f"- `{name}`" for name in functions())
    return {
        "build.toml": build_file(backend, repo_id),
        "flake.nix": FLAKE,
        "CARD.md": CARD.replace("@FUNCTIONS@", listed),
        "LICENSE": (ROOT / "LICENSE").read_text(),
        "tests/__init__.py": "",
        "tests/conftest.py": CONFTEST,
        "tests/test_bits.py": TEST.replace("@MODULE@", MODULE),
        **{f"torch-ext/{MODULE}/{name}": text for name, text in package.items()},
    }


def variant(backend: str) -> dict[str, str]:
    """A build variant as kernel-builder lays it out, by paths below OUT."""
    package = dict(sources(backend))
    unique = hashlib.sha256("".join(f"{k}\0{v}\0" for k, v in sorted(package.items())).encode()).hexdigest()[
        :7
    ]
    identifier = f"_{MODULE}_{backend}_{unique}"
    package["_ops.py"] = OPS.format(identifier=identifier)
    digests = {
        name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for name, text in package.items()
    }
    stated: dict[str, object] = {"type": backend}
    if backend == "cuda":
        stated["archs"] = list(CAPABILITIES)
    metadata = {
        "name": NAME,
        "id": identifier,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": stated,
        "digest": {"algorithm": "sha256", "files": digests},
    }
    package["metadata.json"] = json.dumps(metadata, indent=2) + "\n"
    return {f"build/torch-{backend}/{name}": text for name, text in package.items()}


def write(out: Path, files: dict[str, str]) -> None:
    """Write a folder that does not exist yet, whole or not at all.

    Raises:
        ValueError: it exists.
    """
    if out.exists():
        raise ValueError(f"OUT must not exist yet: {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        for name, text in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        made.chmod(0o755)
        os.rename(made, out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    parser.add_argument("--repo-id", default=f"kernelbraid/{NAME}", help="where it is to be published")
    parser.add_argument(
        "--local", choices=sorted(IMPLEMENTATIONS), help="also a build variant for this backend"
    )
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given.repo_id):
        print(f"--repo-id must be ORGANISATION/NAME, got {given.repo_id!r}", file=sys.stderr)
        return 2
    files = project("cuda", given.repo_id)
    if given.local:
        files |= variant(given.local)
    try:
        write(given.out.resolve(), files)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(files)} files in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
