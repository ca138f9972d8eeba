"""The Triton kernels of log-probabilities and sampling without a GPU: interpreted, and compiled for GPUs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton compiles the GPU kernels; it is part of the extra dev")

from kernelbraid.ops.logprob import gpu as head  # noqa: E402
from kernelbraid.ops.sample import gpu as sampling  # noqa: E402

SCRIPT = Path(__file__).with_name("interpreted_head.py")
WIDTH, VOCABULARY = 4096, 151936
TILE = {"H": WIDTH, "V": VOCABULARY, "BV": 128, "TOGETHER": 8}
ROWS = {"BT": 128, "BK": 64, "SWAP": False}
ARITHMETIC = re.compile(r"\b((?:add|sub|mul|fma|div|rcp|sqrt)(?:\.\w+)*\.f(?:32|64)(?:x2)?)\b")


@pytest.mark.slow
def test_kernels_do_what_they_say_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    held = json.loads(done.stdout)
    assert len(held) == 17 and all(held.values()), [name for name, value in held.items() if not value]


def types_of(kernel, constants):
    """Types of a kernel's arguments, by their names."""
    found = {}
    for name in kernel.arg_names:
        if name in constants:
            found[name] = "constexpr"
        elif name in ("X", "WEIGHT", "G", "DX"):
            found[name] = "*bf16"
        elif name in ("TARGETS", "TOP_K", "SAMPLES", "POSITIONS", "TOKENS"):
            found[name] = "*i32"
        elif name == "SEEDS":
            found[name] = "*i64"
        elif name.isupper():
            found[name] = "*fp32"
        else:
            found[name] = "fp32" if name == "scale" else "i32"
    return found


def compiled(kernel, architecture, warps, constants):
    types = types_of(kernel, constants)
    aligned = [
        i
        for i, name in enumerate(kernel.arg_names)
        if types[name][0] == "*" or (name[:1] == "s" and "_" in name)
    ]
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    options = {"num_warps": warps, "num_stages": 3, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


KERNELS = {
    "prefill": (head.logprob_kernel, 8, TILE | ROWS),
    "decode": (head.logprob_kernel, 4, TILE | {"BT": 16, "BK": 128, "SWAP": True}),
    "logits": (head.logits_kernel, 8, TILE | ROWS),
    "gradients": (head.logits_backward_kernel, 8, TILE | {"BT": 128, "BK": 64, "HAS_ENTROPY": True}),
    "dx": (
        head.dx_kernel,
        8,
        {"H": WIDTH, "V": VOCABULARY, "BT": 128, "BH": 128, "BK": 64, "SPAN": 2048, "TOGETHER": 8},
    ),
    "dweight": (head.dweight_kernel, 8, TILE | {"BH": 128, "BK": 64, "ACCUMULATE": True}),
    "merge": (
        head.merge_kernel,
        8,
        {"BLOCKS": 1187, "V": VOCABULARY, "R": 2, "W": 2048, "HAS_ENTROPY": True},
    ),
    "sample": (sampling.sample_kernel, 16, {"V": VOCABULARY, "B": 2048}),
}


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_fit_and_fuse_nothing(name, architecture):
    kernel, warps, constants = KERNELS[name]
    done = compiled(kernel, architecture, warps, constants)
    assert done.metadata.shared <= {80: 163, 90: 227}[architecture] * 1024
    arithmetic = set(ARITHMETIC.findall(done.asm["ptx"]))
    # an operation that says how it rounds is never contracted; log2's polynomial alone flushes denormals
    assert all(".rn" in each for each in arithmetic), arithmetic
    assert {each for each in arithmetic if "ftz" in each} <= {"fma.rn.ftz.f32"}
    assert set(re.findall(r"\b(ex2\.\S+|lg2\.\S+)", done.asm["ptx"])) <= {"ex2.approx.ftz.f32"}
