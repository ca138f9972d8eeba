"""The Triton kernels of SwiGLU and embedding compiled for GPUs that are not here."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton compiles the GPU kernels; it is part of the extra dev")

from kernelbraid.ops.embedding import gpu as embedding
from kernelbraid.ops.swiglu import gpu as swiglu

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compile_gpu.py"
specification = importlib.util.spec_from_file_location("compile_gpu", SCRIPT)
compile_gpu = importlib.util.module_from_spec(specification)
sys.modules["compile_gpu"] = compile_gpu
specification.loader.exec_module(compile_gpu)

compile_gpu.POINTERS |= {torch.int16: "i16", torch.int64: "i64"}
KERNELS = {
    swiglu: ("swiglu_kernel", "swiglu_backward_kernel"),
    embedding: ("embedding_kernel", "keys_kernel", "counts_kernel", "embedding_backward_kernel"),
}
ARITHMETIC = re.compile(r"\b((?:add|sub|mul|fma|div|rcp|sqrt)(?:\.\w+)*\.f32(?:x2)?)\b")


class Recorder:
    """Stands for a kernel and records what it is launched with."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, num_warps=4, enable_fp_fusion=False, num_stages=3):
        each = compile_gpu._specialised(self.kernel, arguments, num_warps, num_stages, {})
        self.found[str((each.kernel.__name__, each.signature, each.constants, each.aligned, each.warps))] = (
            each
        )


def launched(monkeypatch, calls):
    """What some calls on tensors without storage would compile."""
    found = {}
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    calls()
    monkeypatch.undo()
    return list(found.values())


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def call_swiglu(tokens, width, dtype=torch.bfloat16):
    x, out = empty(tokens, 2 * width, dtype=dtype), empty(tokens, width, dtype=dtype)
    swiglu.swiglu(x[:, :width], x[:, width:], out)
    swiglu.swiglu_backward(x[:, :width], x[:, width:], out, x[:, :width], x[:, width:])


def call_embedding(tokens, width, dtype=torch.bfloat16, ids=torch.int64):
    numbers, table, out = (
        empty(tokens, dtype=ids),
        empty(1000, width, dtype=dtype),
        empty(tokens, width, dtype=dtype),
    )
    embedding.embedding(numbers, table, out)
    for gradient, accumulate in ((torch.float32, 0), (torch.float32, 1), (dtype, 0)):
        embedding.embedding_backward(numbers, None, out, empty(1000, width, dtype=gradient), accumulate)


def models():
    for tokens in (1, 8192):
        call_swiglu(tokens, 12288)
        call_embedding(tokens, 4096)
    call_swiglu(8192, 100, torch.float16)
    call_embedding(8192, 100, torch.float16, torch.int32)


@pytest.mark.parametrize(
    "architecture", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)]
)
def test_kernels_fit_and_fuse_nothing(architecture, monkeypatch):
    for each in launched(monkeypatch, models):
        done = compile_gpu.compile_for(each, architecture)
        if architecture < 100:
            assert not done.spills, f"sm_{architecture} {each.label}: {done.registers} registers, spills"
        arithmetic = set(ARITHMETIC.findall(done.ptx))
        assert all(".rn" in name for name in arithmetic) and not any("ftz" in name for name in arithmetic)
        assert any(name.startswith("fma") for name in arithmetic) == (
            each.kernel.__name__ == "swiglu_backward_kernel"
        )
        assert ("div.rn.f32" in arithmetic) == ("swiglu" in each.kernel.__name__)
        assert set(re.findall(r"\b(ex2\.\S+)", done.ptx)) <= {"ex2.approx.ftz.f32"}
        assert not re.search(r"\b(?:atom|red)\.", done.ptx)


def test_load_makes_no_specialisation(monkeypatch):
    """The schedule's edges, 1 and 8192 tokens and some between compile what any number of tokens launches."""

    def calls(numbers):
        for tokens in numbers:
            call_swiglu(tokens, 1024)
            call_embedding(tokens, 1024)

    def keys(numbers):
        found = launched(monkeypatch, lambda: calls(numbers))
        return {(e.kernel.__name__, e.signature, e.constants, e.aligned, e.warps) for e in found}

    assert keys((2, 3, 15, 17, 31, 77, 128, 131, 257, 999, 4096, 131072)) <= keys(
        (1, 64, 100, 8192, 33, 65, 132, 264)
    )
