"""What audits and benchmarks would launch on a GPU, walked without one; a sample of it compiled."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton compiles the GPU kernels; it is part of the extra dev")

from kernelbraid import ops
from kernelbraid.audit.verify import scopes_of
from kernelbraid.ir.evidence import Level
from kernelbraid.ops.linear import gpu as linear

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "dry_gpu.py"
specification = importlib.util.spec_from_file_location("dry_gpu", SCRIPT)
dry_gpu = importlib.util.module_from_spec(specification)
sys.modules["dry_gpu"] = dry_gpu
specification.loader.exec_module(dry_gpu)

LEVELS = (Level.SCREEN, Level.FULL)
MOST = {
    "linear": 260,
    "moe_experts": 480,
    "logprob": 300,
    "sample": 16,
    "rms_norm": 110,
    "add_rms_norm": 110,
    "qk_norm": 180,
    "rope": 220,
    "qk_norm_rope_cache": 100,
    "swiglu": 160,
    "embedding": 170,
    "moe_router": 160,
}
"""Specialisations that a full verification and every grid may need: each costs a GPU time to compile."""


def walked(name: str, *levels: Level, architecture: int = 90, **options):
    return dry_gpu.walk(ops.get(name, "cuda"), levels, architecture, **options)[0]


def size(each) -> int:
    """Roughly how large a kernel's tiles are."""
    found = 1
    for value in each.constants.values():
        found *= value if type(value) is int and 1 < value <= 512 else 1
    return found


def check(chosen, architecture: int, folder: Path) -> None:
    for each in chosen:
        done = dry_gpu.compiled(each, architecture, folder)
        label = f"sm_{architecture} {each.label}: {done}"
        assert done.shared <= dry_gpu.SHARED[architecture], label
        assert done.spills == 0, label


@pytest.mark.parametrize("name", MOST)
def test_a_sample_fits(name, tmp_path):
    """Of one scope of a screen: of every kernel the specialisation with the largest tiles, and another."""
    operator = ops.get(name, "cuda")
    found = walked(name, Level.SCREEN, grids=False, scopes=scopes_of(operator)[-1:])
    assert found
    kernels = {each.name for each in found.values()}
    rng = random.Random(name)
    chosen = [max((e for e in found.values() if e.name == kernel), key=size) for kernel in sorted(kernels)]
    check([*chosen[:3], rng.choice(list(found.values()))], 90, tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", [80, 86, 90])
@pytest.mark.parametrize("name", MOST)
def test_everything_fits(name, architecture):
    found = walked(name, *LEVELS, architecture=architecture)
    assert len(found) <= MOST[name]
    check(found.values(), architecture, dry_gpu.default_cache())


def test_linear_knows_its_shared_memory(tmp_path):
    """Of tiles of every kind: what `cut` reckons with is at least what Triton reports."""
    scopes = [{"in_features": 4096, "out_features": 24576, "bias": 0}]
    found = walked("linear", Level.SCREEN, grids=False, scopes=scopes).values()
    seen = {}
    for each in [each for each in found if each.name == "product_kernel"]:
        names = each.function.arg_names
        values = {names[at[0]]: value for at, value in each.constants.items()}
        tile = values["I"], values["J"], values["R"], each.options.num_stages, values["STAY"]
        itemsize = 4 if each.signature["C"] == "*fp32" else 2
        seen.setdefault((*tile, itemsize, values["BULK"]), each)
    largest = sorted(seen, key=lambda key: -key[0] * key[1])[:8]
    assert any(key[4] for key in largest) and any(not key[6] for key in seen)
    for key in largest:
        done = dry_gpu.compiled(seen[key], 90, tmp_path)
        assert done.shared <= linear.shared_bytes(*key[:6]), (key, done)


def test_tiles_leave_room_for_what_is_stored():
    """A weight gradient of 128 x 256 float32 numbers and three stages of operands are too much."""
    assert linear.shared_bytes(128, 256, 64, 3, True, 4) > dry_gpu.SHARED[90]
    for architecture in (80, 86, 89, 90, 100, 120):
        for which, itemsize in ((0, 2), (1, 2), (2, 4)):
            for rows in (1, 64, 65, 1024, 16384):
                for columns in (64, 4096, 151936):
                    plan = linear.cut(
                        which, rows, columns, 1, False, architecture, 16, linear.chosen_knobs(), itemsize
                    )
                    sizes = (plan[key] for key in ("height", "width", "depth", "stages", "stay"))
                    assert linear.shared_bytes(*sizes, itemsize) <= dry_gpu.SHARED[architecture]


def test_nothing_is_left_behind():
    """A walk gives numbers, Triton's driver and torch's functions back as they were."""
    import numpy as np
    import torch

    from kernelbraid.ops import rows
    from kernelbraid.ops.problem import ProblemShape

    before = torch.empty, torch.cuda.get_device_capability, rows.finite, dict(rows._SHARED)
    walked("sample", Level.SMOKE, grids=False, scopes=[{"vocabulary": 100}])
    assert (torch.empty, torch.cuda.get_device_capability, rows.finite, dict(rows._SHARED)) == before
    operator = ops.get("sample", "cuda")
    shape = ProblemShape((("vocabulary", 100),), (3,), (3,), "normal", "float32")
    problem = operator.draw(shape, np.random.default_rng(0))
    assert np.abs(problem.requests[0]["logits"]).max() > 1
