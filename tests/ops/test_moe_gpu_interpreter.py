"""The Triton kernels of router and experts without a GPU: all regimes, bit for bit, in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton interprets the GPU kernels; it is part of the extra dev")

SCRIPT = Path(__file__).with_name("interpreted_rows.py")
ROOT = SCRIPT.parents[2]
ROUTER = ("experts=20", "top_k=5")
CASES = [
    ("moe_router", "bfloat16", "cancelling", *ROUTER, "sigmoid=0", "renormalize=1"),
    ("moe_router", "bfloat16", "normal", *ROUTER, "sigmoid=0", "renormalize=0"),
    ("moe_router", "float16", "saturated", *ROUTER, "sigmoid=1", "renormalize=1"),
    ("moe_router", "float16", "non_finite", *ROUTER, "sigmoid=1", "renormalize=0"),
    ("moe_experts", "bfloat16", "saturated", "width=40", "intermediate=24", "experts=5", "top_k=3"),
    ("moe_experts", "float16", "heavy_tailed", "width=33", "intermediate=20", "experts=2", "top_k=1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_regimes_agree_and_are_accurate(arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    path = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=os.environ | path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert all(compared and not unequal for compared, unequal in found["compared"].values()), found
    assert bool(found["distance"]) == (arguments[2] != "non_finite")
    assert all(distance < 5e-3 for distance in found["distance"].values()), found
    assert found["distance"].get("experts", 0) == 0
