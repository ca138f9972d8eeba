import math
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest

from kernelbraid import ops
from kernelbraid.contract import REGIMES, AccuracyBound, Exclusion, content_hash
from kernelbraid.ops.attention.lowering import workload_lengths
from kernelbraid.ops.attention.spec import (
    ATTENTION,
    ATTENTION_CUDA,
    CONTRACT,
    CUDA_CONTRACT,
    EXP2_TABLES,
    LOG2_TABLE,
)
from kernelbraid.ops.attention.workloads import CUDA_GRIDS, GRIDS
from kernelbraid.search.proposers.edits import declared

NUMERICS = {"chunk": 1024, "key_block": 64, "exp2_degree": 6}
AXES = {"query_heads": 9, "kv_heads": 3, "head_dim": 64}
BITS = CONTRACT.bits_id(NUMERICS, "float32", AXES, "cpu")


def test_bits_id_is_stable():
    """Recorded log-probabilities name it: a change of these digits says that all bits are new."""
    assert BITS == "5bb04be34bc1a9e9"


def test_contract_hash_covers_every_field():
    changed = {
        "operator": "other",
        "version": 2,
        "dtypes": ("float32", "bfloat16"),
        "accuracy": (AccuracyBound("out", 9.0, 1e-6, ("decode",)),),
        "exclusions": (Exclusion("window", "no"),),
        "canonical_nan": False,
    }
    hashes = {CONTRACT.hash}
    for field in fields(CONTRACT):
        value = changed[field.name] if field.name in changed else getattr(CONTRACT, field.name)[:-1]
        hashes.add(replace(CONTRACT, **{field.name: value}).hash)
    assert len(hashes) == len(fields(CONTRACT)) + 1
    assert replace(CONTRACT).hash == CONTRACT.hash


def test_content_hash_ignores_the_order_of_keys():
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})


def test_requirements_are_complete_and_unique():
    ids = [r.id for r in CONTRACT.requirements]
    assert len(set(ids)) == len(ids)
    assert all(r.regime in REGIMES for r in CONTRACT.requirements)
    for operator in (ATTENTION, ATTENTION_CUDA):
        for regime in operator.regimes:
            names = {r.name for r in operator.contract.requirements if r.regime == regime}
            expected = {"fresh_process", "batch", "padding", "implementations_agree"}
            if regime == "backward":
                expected |= {
                    "gradient_rerun",
                    "gradient_packing",
                    "accuracy_dq",
                    "accuracy_dk",
                    "accuracy_dv",
                }
            else:
                expected |= {"rerun", "accuracy_out", "accuracy_lse"}
            assert expected <= names
            assert ("graph_replay" in names) == (operator.backend == "cuda")
    assert "attention/1/decode_equals_prefill/decode" in ids
    assert "attention/1/update_equals_rollout/update" in ids
    assert "attention/1/chunked_prefill/chunked_prefill" in ids


@pytest.mark.parametrize("name", NUMERICS)
def test_every_numeric_value_has_bits_of_its_own(name):
    (knob,) = (k for k in CONTRACT.knobs if k.name == name)
    assert knob.default in knob.choices
    ids = {CONTRACT.bits_id({**NUMERICS, name: value}, "float32", AXES, "cpu") for value in knob.choices}
    assert len(ids) == len(knob.choices)


def test_bits_id_depends_on_constant_axes_and_architecture_only():
    assert CONTRACT.bits_id(dict(reversed(NUMERICS.items())), "float32", AXES, "cpu") == BITS
    assert CONTRACT.bits_id(NUMERICS, "float32", {**AXES, "kv_heads": 9}, "cpu") != BITS
    assert CONTRACT.bits_id(NUMERICS, "float32", AXES, "sm_90") != BITS
    assert replace(CONTRACT, version=2).bits_id(NUMERICS, "float32", AXES, "cpu") != BITS
    operations = CONTRACT.elementary_operations[:-1]
    assert (
        replace(CONTRACT, elementary_operations=operations).bits_id(NUMERICS, "float32", AXES, "cpu") != BITS
    )
    assert (
        replace(CONTRACT, accuracy=(), axes=CONTRACT.axes[:3]).bits_id(NUMERICS, "float32", AXES, "cpu")
        == BITS
    )


