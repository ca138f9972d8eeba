"""The structure of Triton kernels of operators on rows without a GPU, in Triton's interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton interprets the GPU kernels; it is part of the extra dev")

SCRIPT = Path(__file__).with_name("interpreted_norms.py")
ACCURACY = {"float16": 6e-4, "bfloat16": 5e-3}
OPERATORS = ("add_rms_norm", "qk_norm", "rope", "qk_norm_rope_cache")


def interpreted(*arguments: str):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert all(compared > 500 and not unequal for compared, unequal in found["compared"].values()), found
    return found


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_regimes_agree_and_are_accurate(name, dtype):
    found = interpreted(name, dtype)
    assert len(found["compared"]) >= 4 and found["distance"]
    assert all(distance < ACCURACY[dtype] for distance in found["distance"].values()), found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_fused_step_has_the_bits_of_its_operators(dtype):
    assert set(interpreted("fused", dtype)["compared"]) == {"norm 0", "norm 1"}
