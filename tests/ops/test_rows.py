"""Operators on rows as such: drawing, lowering, timing and the oracle, for an operator made up here."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.ops.programs import execute, rows_of

from kernelbraid import ops
from kernelbraid.contract import REGIMES, Workload
from kernelbraid.ops.formats import BFLOAT16, bits_type, information
from kernelbraid.ops.oracle import evaluate
from kernelbraid.ops.problem import WHOLE_PROBLEM, Layout, ProblemShape, View
from kernelbraid.ops.rows import (
    ACCUMULATION,
    BACKWARD,
    FORWARD,
    KINDS,
    MOST_POSITIONS,
    MOST_REQUESTS,
    TRAINING,
    Field,
    Gradients,
    RowForm,
    finite,
    relations,
)

AXES = (("width", 10), ("classes", 5))
DTYPES = ("float32", "float16", "bfloat16")
TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
LENGTHS = (40, 33, 0, 16, 7)
ROWS = (9, 33, 0, 1, 0)
EVERYONE = (0, 1, 2, 3, 4)


def row(axes):
    return (axes["width"],)


def table(axes):
    return axes["classes"], axes["width"]


FORM = RowForm(
    entry_point="mix",
    inputs=(
        Field("x", row),
        Field("position", lambda axes: (), dtype="int32", drawn="positions"),
        Field(
            "choice", lambda axes: (2,), dtype="int64", drawn="indices", below=lambda axes: axes["classes"]
        ),
    ),
    parameters=(Field("weight", row, scale=lambda axes: 0.5, offset=2.0), Field("table", table)),
    scalars={"factor": 0.25},
    outputs=(Field("out", row), Field("size", lambda axes: (), dtype="float32")),
    gradients=Gradients(
        entry_point="mix_backward",
        given=(Field("dout", row),),
        rows=(Field("dx", row),),
        parameters=(Field("dweight", row, dtype="float32"), Field("dtable", table, dtype="float32")),
        saved=("size",),
        unread=("position", "table"),
    ),
)
NUMBERS = ("x", "dout", "weight", "table")


class Mix:
    """out = factor * x * weight + position / 64 + two rows of a table; size = sum of squares of x."""

    @staticmethod
    def mix(x, position, choice, weight, table, factor, out, size):
        known = (choice >= 0) & (choice < len(table))
        rows = table.astype(np.float64)[np.where(known, choice, 0)].sum(1)
        found = x.astype(np.float64) * weight.astype(np.float64) * factor + rows
        out[...] = found + position[:, None].astype(np.float64) / 64
        size[...] = (x.astype(np.float64) ** 2).sum(1)

    @staticmethod
    def mix_backward(x, choice, weight, factor, size, dout, dx, dweight, dtable, accumulate):
        assert np.allclose(size, (x.astype(np.float64) ** 2).sum(1), rtol=1e-2)
        d = dout.astype(np.float64)
        dx[...] = d * weight.astype(np.float64) * factor
        if not accumulate:
            dweight[...] = 0
            dtable[...] = 0
        dweight += (d * x.astype(np.float64) * factor).sum(0).astype(np.float32)
        np.add.at(dtable, choice, np.repeat(d[:, None], 2, axis=1).astype(np.float32))


def formula(x, position, choice, weight, table, factor):
    out = x * weight * factor + table[choice].sum(1) + position[:, None].to(x.dtype) / 64
    return out, x.square().sum(1)


def draw(kind="normal", lengths=LENGTHS, rows=ROWS, dtype="float32", seed=3, form=FORM):
    shape = ProblemShape(AXES, lengths, rows, kind, dtype)
    return form.draw(shape, np.random.default_rng(seed), dtypes=DTYPES)


def whole(kind="normal", lengths=(130, 33, 0, 1), dtype="float32", seed=3):
    return draw(kind, lengths, lengths, dtype, seed)


def distance(found, exact):
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return np.linalg.norm(found - exact) / max(np.linalg.norm(exact), 1e-30)


# ---- Drawing.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_what_they_say(kind, dtype):
    rows = (300, 200)
    problem = draw(kind, rows, rows, dtype)
    arrays = {name: np.concatenate([r[name] for r in problem.requests]) for name in ("x", "dout")}
    arrays |= {name: problem.shared[name] for name in ("weight", "table")}
    smallest = float(information(np.dtype(dtype)).smallest_normal)
    for name, array in arrays.items():
        assert array.dtype == np.dtype(dtype)
        if kind != "non_finite" or name != "x":
            assert np.isfinite(array.astype(np.float64)).all(), name
    x, big = (arrays[name].astype(np.float64) for name in ("x", "table"))
    if kind in ("normal", "non_finite"):
        kept = x[np.isfinite(x)]
        assert abs(kept.mean()) < 0.1 and abs(kept.std() - 1) < 0.1
    if kind == "heavy_tailed":
        assert np.abs(x).max() > 6 * np.median(np.abs(x)) and (x**4).mean() > 6 * (x**2).mean() ** 2
    if kind == "cancelling":
        assert (x[:, :5] == x[:, 5:]).all()
        assert np.abs(big[:, :5] + big[:, 5:]).mean() < 0.3 * np.abs(big[:, :5]).mean()
    if kind == "signed_zeros":
        for numbers in (x, big):
            zero = numbers == 0
            assert (
                (zero & np.signbit(numbers)).any() and (zero & ~np.signbit(numbers)).any() and not zero.all()
            )
        assert (x[::5] == 0).all()
    if kind == "denormals":
        for numbers in (x, big, arrays["dout"].astype(np.float64)):
            denormal = (numbers != 0) & (np.abs(numbers) < smallest)
            assert 0.05 < denormal.mean() < 0.7
    if kind == "saturated":
        assert x.std() > 30 and big.std() < 2
    if kind == "non_finite":
        for request, count in zip(problem.requests, rows, strict=True):
            spoiled = ~np.isfinite(request["x"].astype(np.float64)).all(1)
            assert spoiled.any() and not spoiled[: count - count // 4].any()
        bits = arrays["x"].view(bits_type(np.dtype(dtype)))[np.isnan(x)]
        assert len(bits) and not np.isin(bits, np.array(np.nan, dtype).view(bits.dtype)).all()


def test_fields_are_scaled_shifted_and_integers_are_in_range():
    problem = draw(lengths=(400,), rows=(300,))
    weight = np.concatenate([draw(seed=seed).shared["weight"] for seed in range(40)])
    assert abs(weight.mean() - 2) < 0.1 and abs(weight.std() - 0.5) < 0.1
    request = problem.requests[0]
    assert request["position"].dtype == np.int32 and request["choice"].dtype == np.int64
    assert request["position"].tolist() == list(range(100, 400))
    assert set(request["choice"].ravel().tolist()) == set(range(5)) and request["choice"].shape == (300, 2)
    assert problem.scalars == {"factor": 0.25}


def test_problems_are_repeatable_and_differ_by_seed():
    one, same, other = draw(seed=3), draw(seed=3), draw(seed=4)
    assert all(np.array_equal(one.requests[1][n], same.requests[1][n]) for n in one.requests[1])
    assert not np.array_equal(one.requests[1]["x"], other.requests[1]["x"])
    assert not np.array_equal(one.shared["table"], other.shared["table"])


def test_gradients_belong_to_whole_problems_and_change_nothing_else():
    part, all_rows = draw(lengths=(9, 4), rows=(9, 3)), draw(lengths=(9, 4), rows=(9, 4))
    assert all("dout" not in request for request in part.requests)
    assert [request["dout"].shape for request in all_rows.requests] == [(9, 10), (4, 10)]
    without = replace(FORM, gradients=None)
    alone = draw(lengths=(9, 4), rows=(9, 4), form=without)
    assert "dout" not in alone.requests[0] and without.entry_points == ("mix",)
    assert FORM.entry_points == ("mix", "mix_backward")
    assert np.array_equal(alone.requests[1]["x"], all_rows.requests[1]["x"])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ProblemShape(AXES, (4,), (4,), dtype="float64"), "dtype must be float32 or float16 or bfloat16"),
        (ProblemShape(AXES, (1,) * (MOST_REQUESTS + 1), (1,) * (MOST_REQUESTS + 1)), "at most 1024 requests"),
        (ProblemShape(AXES, (MOST_POSITIONS + 1,), (1,)), "requests of 131072 positions"),
    ],
)
def test_problems_outside_of_the_contract_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        FORM.draw(shape, np.random.default_rng(0), dtypes=DTYPES)


# ---- Lowering.

LAYOUTS = {
    "together": Layout("prefill", EVERYONE),
    "alone": Layout("prefill", (1,)),
    "reordered": Layout("prefill", (4, 2, 1, 0)),
    "pieces": Layout("chunked_prefill", EVERYONE, ((4, 5), (1, 31, 1), (), (0, 1), ())),
    "steps": Layout("decode", (1, 0), ((1,) * 33, (1,) * 9)),
    "padded": Layout("prefill", EVERYONE, padding=3),
    "padded steps": Layout("decode", (3, 0), ((1,), (1,) * 9), padding=2),
    "twice": Layout("prefill", (0, 0, 1)),
    "nobody": Layout("prefill", ()),
    "nothing": Layout("prefill", (2, 4)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_programs_put_every_row_where_its_span_says(name, dtype):
    layout, problem = LAYOUTS[name], draw(dtype=dtype)
    exact = evaluate(problem, FORM, formula, torch.float64)
    program = FORM.lower(problem, layout)
    found = rows_of(program, execute(program, Mix))
    wanted = {b for b in layout.requests if ROWS[b]}
    assert set(found) == {(quantity, b) for quantity in ("out", "size") for b in wanted}
    for (quantity, b), pieces in found.items():
        rows = np.concatenate(pieces)
        assert rows.dtype == (np.dtype(dtype) if quantity == "out" else np.float32)
        copies = layout.requests.count(b)
        assert distance(rows, np.concatenate([exact[quantity, b]] * copies)) < TOLERANCE[dtype]
    assert program.constant_axes == dict(AXES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_covered_once_and_nobodys_are_poisoned(name):
    layout, problem = LAYOUTS[name], draw()
    program = FORM.lower(problem, layout)
    height = program.inputs["x"].shape[0]
    assert all(program.inputs[n].shape[0] == height for n in ("position", "choice"))
    owned = np.zeros(height, int)
    for span in program.spans:
        if span.quantity == "out":
            owned[span.start : span.stop] += 1
            first = span.first_row
            piece = problem.requests[span.request]["x"][first : first + span.stop - span.start]
            assert np.array_equal(program.inputs["x"][span.start : span.stop], piece)
    assert (owned <= 1).all()
    assert np.isnan(program.inputs["x"][owned == 0]).all()
    assert height - owned.sum() == layout.padding * len(program.calls)
    views = [call.arguments["x"] for call in program.calls]
    assert [(v.start, v.stop) for v in views] == sorted((v.start, v.stop) for v in views)
    assert [v.stop for v in views][-1:] == ([height] if height else [])
    for call in program.calls:
        assert call.arguments["x"].stop - call.arguments["x"].start > layout.padding
        assert call.arguments["out"] == replace(call.arguments["x"], buffer="out")
        assert call.arguments["table"] == View("table") and call.arguments["factor"] == 0.25


def test_a_step_holds_one_piece_of_each_request():
    program = FORM.lower(draw(), LAYOUTS["pieces"])
    sizes = [call.arguments["x"].stop - call.arguments["x"].start for call in program.calls]
    assert sizes == [4 + 1 + 0, 5 + 31 + 1, 1]
    assert len(FORM.lower(draw(), LAYOUTS["steps"]).calls) == 33


def test_poison_follows_its_seed_and_padding_holds_any_integers():
    problem = draw()
    one, again, other = (
        FORM.lower(problem, Layout("prefill", EVERYONE, padding=40, poison_seed=seed)) for seed in (1, 1, 2)
    )
    for name in ("x", "position", "choice"):
        bits = [p.inputs[name].view(np.uint8) for p in (one, again, other)]
        assert np.array_equal(bits[0], bits[1]) and not np.array_equal(bits[0], bits[2])
    wild = one.inputs["choice"][-40:]
    assert (wild < 0).any() and (wild > 5).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requests", [(0, 1, 2, 3), (3, 0), (1,), (2,)])
def test_backward_is_one_call_of_all_tokens(requests, dtype):
    problem = whole(dtype=dtype)
    some = replace(problem, requests=tuple(problem.requests[b] for b in requests))
    lengths = tuple(problem.shape.lengths[b] for b in requests)
    some = replace(some, shape=replace(problem.shape, lengths=lengths, rows=lengths))
    exact = evaluate(some, FORM, formula, torch.float64)
    program = FORM.lower(problem, Layout("backward", requests))
    total = sum(lengths)
    assert [call.entry_point for call in program.calls] == (["mix", "mix_backward"] if total else [])
    found = rows_of(program, execute(program, Mix))
    for position, b in enumerate(requests):
        if problem.shape.rows[b]:
            (dx,) = found.pop(("dx", b))
            assert distance(dx, exact["dx", position]) < TOLERANCE[dtype]
    names = {name for name, request in found if request == WHOLE_PROBLEM}
    plain = requests == (0, 1, 2, 3)
    suffix = "" if plain else f" of {','.join(map(str, requests))}"
    assert names == ({f"dweight{suffix}", f"dtable{suffix}"} if total else set())
    for name in ("dweight", "dtable") if total else ():
        (rows,) = found.pop((name + suffix, WHOLE_PROBLEM))
        assert rows.dtype == np.float32 and distance(rows, exact[name, WHOLE_PROBLEM]) < 1e-5
    assert not found


def test_backward_is_told_what_it_reads():
    call = FORM.lower(whole(), Layout("backward", (0, 1, 2, 3))).calls[1]
    assert set(call.arguments) == {
        *("x", "choice", "weight", "factor", "size", "dout", "dx", "dweight", "dtable", "accumulate")
    }


def test_a_partition_of_the_backward_accumulates():
    problem, pieces = whole(), (64, 1, 65)
    program = FORM.lower(problem, Layout("backward", (0,), (pieces,)))
    gradients = [call for call in program.calls if call.entry_point == "mix_backward"]
    assert [call.arguments["accumulate"] for call in gradients] == [0, 1, 1]
    for name in ("x", "dout", "size", "dx"):
        views = [call.arguments[name] for call in gradients]
        assert [(v.start, v.stop) for v in views] == [(0, 64), (64, 65), (65, 130)]
    found = rows_of(program, execute(program, Mix))
    once = FORM.lower(problem, Layout("backward", (0,)))
    at_once = rows_of(once, execute(once, Mix))
    assert set(found) == set(at_once)
    for key, (rows,) in found.items():
        assert distance(rows, at_once[key][0]) < 1e-5, key


def test_gradients_are_of_finite_numbers():
    problem = whole("non_finite")
    program = FORM.lower(problem, Layout("backward", (0, 1, 2, 3)))
    assert np.isfinite(program.inputs["x"]).all()
    spoiled = np.concatenate([r["x"] for r in problem.requests])
    assert np.array_equal(program.inputs["x"], np.where(np.isfinite(spoiled), spoiled, 0))
    assert finite(np.array([3, -1])).tolist() == [3, -1]
    assert finite(np.array([np.inf, 1, np.nan], BFLOAT16)).tolist() == [0, 1, 0]
    assert not np.isfinite(FORM.lower(problem, Layout("update", (0, 1, 2, 3))).inputs["x"]).all()


@pytest.mark.parametrize(
    ("problem", "layout", "message"),
    [
        (draw(), Layout("prefill", (0,), shared_prefix=4), "rows share no prefix"),
        (draw(), Layout("update", (0,)), "update computes every row of a sequence"),
        (draw(), Layout("backward", (0,)), "backward computes every row of a sequence"),
        (draw(), Layout("backward", (1,)), "gradients are drawn where every request wants all its rows"),
        (whole(), Layout("update", (1,), ((33,),)), "update takes no partition"),
        (whole(), Layout("backward", (0, 1), ((130,), (33,))), "backward takes no partition of several"),
        (whole(), Layout("backward", (0,), ((64, 65),)), r"must add up to each request's rows \[130\]"),
        (draw(), Layout("decode", (0, 1), ((9,), (32,))), r"must add up to each request's rows \[9, 33\]"),
        (draw(), Layout("decode", (0, 1), ((9,),)), r"must add up to each request's rows \[9, 33\]"),
    ],
)
def test_unfit_layouts_are_refused(problem, layout, message):
    with pytest.raises(ValueError, match=message):
        FORM.lower(problem, layout)


def test_load_axes_are_those_of_the_largest_call():
    shape = draw().shape
    assert FORM.load_axes(shape, LAYOUTS["together"]) == {"width": 10, "classes": 5, "tokens": 43}
    assert FORM.load_axes(shape, LAYOUTS["pieces"])["tokens"] == 37
    assert FORM.load_axes(shape, LAYOUTS["padded"])["tokens"] == 46
    assert FORM.load_axes(shape, LAYOUTS["nobody"])["tokens"] == 0


# ---- Relations.


def test_relations_name_the_regimes_that_they_hold_in():
    plain = {each.name: each.regimes for each in relations(gradients=False, graph=False)}
    assert "graph_replay" not in plain and not any(name.startswith("gradient") for name in plain)
    assert all("backward" not in regimes for regimes in plain.values())
    found = {each.name: each.regimes for each in relations(gradients=True, graph=True)}
    assert {n for n in found if n not in plain} == {
        *("graph_replay", "gradient_rerun", "gradient_packing", "gradient_accumulation")
    }
    for name, regimes in found.items():
        assert set(regimes) <= set(REGIMES)
        assert ("backward" in regimes) == (
            name.startswith("gradient") or name in ("fresh_process", "graph_replay", "implementations_agree")
        )
    assert (*FORWARD, *BACKWARD) == TRAINING


# ---- Timing.

WORKLOADS = {
    phase: Workload(phase, (("tokens", tokens), ("width", 10), ("classes", 5)))
    for phase, tokens in (("decode", 3), ("update", 50), ("backward", 50))
}
ROW = {"x": 40, "position": 4, "choice": 16, "size": 4, "dout": 40}


def timed(phase, variants, pool, contiguous=False, dtype="float32"):
    rng = np.random.default_rng(1)
    return FORM.timed(WORKLOADS[phase], rng, variants, pool, contiguous=contiguous, dtype=dtype)


@pytest.mark.parametrize("phase", WORKLOADS)
@pytest.mark.parametrize("pool", [0, 3000, 1 << 20])
def test_timed_calls_walk_through_pools_of_the_size_asked(phase, pool):
    variants, tokens = 12, WORKLOADS[phase].shape["tokens"]
    program = timed(phase, variants, pool)
    read = ("x", "position", "choice") + (("dout", "size") if phase == "backward" else ())
    assert len(program.calls) == variants
    for name in read:
        one = tokens * ROW[name]
        places = min(variants, max(1, -(-pool // one)))
        assert program.inputs[name].nbytes == places * one
        views = [call.arguments[name] for call in program.calls if name in call.arguments]
        assert all(v.stop - v.start == tokens for v in views)
        if views:
            assert len({v.start for v in views}) == places
    assert program.inputs["weight"].size == 10 * min(variants, max(1, -(-pool // 40)))
    assert len({v.start for v in (call.arguments["weight"] for call in program.calls)}) == (
        program.inputs["weight"].size // 10
    )


def test_timed_calls_write_places_of_their_own():
    for phase, name in (("update", "out"), ("backward", "dx")):
        program = timed(phase, 8, 1 << 20)
        starts = [call.arguments[name].start for call in program.calls]
        assert starts == [50 * i for i in range(8)] and program.outputs[name][0] == (400, 10)
    assert set(program.outputs) == {"dx", "dweight", "dtable"}


def test_gradients_of_parameters_share_the_pool():
    """A table of gradients may be larger than all inputs together: it is stored as often as fits."""
    for pool, places in ((0, 1), (401, 3), (1 << 20, 8)):
        program = timed("backward", 8, pool)
        assert program.outputs["dtable"] == ((places * 5, 10), "float32")
        views = [call.arguments["dtable"] for call in program.calls]
        assert [v.start for v in views] == [i % places * 5 for i in range(8)]
        assert all(v.stop - v.start == 5 for v in views)
        assert all(call.arguments["accumulate"] == 0 for call in program.calls)


def test_timed_programs_compute_what_they_say():
    program = timed("update", 5, 1 << 20, dtype="bfloat16")
    buffers = execute(program, Mix)
    for call in program.calls:
        x, weight, choice, position = (
            program.inputs[name][call.arguments[name].start : call.arguments[name].stop]
            for name in ("x", "weight", "choice", "position")
        )
        out = call.arguments["out"]
        places = call.arguments["table"]
        table = program.inputs["table"][places.start : places.stop].astype(np.float64)
        exact = x.astype(np.float64) * weight.astype(np.float64) * 0.25 + table[choice].sum(1)
        exact += position[:, None] / 64
        assert distance(buffers["out"][out.start : out.stop], exact) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("phase", WORKLOADS)
def test_contiguous_form_calls_the_peer_with_what_the_entry_point_reads(phase):
    ours, theirs = timed(phase, 3, 1 << 20), timed(phase, 3, 1 << 20, contiguous=True)
    assert theirs.outputs == {} and {call.entry_point for call in theirs.calls} == {"peer"}
    entry = "mix_backward" if phase == "backward" else "mix"
    assert {call.entry_point for call in ours.calls} == {entry}
    for mine, other in zip(ours.calls, theirs.calls, strict=True):
        written = set(mine.arguments) - set(other.arguments)
        wanted = {"dx", "dweight", "dtable", "accumulate"} if phase == "backward" else {"out", "size"}
        assert written == wanted
        assert all(mine.arguments[name] == value for name, value in other.arguments.items())


def test_moved_counts_every_tensor_once():
    forward = 50 * (40 + 4 + 16 + 40 + 4) + 40 + 200
    assert FORM.moved(WORKLOADS["update"], "float32") == forward
    half = 50 * (20 + 4 + 16 + 20 + 4) + 20 + 100
    assert FORM.moved(WORKLOADS["update"], "bfloat16") == half
    backward = FORM.moved(WORKLOADS["backward"], "float32")
    assert backward == 50 * (40 + 16 + 40 + 40) + 40 + 40 + 200


# ---- The oracle.


def test_the_oracle_gives_each_request_its_rows():
    problem = whole()
    exact = evaluate(problem, FORM, formula, torch.float64)
    assert set(exact) == {(n, b) for n in ("out", "size", "dx") for b in (0, 1, 3)} | {
        ("dweight", WHOLE_PROBLEM),
        ("dtable", WHOLE_PROBLEM),
    }
    assert all(rows.dtype == np.float64 for rows in exact.values())
    x, dout = (np.concatenate([r[n] for r in problem.requests]).astype(np.float64) for n in ("x", "dout"))
    assert np.allclose(exact["dweight", WHOLE_PROBLEM], (x * dout * 0.25).sum(0), rtol=1e-12)
    assert np.allclose(exact["dx", 1], dout[130:163] * problem.shared["weight"].astype(np.float64) * 0.25)
    assert evaluate(whole(lengths=(0, 0)), FORM, formula, torch.float64) == {}


def test_the_oracle_has_no_gradients_where_none_were_drawn():
    assert {name for name, _ in evaluate(draw(), FORM, formula, torch.float64)} == {"out", "size"}
    without = replace(FORM, gradients=None)
    assert {name for name, _ in evaluate(whole(), without, formula, torch.float64)} == {"out", "size"}


def test_the_oracle_spreads_nothing_over_rows():
    problem = whole("non_finite")
    exact = evaluate(problem, FORM, formula, torch.float64)
    spoiled = ~np.isfinite(problem.requests[0]["x"]).all(1)
    assert np.array_equal(~np.isfinite(exact["size", 0]), spoiled)
    for name, b in exact:
        if name.startswith("d"):
            assert np.isfinite(exact[name, b]).all()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_the_oracle_computes_in_the_dtype_asked(dtype, error):
    problem = whole()
    exact = evaluate(problem, FORM, formula, torch.float64)
    found = evaluate(problem, FORM, formula, dtype)
    assert set(found) == set(exact)
    errors = {key: distance(found[key], exact[key]) for key in exact}
    assert 0 < max(errors.values()) < error


# ---- Every operator on rows.


@pytest.mark.parametrize(
    "operator",
    [each for each in ops.OPERATORS if each.name != "attention"],
    ids=lambda each: f"{each.name} {each.backend}",
)
def test_operators_on_rows_are_wired(operator):
    """What an audit asks of a record: distinct timed calls, costs, kinds that draw, known relations."""
    contract = operator.contract
    assert set(operator.regimes) <= set(TRAINING) and set(operator.kinds) <= set(KINDS)
    assert "study" in operator.grids and ("cpu" in operator.grids or operator.backend != "cpu")
    for workload in {each for grid in operator.grids.values() for each in grid}:
        cost = operator.cost(workload)
        assert cost.bytes > 0 and cost.flops >= 0
        for name, value in operator.constant_axes(workload).items():
            contract.axis(name).check(value)
    for scope in operator.scopes:
        assert set(scope) == {axis.name for axis in contract.axes if axis.constant}
        for name, value in scope.items():
            contract.axis(name).check(value)
    axes = {axis.name: axis.low for axis in contract.axes if axis.constant} | dict(operator.scopes[0])
    for kind in operator.kinds:
        shape = ProblemShape(tuple(axes.items()), (3, 70), (3, 70), kind, contract.dtypes[0])
        problem = operator.draw(shape, np.random.default_rng(0))
        for regime in operator.regimes:
            program = operator.lower(problem, Layout(regime, (1, 0)))
            assert program.calls and {call.entry_point for call in program.calls} <= set(
                operator.entry_points
            )
    problem_axes = operator.load_axes(shape, Layout("update", (0, 1)))
    assert problem_axes["tokens"] == 73 and ACCUMULATION % 64 == 0
    with pytest.raises(ValueError, match="dtype must be"):
        operator.draw(replace(shape, dtype="float8"), np.random.default_rng(0))
