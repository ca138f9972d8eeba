import numpy as np
import pytest
from tests.ops.programs import Plain, execute, rows_of

from kernelbraid.contract import Workload
from kernelbraid.ops.attention.inputs import draw
from kernelbraid.ops.attention.lowering import load_axes, lower, timed, workload_lengths
from kernelbraid.ops.attention.reference import reference
from kernelbraid.ops.attention.spec import ATTENTION, ATTENTION_CUDA
from kernelbraid.ops.attention.workloads import GRIDS
from kernelbraid.ops.formats import BFLOAT16, bits_type, information, is_float
from kernelbraid.ops.numbers import poison
from kernelbraid.ops.problem import INPUT_KINDS, Layout, Problem, ProblemShape, View

AXES = (("query_heads", 6), ("kv_heads", 2), ("head_dim", 64))
LENGTHS, ROWS = (40, 33, 0, 16, 7), (9, 33, 0, 1, 0)
PIECES = ((4, 5), (1, 31, 1), (), (0, 1), ())


def problem(
    kind="normal", lengths=LENGTHS, rows=ROWS, shared=0, seed=3, axes=AXES, dtype="float32"
) -> Problem:
    shape = ProblemShape(axes, lengths, rows, kind, dtype, shared_prefix=shared)
    return draw(shape, np.random.default_rng(seed), dtypes=DTYPES)


TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.5e-2}
DTYPES = tuple(TOLERANCE)