@pytest.mark.parametrize(
    ("numerics", "dtype", "axes", "named"),
    [
        ({**NUMERICS, "chunk": 1000}, "float32", AXES, "chunk"),
        ({**NUMERICS, "chunk": True}, "float32", AXES, "chunk"),
        ({**NUMERICS, "chunk": "1024"}, "float32", AXES, "chunk"),
        ({**NUMERICS, "tile": 3}, "float32", AXES, "tile"),
        ({"chunk": 1024}, "float32", AXES, "exp2_degree"),
        (NUMERICS, "bfloat16", AXES, "dtype"),
        (NUMERICS, "float32", {**AXES, "batch": 3}, "constant_axes"),
        (NUMERICS, "float32", {"head_dim": 64}, "constant_axes"),
    ],
)
def test_bits_id_refuses(numerics, dtype, axes, named):
    with pytest.raises(ValueError, match=named):
        CONTRACT.bits_id(numerics, dtype, axes, "cpu")


def test_axes_name_their_limits():
    for name, value in (("head_dim", 96), ("page_size", 257), ("batch", 1025), ("key_length", 131073)):
        with pytest.raises(ValueError, match=name):
            CONTRACT.axis(name).check(value)
    with pytest.raises(ValueError, match="query_heads"):
        CONTRACT.axis("heads")


def test_blocks_divide_chunks():
    chunk, block, _ = CONTRACT.knobs
    assert all(c % b == 0 for c in chunk.choices for b in block.choices)
    early, until, chunk, block = CUDA_CONTRACT.knobs
    for large, small in ((until, chunk), (chunk, early), (early, block)):
        assert all(n % m == 0 for n in large.choices for m in small.choices)


@pytest.mark.parametrize("operator", ops.OPERATORS, ids=lambda o: o.backend)
def test_shipped_knobs_have_the_contracts_names_and_defaults(operator):
    knobs = declared(ops.source(operator), operator.contract)
    numeric = {knob.name.lower(): knob.value for knob in knobs if knob.kind == "numeric"}
    assert numeric == {knob.name: knob.default for knob in operator.contract.knobs}


def test_backends_have_bits_of_their_own():
    numerics = {knob.name: knob.default for knob in CUDA_CONTRACT.knobs}
    ids = {CUDA_CONTRACT.bits_id(numerics, dtype, AXES, "sm_90") for dtype in CUDA_CONTRACT.dtypes}
    ids.add(CUDA_CONTRACT.bits_id({**numerics, "key_block": 32}, "bfloat16", AXES, "sm_80"))
    assert len(ids | {BITS}) == 4
    with pytest.raises(ValueError, match="dtype"):
        CUDA_CONTRACT.bits_id(numerics, "float32", AXES, "sm_90")


def _exact(coefficients):
    values = [float.fromhex(c) for c in coefficients]
    assert all(float(np.float32(value)) == value for value in values)
    return [Fraction(value) for value in values]


def _horner(coefficients, x):
    total = Fraction(0)
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total


@pytest.mark.parametrize(("degree", "bound"), [(4, 6e-6), (5, 5e-7), (6, 1.2e-7), (7, 1.2e-7)])
def test_exp2_tables_are_polynomials_of_exp2(degree, bound):
    (table,) = (t for name, t in EXP2_TABLES if name == f"degree {degree}")
    coefficients = _exact(table)
    assert len(coefficients) == degree + 1
    assert coefficients[0] == 1
    for i in range(-50, 51):
        r = Fraction(i, 100)
        assert abs(float(_horner(coefficients, r)) / 2.0 ** float(r) - 1) < bound


def test_log2_table_is_an_odd_polynomial_of_log2():
    coefficients = _exact(LOG2_TABLE[1])
    for f in np.linspace(math.sqrt(0.5), math.sqrt(2), 101):
        z = Fraction((f - 1) / (f + 1))
        assert abs(float(z * _horner(coefficients, z * z)) - math.log2(f)) < 1e-7


WORKLOADS = {w for grids in (GRIDS, CUDA_GRIDS) for grid in grids.values() for w in grid}


