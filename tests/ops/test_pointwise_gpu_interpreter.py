"""The Triton kernels of SwiGLU and embedding without a GPU: every regime, bit for bit, in the interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton interprets the GPU kernels; it is part of the extra dev")

SCRIPT = Path(__file__).with_name("interpreted_pointwise.py")
ROUNDED = {"float16": 5e-4, "bfloat16": 4e-3}


def interpreted(*arguments):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert all(compared >= 300 and not unequal for compared, unequal in found["compared"].values()), found
    return found["distance"]


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "normal"), ("float16", "saturated")])
def test_swiglu(dtype, kind):
    distance = interpreted("swiglu", dtype, kind)
    assert set(distance) == {"out", "dgate", "dup"}
    assert all(error < ROUNDED[dtype] for error in distance.values()), distance


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "heavy_tailed"), ("float16", "denormals")])
def test_embedding(dtype, kind):
    distance = interpreted("embedding", dtype, kind)
    assert distance["out"] == 0 and distance["dweight"] < 1e-6
