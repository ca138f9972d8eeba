"""The shipped CPU implementation by itself: bits between layouts, special values, threads and processes.

The audit's checks ask far more; this is what a change of the kernel breaks first.
"""

import ast
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from tests.ops.programs import execute, rows_of

from kernelbraid.ops.attention import cpu
from kernelbraid.ops.attention.inputs import draw
from kernelbraid.ops.attention.lowering import load_axes, lower
from kernelbraid.ops.attention.reference import reference
from kernelbraid.ops.attention.spec import ATTENTION, CONTRACT
from kernelbraid.ops.problem import INPUT_KINDS, Layout, ProblemShape

ROOT = Path(__file__).parents[2] / "examples/roots/straightforward.py"
CANONICAL_NAN = 0x7FC00000
LENGTHS, ROWS = (1100, 70, 0, 65, 1030), (1100, 70, 0, 1, 6)
WHOLE = Layout("prefill", (0, 1, 2, 3, 4))
LAYOUTS = {
    "alone": Layout("prefill", (0,), page_size=1, page_seed=3),
    "pieces": Layout("chunked_prefill", (4, 1, 0), ((1, 5), (64, 1, 5), (1, 1023, 76)), page_size=64),
    "decode": Layout("decode", (4, 1, 3), ((1,) * 6, (1,) * 70, (1,)), page_size=256, page_seed=5),
    "padded": Layout("prefill", (3, 2, 1, 4), padding=5, page_size=7),
}


def axes(query_heads=6, kv_heads=2, head_dim=64):
    return (("query_heads", query_heads), ("kv_heads", kv_heads), ("head_dim", head_dim))


def problem(kind="normal", heads=None, lengths=LENGTHS, rows=ROWS, seed=1):
    return draw(ProblemShape(heads or axes(), lengths, rows, kind), np.random.default_rng(seed))


def bits_of(drawn, layout, implementation=cpu):
    program = lower(drawn, layout)
    found = rows_of(program, execute(program, implementation))
    return {key: np.concatenate(pieces).view(np.uint32) for key, pieces in found.items()}


def assert_same(one, other):
    for key in one.keys() & other.keys():
        np.testing.assert_array_equal(one[key], other[key], err_msg=str(key))
    assert one.keys() & other.keys()


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_layouts_give_the_same_bits(kind):
    drawn = problem(kind)
    whole = bits_of(drawn, WHOLE)
    for layout in LAYOUTS.values():
        assert_same(bits_of(drawn, layout), whole)
    square = problem(kind, lengths=(1100, 70, 0), rows=(1100, 70, 0))
    update = bits_of(square, Layout("update", (2, 0, 1), padding=2))
    assert_same(update, bits_of(square, Layout("prefill", (0, 1, 2))))


@pytest.mark.parametrize("heads", [(1, 1, 64), (7, 1, 64), (16, 2, 128), (3, 3, 128), (9, 3, 64)])
def test_any_group_and_head_dim(heads):
    drawn = problem(heads=axes(*heads), lengths=(1030, 33), rows=(9, 33))
    whole = bits_of(drawn, Layout("prefill", (0, 1)))
    assert_same(bits_of(drawn, Layout("decode", (1, 0), ((1,) * 33, (1,) * 9), page_size=8)), whole)
    exact = reference(drawn)
    for key, found in whole.items():
        error = np.linalg.norm(found.view(np.float32) - exact[key])
        assert error < 1e-6 * np.linalg.norm(exact[key])


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_special_values(kind):
    drawn = problem(kind, lengths=(300,), rows=(300,))
    found = bits_of(drawn, Layout("prefill", (0,)))
    exact = reference(drawn)
    for key, values in found.items():
        assert not (values == 0x80000000).any()
        nans = np.isnan(values.view(np.float32))
        assert (values[nans] == CANONICAL_NAN).all()
        assert np.isfinite(values.view(np.float32)[np.isfinite(exact[key])]).all()
        assert nans.any() == (kind == "non_finite")