@pytest.mark.parametrize("workload", sorted(WORKLOADS, key=repr), ids=lambda w: w.name)
def test_workloads_lie_in_the_domain(workload):
    shape = workload.shape
    lengths, rows = workload_lengths(workload)
    for name in ("query_heads", "kv_heads", "head_dim", "page_size", "batch"):
        CONTRACT.axis(name).check(shape[name])
    assert shape["query_heads"] % shape["kv_heads"] == 0
    CONTRACT.axis("key_length").check(max(lengths))
    CONTRACT.axis("query_length").check(max(rows))
    assert workload.phase in ATTENTION.regimes
    assert ATTENTION.cost(workload).flops > 0
    assert workload.flat()["phase"] == workload.phase


def test_workloads_of_a_grid_have_names_of_their_own():
    for grid in (*GRIDS.values(), *CUDA_GRIDS.values()):
        assert len({workload.name for workload in grid}) == len(grid)


def test_study_grid_covers_every_regime():
    assert {w.phase for w in CUDA_GRIDS["study"]} == set(ATTENTION_CUDA.regimes)
    assert {w.phase for w in GRIDS["study"]} == set(ATTENTION.regimes) - {"backward"}
    assert {w.phase for w in GRIDS["cpu-backward"]} == {"backward"}
    assert {tuple(w.shape[n] for n in AXES) for w in GRIDS["study"]} == {(9, 3, 64)}


def test_published_grid_has_32_cells():
    cells = {(w.phase, w.shape["batch"], w.shape["length"]) for w in GRIDS["published"]}
    prefill = {("prefill", b, n) for b in (1, 4, 8, 16) for n in (1024, 4096, 8192, 16384)}
    decode = {("decode", b, n) for b in (1, 4, 8, 16) for n in (128, 1024, 4096, 8192)}
    assert cells == prefill | decode
    assert len(cells) == 32


def test_cost_counts_what_rows_see():
    workload = next(w for w in GRIDS["cpu-prefill"] if w.phase == "prefill" and w.shape["length"] == 1024)
    visible = 1024 * 1025 // 2
    heads, head_dim = workload.shape["query_heads"], workload.shape["head_dim"]
    assert ATTENTION.cost(workload).flops == 4 * visible * heads * head_dim


def test_the_backward_has_five_products_of_the_forwards_two():
    forward, backward = (
        next(w for w in CUDA_GRIDS["heads"] if w.phase == phase) for phase in ("update", "backward")
    )
    cost = ATTENTION_CUDA.cost(backward)
    assert cost.flops == 2.5 * ATTENTION_CUDA.cost(forward).flops
    rows, (query_heads, kv_heads, head_dim) = 2048, (backward.shape[n] for n in AXES)
    assert cost.bytes == rows * (2 * 4 * head_dim * (query_heads + kv_heads) + 4 * query_heads)


def test_heads_grid_has_every_group():
    groups = {w.shape["query_heads"] // w.shape["kv_heads"] for w in CUDA_GRIDS["heads"]}
    assert groups == {1, 3, 4, 5, 6, 7, 8}
    assert {w.shape["head_dim"] for w in CUDA_GRIDS["heads"]} == {64, 128}


def test_get_names_the_operators():
    assert ops.get("attention") is ATTENTION
    assert ops.get("attention", "cuda") is ATTENTION_CUDA
    with pytest.raises(ValueError, match="attention"):
        ops.get("softmax")


def test_sources_are_shipped_and_hashed():
    assert ops.source(ATTENTION).label == "attention/cpu.py"
    assert "def paged_attention" in ops.source(ATTENTION).text
    assert "torch" in ops.source(ATTENTION, ATTENTION.peer_file).text
    assert "def attention_backward" in ops.source(ATTENTION_CUDA).text
    assert "torch_cudnn" in ops.source(ATTENTION_CUDA, ATTENTION_CUDA.peer_file).text
    with pytest.raises(ValueError, match="no backend 'rocm'"):
        ops.get("attention", "rocm")
    with pytest.raises(ValueError, match=r"gpu\.py"):
        ops.source(ATTENTION, "gpu.py")
