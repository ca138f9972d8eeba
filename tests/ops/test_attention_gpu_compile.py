"""The Triton kernels compiled for GPUs that are not here: what fits, what is fused, what is specialised."""

import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton compiles the GPU kernels; it is part of the extra dev")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compile_gpu.py"
specification = importlib.util.spec_from_file_location("compile_gpu", SCRIPT)
compile_gpu = importlib.util.module_from_spec(specification)
sys.modules["compile_gpu"] = compile_gpu
specification.loader.exec_module(compile_gpu)

ARCHITECTURES = (80, 90, 100)
ARITHMETIC = re.compile(r"\b((?:add|sub|mul|fma|div|rcp|sqrt)(?:\.\w+)*\.f32(?:x2)?)\b")
REPRESENTATIVE = (
    "attention_merge_kernel D=128",
    "dq_kernel              D=128",
    "dkv_kernel             D=128",
    "write_cache_kernel     D=128",
)
"""Compiled by `make test`, with a decode and prefills of each architecture; `make test-all` compiles all."""


@triton.jit
def multiply_add(X, Y, B: triton.language.constexpr):
    """A product and a sum that fusion may contract."""
    o = triton.language.arange(0, B)
    x = triton.language.load(X + o)
    triton.language.store(Y + o, x * 1.5 + triton.language.load(Y + o))


def ptx(kernel, fused: bool) -> str:
    source = triton.compiler.ASTSource(
        fn=kernel, signature={"X": "*fp32", "Y": "*fp32", "B": "constexpr"}, constexprs={"B": 128}
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": fused}).asm["ptx"]


def test_fusion_is_what_the_option_says():
    """The control of the tests below: with Triton's default the same text is contracted."""
    assert "fma.rn.f32" in ptx(multiply_add, fused=True)
    assert "fma" not in ptx(multiply_add, fused=False)


def representative(architecture: int):
    found = compile_gpu.specialisations(architecture, pages=(16,), groups=(4,))
    chosen = [each for each in found if each.label.startswith(REPRESENTATIVE)]
    forward = [each for each in found if "fwd" in each.label and "D=128" in each.label]
    for wanted in ("SPLIT=1", "BM=128", "TMA=True" if architecture >= 90 else "BM=32"):
        chosen.append(next(each for each in forward if wanted in each.label))
    return chosen


def check(each, architecture: int) -> None:
    done = compile_gpu.compile_for(each, architecture)
    assert done.shared <= compile_gpu.SHARED[architecture], each.label
    if architecture < 100:
        assert not done.spills, f"sm_{architecture} {each.label}: {done.registers} registers, spills"
    arithmetic = set(ARITHMETIC.findall(done.ptx))
    # an operation that says how it rounds is never contracted; log2's polynomial alone flushes denormals
    assert all(".rn" in name for name in arithmetic), each.label
    assert {name for name in arithmetic if "ftz" in name} <= {"fma.rn.ftz.f32"}
    # NaNs are chosen after the conversion to 16 bits, which has a NaN of its own
    chosen = set(re.findall(r"selp\.f32\s+(%r\d+), [^;]*0f7FC00000", done.ptx))
    converted = re.findall(r"cvt\.rn\.b?f16(?:x2)?\.f32\s+[^,]+, ([^;]+);", done.ptx)
    assert not chosen & {name for operands in converted for name in operands.split(", ")}, each.label
    powers = set(re.findall(r"\b(ex2\.\S+|lg2\.\S+)", done.ptx))
    assert powers <= {"ex2.approx.ftz.f32"}, each.label
    if "merge" in each.label or ("fwd" in each.label and "SPLIT" not in each.label):
        assert "0f3DC6B27F" in done.ptx and "div.rn.f32" in arithmetic


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_representative_kernels_fit_and_fuse_nothing(architecture):
    for each in representative(architecture):
        check(each, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_fit_and_fuse_nothing(architecture):
    """One group of query heads and the page sizes that serve; `scripts/compile_gpu.py` compiles them all."""
    pages = (1, 16, 64) if architecture < 100 else (16,)
    for each in compile_gpu.specialisations(architecture, pages=pages, groups=(4,)):
        check(each, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_load_makes_no_specialisation(architecture, monkeypatch):
    """Random batches, lengths and contexts launch nothing that the listed shapes do not."""
    known = {key(each) for each in compile_gpu.specialisations(architecture)}
    rng = random.Random(architecture)
    shapes = [
        (
            rng.choice((1, 2, 5, 17, 64, 300, 1024)),
            rng.choice((1, 2, 15, 16, 17, 100, 333)),
            rng.randint(1, 9999),
        )
        for _ in range(60)
    ]
    monkeypatch.setattr(compile_gpu, "SHAPES", [(b, r, max(r, n)) for b, r, n in shapes])
    found = {key(each) for each in compile_gpu.specialisations(architecture)}
    assert found <= known


def key(each):
    """What a specialisation is compiled from, head counts apart."""
    constants = {n: v for n, v in each.constants if n not in ("HQ", "HK", "G")}
    constants["PACK"] = constants.get("PACK", 1) > 1
    return each.kernel.__name__, each.signature, tuple(constants.items()), each.warps, each.stages


def test_spills_are_seen():
    """A tile too large for its warps: the control of the tests above."""
    each = next(e for e in compile_gpu.specialisations(80, pages=(16,)) if "BM=128" in e.label)
    tight = compile_gpu.Specialisation(
        each.kernel, each.signature, each.constants, each.aligned, 4, each.stages, ()
    )
    assert not compile_gpu.compile_for(tight, 80).fits(80)
