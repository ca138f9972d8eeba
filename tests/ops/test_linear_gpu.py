"""The linear layer's Triton kernels without a GPU: bits in Triton's interpreter, and what is compiled."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton compiles the GPU kernels; it is part of the extra dev")

from tests.ops.test_attention_gpu_compile import check, compile_gpu

from kernelbraid.ops.linear import gpu

SCRIPT = Path(__file__).with_name("interpreted_linear.py")
ROWS = (1, 20, 64, 96, 300, 8192)
LAYERS = ((1024, 4096), (4096, 24576), (100, 70))


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [pytest.param("80", "float16", marks=pytest.mark.slow), ("90", "bfloat16")],
)
def test_every_schedule_gives_the_same_bits(architecture, dtype):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), architecture, dtype], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert all(compared > 500 and not unequal for compared, unequal in found["compared"].values()), found
    assert len(found["compared"]) == 54
    assert set(found["distance"]) == {"out", "dx", "dweight", "dbias"}
    assert all(distance < 2.5e-3 for distance in found["distance"].values())


def recorded(architecture):
    """Label -> specialisations that calls of ROWS and LAYERS launch, in bfloat16."""
    specification = importlib.util.spec_from_file_location(f"linear_sm_{architecture}", gpu.__file__)
    loaded = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loaded)
    loaded.architecture_of = lambda _: architecture
    found = {}

    def record(kernel, programs, warps, stages, *arguments, **options):
        each = compile_gpu._specialised(kernel, arguments, warps, stages, options)
        values = dict(each.constants)
        shown = ("WHICH", "GROUPS", "EVEN", "HAS_BIAS", "ADD", "I", "J", "R", "SWAP", "BULK", "STAY")
        label = " ".join(f"{name}={values[name]}" for name in shown if name in values)
        found.setdefault((kernel.__name__, label, each.signature, each.aligned), each)

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    loaded.launch = record
    for inputs, outputs in LAYERS:
        weight, total = empty(outputs, inputs), empty(outputs, inputs, dtype=torch.float32)
        bias, sums = empty(outputs), empty(outputs, dtype=torch.float32)
        for tokens in ROWS:
            x, out = empty(tokens, inputs), empty(tokens, outputs)
            for groups in (1, 4) if inputs == 1024 else (1,):
                loaded.K_GROUPS = loaded.N_GROUPS = groups
                loaded.linear(x, weight, bias if inputs == 100 else None, out)
                loaded.linear_backward(x, weight, out, x, total, sums, 1)
                loaded.linear_backward(x, weight, out, None, weight, None, 0)
    return {
        f"{name} {label} {number}": each for number, ((name, label, *_), each) in enumerate(found.items())
    }


REPRESENTATIVE = (
    "WHICH=0 GROUPS=1 EVEN=True HAS_BIAS=False ADD=False I=16 J=64",
    "WHICH=0 GROUPS=4 EVEN=True",
    "WHICH=2 GROUPS=1 EVEN=False HAS_BIAS=False ADD=True I=128",
    "add_rows_kernel",
)
"""Compiled by `make test`; `make test-all` compiles all."""


@pytest.mark.parametrize("architecture", [80, 90])
def test_representative_kernels_fit_and_fuse_nothing(architecture):
    found = recorded(architecture)
    for wanted in REPRESENTATIVE:
        check(next(each for label, each in found.items() if wanted in label), architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_all_kernels_fit_and_fuse_nothing(architecture):
    for each in recorded(architecture).values():
        check(each, architecture)


def test_load_chooses_schedules_that_calls_launch():
    """`schedule` answers for every size, and its edges are those of the rows."""
    knobs = gpu.chosen_knobs()
    axes = {"in_features": 4096, "out_features": 6144, "bias": 0}
    answers = [gpu.schedule({**axes, "tokens": tokens}, knobs) for tokens in (0, 1, 16, 17, 64, 65, 131072)]
    assert answers[1] == answers[2] != answers[3] and answers[4] != answers[5]
    assert {each["out_height"] for each in answers} >= {16, 32, 64, 128}