def test_rows_nobody_owns_are_left_alone():
    program = lower(problem(), LAYOUTS["padded"])
    buffers = execute(program, cpu, seed=11)
    again = execute(program, cpu, seed=12)
    owned = np.zeros(len(buffers["out"]), bool)
    for span in program.spans:
        if span.quantity == "out":
            owned[span.start : span.stop] = True
    assert np.isnan(buffers["out"][~owned]).all()
    assert (buffers["out"][~owned].view(np.uint32) != again["out"][~owned].view(np.uint32)).any()


def test_log_sum_exps_are_optional():
    program = lower(problem(), WHOLE)
    with_lse = execute(program, cpu)["out"]
    calls = [c if "lse" not in c.arguments else _without_lse(c) for c in program.calls]
    buffers = execute(type(program)(program.inputs, program.state, program.outputs, tuple(calls)), cpu)
    np.testing.assert_array_equal(buffers["out"].view(np.uint32), with_lse.view(np.uint32))


def _without_lse(call):
    return type(call)(call.entry_point, {**call.arguments, "lse": None})


def test_threads_do_not_mix_up_calls():
    drawn = [problem(seed=s, lengths=(200, 40), rows=(30, 40)) for s in range(3)]
    layout = Layout("prefill", (0, 1))
    alone = [bits_of(d, layout) for d in drawn]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda i: bits_of(drawn[i % 3], layout), range(24)))
    for i, found in enumerate(together):
        assert_same(found, alone[i % 3])


FORKING = """
import os
import numpy as np
from kernelbraid.ops.attention import cpu
rng = np.random.default_rng(1)
q, k, v = (rng.standard_normal((300, h, 64), np.float32) for h in (6, 2, 2))
def run():
    out = np.empty_like(q)
    cpu.attention(q, k, v, np.array([0, 300], np.int32), 300, 0.125, out, None)
    return out.tobytes()
before = run()
pid = os.fork()
if pid == 0:
    os._exit(run() != before)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert run() == before
"""


def test_forked_children_compute_too():
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=120)


@pytest.mark.slow
def test_root_of_the_study_gives_the_same_bits(tmp_path):
    # A copy: Numba's disk cache beside the file belongs to whichever module name compiled it first.
    spec = spec_from_file_location("root_of_the_study", shutil.copy(ROOT, tmp_path))
    root = module_from_spec(spec)
    spec.loader.exec_module(root)
    constant = dict(axes())
    assert root.numerics(constant) == cpu.numerics(constant)
    for kind in ("normal", "non_finite", "saturated"):
        drawn = problem(kind)
        for layout in (WHOLE, LAYOUTS["pieces"]):
            assert_same(bits_of(drawn, layout, root), bits_of(drawn, layout))


def test_numerics_and_knobs_fit_the_contract():
    constant = dict(axes())
    CONTRACT.check_numerics(cpu.numerics(constant))
    assert cpu.numerics(constant) == {knob.name: knob.default for knob in CONTRACT.knobs}
    for name, (kind, choices) in cpu.KNOBS.items():
        assert getattr(cpu, name) in choices
        if kind == "numeric":
            (knob,) = (k for k in CONTRACT.knobs if k.name == name.lower())
            assert set(choices) <= set(knob.choices)
    knobs = {name: getattr(cpu, name) for name, (kind, _) in cpu.KNOBS.items() if kind == "schedule"}
    for layout in LAYOUTS.values():
        asked = load_axes(problem().shape, layout)
        answer = cpu.schedule(asked, knobs)
        assert answer == cpu.schedule(asked, knobs)
        assert all(type(value) is int for value in answer.values())


@pytest.mark.parametrize("path", [Path(cpu.__file__), ROOT], ids=lambda p: p.name)
def test_implementations_are_readable_alone(path):
    allowed = {
        "math",
        "os",
        "threading",
        "concurrent.futures",
        "itertools",
        "numpy",
        "numba",
        "numba.extending",
        "llvmlite",
    }
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.module in allowed


def test_the_module_says_what_it_exports():
    module = import_module("kernelbraid.ops.attention.cpu")
    for name in (*ATTENTION.entry_points, "numerics", "schedule", "KNOBS"):
        assert hasattr(module, name)