LAYOUTS = {
    "together": Layout("prefill", (0, 1, 2, 3, 4)),
    "alone": Layout("prefill", (1,), page_size=1),
    "reordered": Layout("prefill", (4, 2, 1, 0), page_size=7, page_seed=5),
    "pieces": Layout("chunked_prefill", (0, 1, 2, 3, 4), PIECES, page_size=4),
    "steps": Layout("decode", (1, 0), ((1,) * 33, (1,) * 9), page_size=256),
    "padded": Layout("prefill", (0, 1, 2, 3, 4), padding=3, page_seed=2),
    "shared": Layout(
        "chunked_prefill", (0, 1, 3), ((9,), (33,), (1,)), page_size=4, page_seed=2, shared_prefix=15
    ),
    "shared and padded": Layout("prefill", (3, 4, 0), page_size=5, padding=1, shared_prefix=15),
    "twice": Layout("prefill", (0, 0, 1), page_size=16),
    "nobody": Layout("prefill", ()),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_programs_compute_the_problem(name, dtype):
    layout = LAYOUTS[name]
    drawn = problem(shared=15, dtype=dtype)
    exact = reference(drawn)
    program = lower(drawn, layout)
    found = rows_of(program, execute(program, Plain))
    assert set(found) == {(quantity, b) for quantity in ("out", "lse") for b in layout.requests}
    for (quantity, b), pieces in found.items():
        copies = layout.requests.count(b)
        rows = np.concatenate(pieces)
        assert len(rows) == copies * ROWS[b]
        assert rows.dtype == (dtype if quantity == "out" else "float32")
        bound = TOLERANCE[dtype]
        exact_rows = np.concatenate([exact[quantity, b]] * copies)
        np.testing.assert_allclose(rows.astype(np.float64), exact_rows, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("regime", ["update", "backward"])
def test_whole_sequences_are_computed(regime, dtype):
    drawn = problem(lengths=(9, 0, 33), rows=(9, 0, 33), dtype=dtype)
    program = lower(drawn, Layout(regime, (2, 0, 1), padding=2))
    expected = ["attention"] + ["attention_backward"] * (regime == "backward")
    assert [call.entry_point for call in program.calls] == expected
    found = rows_of(program, execute(program, Plain))
    quantities = ("dq", "dk", "dv") if regime == "backward" else ("out", "lse")
    assert set(found) == {(quantity, b) for quantity in quantities for b in range(3)}
    exact = reference(drawn)
    for key, pieces in found.items():
        rows, bound = np.concatenate(pieces).astype(np.float64), 3 * TOLERANCE[dtype]
        np.testing.assert_allclose(rows, exact[key], rtol=bound, atol=bound)


def test_backward_needs_whole_sequences():
    with pytest.raises(ValueError, match="every request"):
        lower(problem(lengths=(9, 9), rows=(9, 3)), Layout("backward", (0,)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_row_is_covered_once(name):
    layout = LAYOUTS[name]
    program = lower(problem(shared=15), layout)
    for quantity in ("out", "lse"):
        covered = {}
        for span in program.spans:
            if span.quantity == quantity:
                rows = range(span.first_row, span.first_row + span.stop - span.start)
                covered.setdefault(span.request, []).extend(rows)
        for b in layout.requests:
            assert sorted(covered[b]) == sorted(list(range(ROWS[b])) * layout.requests.count(b))
    places = [(s.buffer, i) for s in program.spans for i in range(s.start, s.stop)]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_nobody_owns_stays_poisoned(name, dtype):
    layout, bits = LAYOUTS[name], bits_type(np.dtype(dtype))
    drawn = problem(shared=15, dtype=dtype)
    program = lower(drawn, layout)
    assert all(np.isnan(cache).all() for cache in program.state.values())
    buffers = execute(program, Plain)
    used = np.zeros(buffers["k_cache"].shape[:2], bool)
    table, size = program.inputs["page_table"], layout.page_size
    for i, b in enumerate(layout.requests):
        positions = np.arange(LENGTHS[b])
        pages, slots = table[i, positions // size], positions % size
        used[pages, slots] = True
        for cache, name_ in (("k_cache", "k"), ("v_cache", "v")):
            kept = buffers[cache][pages, slots].view(bits)
            np.testing.assert_array_equal(kept, drawn.requests[b][name_].view(bits))
    for cache in ("k_cache", "v_cache"):
        left = buffers[cache][~used].view(bits)
        np.testing.assert_array_equal(left, program.state[cache][~used].view(bits))
    outside = np.ones(len(buffers["out"]), bool)
    for span in program.spans:
        if span.quantity == "out":
            outside[span.start : span.stop] = False
    assert np.isnan(buffers["out"][outside]).all()
    assert outside.sum() == layout.padding * sum(c.entry_point == "paged_attention" for c in program.calls)


def test_pages_are_shared_only_where_asked():
    drawn = problem(shared=15)
    shared = lower(drawn, LAYOUTS["shared"])
    own = lower(drawn, Layout("chunked_prefill", (0, 1, 3), ((9,), (33,), (1,)), page_size=4, page_seed=2))
    # Request 0 owns its pages; request 3 has 15 positions of context and shares 3 pages of 4; request 1 none.
    assert list(shared.inputs["page_table"][2, :3]) == list(shared.inputs["page_table"][0, :3])
    assert own.state["k_cache"].shape[0] == shared.state["k_cache"].shape[0] + 3
    pages = [set(own.inputs["page_table"][i, : -(-LENGTHS[b] // 4)]) for i, b in enumerate((0, 1, 3))]
    assert len(set.union(*pages)) == sum(map(len, pages))


def test_page_seed_permutes_and_poison_seed_does_not():
    drawn = problem()
    ascending, shuffled, again = (
        lower(drawn, Layout("prefill", (0, 1), page_size=4, page_seed=seed, poison_seed=poison_seed))
        for seed, poison_seed in ((0, 1), (9, 1), (9, 2))
    )
    used = slice(0, 10)
    assert list(ascending.inputs["page_table"][0, used]) == list(range(10))
    assert list(shuffled.inputs["page_table"][0, used]) != list(range(10))
    assert list(shuffled.inputs["page_table"][0, used]) == list(again.inputs["page_table"][0, used])
    one, other = (p.state["k_cache"].view(np.uint32) for p in (shuffled, again))
    assert (one != other).any()


def test_padding_is_poisoned_and_appends_empty_requests():
    plain, padded = lower(problem(), LAYOUTS["together"]), lower(problem(), LAYOUTS["padded"])
    assert padded.state["k_cache"].shape[0] == plain.state["k_cache"].shape[0] + 3
    assert padded.inputs["page_table"].shape == (8, plain.inputs["page_table"].shape[1] + 3)
    for name in ("q", "k", "v"):
        assert np.isnan(padded.inputs[name]).any()
    call = padded.calls[-1].arguments
    assert call["max_seqlen_k"] == 43 and call["max_seqlen_q"] == 36
    axes = load_axes(problem().shape, LAYOUTS["padded"])
    assert (axes["batch"], axes["query_length"], axes["key_length"], axes["page_size"]) == (8, 36, 43, 16)
    assert axes["head_dim"] == 64


def test_table_tails_are_wild():
    table = lower(problem(), Layout("prefill", (0, 4), page_size=1)).inputs["page_table"]
    tail = table[1, 7:]
    assert (tail < 0).any() or (tail >= 47).any()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout("update", (0,)), "rows must equal lengths"),
        (Layout("update", (1,), ((33,),)), "no partition"),
        (Layout("prefill", (0,), ((4, 4),)), "add up"),
        (Layout("prefill", (0,), shared_prefix=20), "shares 15"),
        (Layout("backward", (0,)), "backward"),
    ],
)
def test_unfit_layouts_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        lower(problem(shared=15), layout)


def test_problems_are_repeatable_and_differ_by_seed():
    one, same, other = problem(seed=1), problem(seed=1), problem(seed=2)
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(one.requests[0][name], same.requests[0][name])
        assert (one.requests[0][name] != other.requests[0][name]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_kinds_are_what_they_say(kind, dtype):
    drawn = problem(kind, lengths=(600, 40), rows=(600, 3), dtype=dtype)
    q, k, v = (np.concatenate([r[name] for r in drawn.requests]) for name in ("q", "k", "v"))
    assert all(a.dtype == dtype for a in (q, k, v))
    finite = all(np.isfinite(a).all() for a in (q, k, v))
    assert finite == (kind != "non_finite")
    tiny = float(information(np.dtype(dtype)).tiny)
    if dtype != "float32":
        assert np.isfinite(v).all()
        q, k, v = (a.astype(np.float32) for a in (q, k, v))
    if kind == "heavy_tailed":
        assert np.abs(v).max() > 20
    elif kind == "cancelling":
        halves = (
            np.einsum("td,td->t", q[:40, 0, :32], k[:40, 0, :32]),
            np.einsum("td,td->t", q[:40, 0], k[:40, 0]),
        )
        assert np.median(np.abs(halves[0])) > 10 * np.median(np.abs(halves[1]))
    elif kind == "signed_zeros":
        for a in (q, k, v):
            assert ((a == 0) & np.signbit(a)).any() and ((a == 0) & ~np.signbit(a)).any()
        assert np.signbit(v[..., :16]).any() and (v[..., :8] == 0).all()
    elif kind == "denormals":
        assert all(((a != 0) & (np.abs(a) < tiny)).any() for a in (q, k, v))
    elif kind == "saturated":
        assert np.abs(q).max() > 100
    elif kind == "non_finite":
        assert np.isnan(v).any() or np.isnan(k).any() or np.isnan(q).any()
        assert all(np.isfinite(a[:400]).all() for a in (q, k, v))
    elif kind == "captured":
        assert len(np.unique(k[:512, 0, 0])) > 200


def test_captured_wraps_for_other_shapes():
    axes = (("query_heads", 16), ("kv_heads", 2), ("head_dim", 128))
    drawn = problem("captured", lengths=(1200,), rows=(2,), axes=axes)
    k = drawn.requests[0]["k"]
    np.testing.assert_array_equal(k[:512], k[512:1024])
    assert (k[:512, :, :64] != k[:512, :, 64:]).any()


def test_shared_prefixes_are_equal():
    drawn = problem(lengths=(9, 30, 12), rows=(1, 1, 1), shared=10)
    for name in ("k", "v"):
        first, second, third = (r[name] for r in drawn.requests)
        np.testing.assert_array_equal(first[:9], second[:9])
        np.testing.assert_array_equal(third[:10], second[:10])
        assert (third[10:] != second[10:12]).all()


@pytest.mark.parametrize(
    ("dtype", "canonical", "payloads"),
    [("float32", 0x7FC00000, 10000), ("float16", 0x7E00, 1000), ("bfloat16", 0x7FC0, 120)],
)
def test_poison_is_nan_of_many_payloads(dtype, canonical, payloads):
    values = poison(np.random.default_rng(1), (100, 1000), dtype)
    bits = values.view(bits_type(np.dtype(dtype)))
    assert np.isnan(values).all()
    assert len(np.unique(bits)) > payloads
    assert canonical not in bits


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="dtype must be float32"):
        draw(ProblemShape(AXES, (1,), (1,), dtype="bfloat16"), np.random.default_rng(1))


def test_dout_belongs_to_whole_problems_and_changes_nothing_else():
    whole = problem(lengths=(9, 5), rows=(9, 5), dtype="bfloat16")
    assert [r["dout"].shape for r in whole.requests] == [(9, 6, 64), (5, 6, 64)]
    assert all("dout" not in r for r in problem(lengths=(9, 5), rows=(9, 4)).requests)


@pytest.mark.parametrize("workload", GRIDS["study"], ids=lambda w: w.name)
def test_timed_programs_are_distinct_calls(workload):
    variants, pool = 3, 1 << 20
    program = timed(workload, np.random.default_rng(1), variants, pool, contiguous=False)
    assert len(program.calls) == variants
    entry_point = "attention" if workload.phase == "update" else "paged_attention"
    entry_point = "attention_backward" if workload.phase == "backward" else entry_point
    written = "dv" if workload.phase == "backward" else "out"
    assert {call.entry_point for call in program.calls} == {entry_point}
    for name in ("q", written):
        views = [call.arguments[name] for call in program.calls]
        assert len({(view.start, view.stop) for view in views}) == variants
    buffers = execute(program, Plain)
    assert np.isfinite(buffers[written]).all()
    lengths, rows = workload_lengths(workload)
    assert len(buffers[written]) == variants * sum(rows)
    if entry_point == "paged_attention":
        assert sum(program.inputs[name].nbytes for name in ("k_cache", "v_cache")) >= pool
        used = [-(-n // 16) for n in lengths]
        tables = program.inputs["page_table"].reshape(variants, len(lengths), -1)
        for table in tables:
            pages = np.concatenate([row[:n] for row, n in zip(table, used, strict=True)])
            assert len(set(pages)) == len(pages)
        assert (tables[0, 0, : used[0]] != tables[1, 0, : used[0]]).any()


def test_timed_calls_walk_through_the_pool():
    (workload, *_) = (w for w in GRIDS["study"] if w.phase == "decode")
    lengths, _ = workload_lengths(workload)
    used = [-(-n // 16) for n in lengths]
    page_bytes = 2 * 4 * 16 * 3 * 64
    program = timed(workload, np.random.default_rng(1), 4, 4 * sum(used) * page_bytes, contiguous=False)
    tables = program.inputs["page_table"].reshape(4, len(lengths), -1)
    pages = [row[:n] for table in tables for row, n in zip(table, used, strict=True)]
    assert len(set(np.concatenate(pages))) == 4 * sum(used)


def test_contiguous_form_calls_the_peer():
    (workload, *_) = (w for w in GRIDS["study"] if w.phase == "decode")
    program = timed(workload, np.random.default_rng(1), 5, 1 << 20, contiguous=True)
    assert {call.entry_point for call in program.calls} == {"peer"}
    batch, longest = 16, max(workload_lengths(workload)[0])
    for call in program.calls:
        view = call.arguments["k"]
        assert isinstance(view, View)
        assert program.inputs["k"][view.start : view.stop].shape == (batch, 3, longest, 64)
    assert not program.outputs


SMALL = {"query_heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "batch": 3}


@pytest.mark.parametrize("lengths", [(40, 40, 40), (40, 7, 33)])
@pytest.mark.parametrize("phase", ["prefill", "chunked_prefill", "decode", "update", "backward"])
def test_timed_programs_on_cuda(phase, lengths):
    axes = {**SMALL, "length": lengths}
    if phase == "chunked_prefill":
        axes["query_length"] = (4, 3, 2)
    workload = Workload(phase, tuple(axes.items()))
    for contiguous in (False, True):
        program = ATTENTION_CUDA.timed(workload, np.random.default_rng(1), 2, 1 << 16, contiguous=contiguous)
        floats = [a.dtype for a in program.inputs.values() if is_float(a.dtype)]
        assert set(floats) - {np.dtype(np.float32)} == {BFLOAT16}
        assert len(program.calls) == 2
        if contiguous:
            whole = phase in ("prefill", "update", "backward")
            named = {"max_seqlen"} if whole else {"max_seqlen_q", "max_seqlen_k"}
            assert named <= set(program.calls[0].arguments)
            assert program.inputs["k"].ndim == (3 if whole else 4)
            for call in program.calls:
                read = [a.buffer for a in call.arguments.values() if isinstance(a, View)]
                assert set(read) <= set(program.inputs)
        else:
            buffers = execute(program, Plain)
            written = ("dq", "dk", "dv") if phase == "backward" else ("out",)
            assert all(np.isfinite(buffers[name]).all() for name in written)


def test_operator_is_wired():
    assert ATTENTION.draw is draw and ATTENTION.lower is lower and ATTENTION.timed is timed
