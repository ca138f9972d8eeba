"""The structure of the Triton kernels without a GPU: every regime, bit for bit, in Triton's interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton interprets the GPU kernels; it is part of the extra dev")

SCRIPT = Path(__file__).with_name("interpreted.py")
ACCURACY = {"float16": 6e-4, "bfloat16": 5e-3}


def interpreted(*arguments: str):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dtype"), [("80", "float16"), ("90", "bfloat16")])
def test_regimes_agree_and_are_accurate(architecture, dtype):
    found = interpreted(architecture, dtype)
    assert len(found["compared"]) == 12
    assert all(compared > 500 and not unequal for compared, unequal in found["compared"].values()), found
    assert set(found["distance"]) == {"out", "lse", "dq", "dk", "dv"}
    assert all(distance < ACCURACY[dtype] for distance in found["distance"].values()), found


@pytest.mark.parametrize("control", ["chunk", "block"])
def test_another_order_in_decode_is_seen(control):
    """The control of the test above: decode with other chunks, or blocks, than prefill."""
    found = interpreted("80", "bfloat16", control)["compared"]
    assert found and all(unequal for _, unequal in found.values()), found


def test_the_same_order_in_decode_agrees():
    found = interpreted("90", "bfloat16", "none")["compared"]
    assert len(found) == 2 and not any(unequal for _, unequal in found.values()), found
