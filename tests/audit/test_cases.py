"""Which cases an audit runs: rebuilt from their ids, on both sides of every edge, inside the domain."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.audit.toy import SUMS

from kernelbraid.audit.cases import ACCURACY_KINDS, RELATIONS, Case, cases, rebuild, vacuous
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.process import require_same_calls
from kernelbraid.contract import Regime, Requirement
from kernelbraid.ir.evidence import Level
from kernelbraid.ops import OPERATORS
from kernelbraid.ops.attention.spec import ATTENTION, FORWARD
from kernelbraid.ops.problem import INPUT_KINDS, Layout, Operator, ProblemShape

EDGES = {
    "batch": (3, 17, 700),
    "query_length": (2, 40, 300),
    "key_length": (200, 700, 3000, 20000),
    "page_size": (32,),
}
PLAN = Plan(
    level=Level.SCREEN,
    constant_axes=({"query_heads": 3, "kv_heads": 1, "head_dim": 64},),
    numerics={"chunk": 1024, "key_block": 64, "exp2_degree": 6},
    edges=EDGES,
    dtype="float32",
    seed=11,
    root_agrees=True,
)
CONTRACT = ATTENTION.contract
_CONSTANT = tuple(PLAN.constant_axes[0].items())


def requirement(name: str) -> Requirement:
    return next(r for r in CONTRACT.requirements if r.id == f"{CONTRACT.name}/{name}")


def all_cases(plan: Plan, operator: Operator = ATTENTION) -> Iterator[Case]:
    for each in operator.contract.requirements:
        yield from cases(operator, each, plan)


def layouts(case: Case) -> list[Layout]:
    executions = [case.left, *case.between] + ([case.right] if case.right is not None else [])
    return [execution.layout for execution in executions]


def key_counts(shape: ProblemShape, layout: Layout) -> set[int]:
    """How many keys the computed rows see."""
    return {
        count
        for b in layout.requests
        for count in range(shape.lengths[b] - shape.rows[b] + 1, shape.lengths[b] + 1)
    }


def rows_of_calls(shape: ProblemShape, layout: Layout) -> set[int]:
    """The most rows of a request in each call."""
    pieces = layout.partition or tuple((shape.rows[b],) for b in layout.requests)
    return {max(step) for step in zip_longest(*pieces, fillvalue=0)}


# ---- identity


@pytest.mark.parametrize("level", list(Level))
def test_equal_plans_give_equal_cases_with_distinct_ids(level: Level) -> None:
    plan = replace(PLAN, level=level)
    found = list(all_cases(plan))
    assert found == list(all_cases(plan))
    assert len({case.id for case in found}) == len(found)


def test_another_seed_draws_other_problems() -> None:
    seeds = {case.seed for case in all_cases(PLAN)}
    assert not seeds & {case.seed for case in all_cases(replace(PLAN, seed=12))}


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("edges", [{}, EDGES])
def test_every_case_is_rebuilt_from_its_id(level: Level, edges: dict[str, tuple[int, ...]]) -> None:
    plan = replace(PLAN, level=level, edges=edges)
    for each in CONTRACT.requirements:
        found = list(cases(ATTENTION, each, plan))
        for case in found[:1] + found[-1:]:
            again, of = rebuild(ATTENTION, case.id)
            assert again == case
            assert (of.numerics, of.seed, of.edges) == (plan.numerics, plan.seed, plan.edges)


def test_a_case_belongs_to_one_set_of_constant_axes() -> None:
    others = ({"query_heads": 8, "kv_heads": 8, "head_dim": 128}, *PLAN.constant_axes)
    both = list(cases(ATTENTION, requirement("paging/decode"), replace(PLAN, constant_axes=others)))
    assert {dict(case.shape.constant_axes)["head_dim"] for case in both} == {64, 128}
    assert set(cases(ATTENTION, requirement("paging/decode"), PLAN)) <= set(both)
    assert rebuild(ATTENTION, both[0].id)[0] == both[0]


@pytest.mark.parametrize(
    "case_id",
    [
        "",
        "attention",
        "attention/1/rerun/decode",
        "attention/1/rerun/decode/screen/float32/3-1-64/1024-64-6/none/11/999999",
        "attention/1/rerun/decode/screen/float32/3-1-65/1024-64-6/none/11/0",
        "attention/1/rerun/decode/screen/float16/3-1-64/1024-64-6/none/11/0",
        "attention/1/rerun/decode/screen/float32/3-1-64/1000-64-6/none/11/0",
        "attention/1/rerun/decode/screen/float32/3-1/1024-64-6/none/11/0",
        "attention/1/rerun/decode/soon/float32/3-1-64/1024-64-6/none/11/0",
        "attention/1/rerun/decode/screen/float32/3-1-64/1024-64-6/batch/11/0",
        "attention/1/rerun/decode/screen/float32/3-1-64/1024-64-6/none/eleven/0",
        "attention/1/rerun/backward/screen/float32/3-1-64/1024-64-6/none/11/0",
        "sums/1/rerun/decode/screen/float32/8/16/none/11/0",
    ],
)
def test_what_is_not_the_id_of_a_case_is_refused(case_id: str) -> None:
    with pytest.raises(ValueError, match="case"):
        rebuild(ATTENTION, case_id)


# ---- coverage


def test_every_relation_of_a_contract_has_a_test() -> None:
    named = {relation.name for operator in OPERATORS for relation in operator.contract.relations}
    assert named | {"graph_replay", "gradient_rerun", "gradient_packing"} == set(RELATIONS)


@pytest.mark.parametrize("regime", FORWARD)
@pytest.mark.parametrize("level", [Level.SCREEN, Level.FULL])
def test_a_replay_makes_the_captured_calls_on_buffers_of_equal_shapes(regime: Regime, level: Level) -> None:
    wanted = Requirement(f"{CONTRACT.name}/graph_replay/{regime}", "relation", "graph_replay", regime)
    found = list(cases(ATTENTION, wanted, replace(PLAN, level=level)))
    assert len(found) >= 4
    for case in found:
        assert case.right is not None and case.right.captured is not None and case.left.captured is None
        problem = ATTENTION.draw(case.shape, np.random.default_rng(case.seed))
        captured = ATTENTION.lower(problem, case.right.captured)
        program = ATTENTION.lower(problem, case.right.layout)
        require_same_calls(captured, program)
        differing = {
            name
            for name, array in captured.inputs.items()
            if not np.array_equal(array.view(np.int32), program.inputs[name].view(np.int32))
        }
        assert differing >= {"q", "k", "v"}, "nothing is where it was at the capture"
        assert differing & {"cu_seqlens", "cu_seqlens_q", "seqlens_k"}, "lengths change with it"


def test_other_calls_are_no_replay() -> None:
    problem = ATTENTION.draw(ProblemShape(_CONSTANT, (5, 9), (5, 9)), np.random.default_rng(0))
    first, second = (ATTENTION.lower(problem, Layout("prefill", order)) for order in ((0, 1), (0, 0)))
    with pytest.raises(ValueError, match="equal shapes by equal calls"):
        require_same_calls(first, second)


@pytest.mark.parametrize("level", [Level.SCREEN, Level.FULL])
def test_every_requirement_has_cases(level: Level) -> None:
    for each in CONTRACT.requirements:
        assert next(cases(ATTENTION, each, replace(PLAN, level=level)), None) is not None, each.id


def test_smoke_asks_little_and_agreement_only_equal_bits_ids() -> None:
    smoke = replace(PLAN, level=Level.SMOKE)
    asked = [each for each in CONTRACT.requirements if not vacuous(each, smoke)]
    assert 5 < len(asked) < len(CONTRACT.requirements) / 2
    for each in CONTRACT.requirements:
        assert len(list(cases(ATTENTION, each, smoke))) == (each in asked)
        alone = replace(PLAN, root_agrees=False)
        assert vacuous(each, alone) == (each.name == "implementations_agree")
        assert any(cases(ATTENTION, each, alone)) != vacuous(each, alone)


@pytest.mark.parametrize("relation", ["decode_equals_prefill/decode", "chunked_prefill/chunked_prefill"])
@pytest.mark.parametrize("level", [Level.SCREEN, Level.FULL])
def test_rows_lie_on_both_sides_of_every_edge_of_positions(relation: str, level: Level) -> None:
    found = list(cases(ATTENTION, requirement(relation), replace(PLAN, level=level)))
    assert all(case.right is not None for case in found)
    counts = set().union(*(key_counts(case.shape, case.right.layout) for case in found if case.right))
    edges = {16, 64, 128, 1024, 2048, *EDGES["key_length"]}
    if level is Level.FULL:
        assert 131072 in counts
    for edge in edges:
        assert {edge - 1, edge, edge + 1} <= counts, edge


def test_a_screen_leaves_an_edge_that_needs_too_much_memory_to_a_full_check() -> None:
    plan = replace(PLAN, edges={"key_length": (100_000,)})
    longest = {
        level: max(max(case.shape.lengths) for case in all_cases(replace(plan, level=level)))
        for level in (Level.SCREEN, Level.FULL)
    }
    assert longest[Level.SCREEN] < 10_000 and longest[Level.FULL] == 131072


def test_updates_cross_blocks_and_the_chunk() -> None:
    found = list(cases(ATTENTION, requirement("update_equals_rollout/update"), PLAN))
    lengths = {n for case in found for n in case.shape.lengths}
    assert {0, 1, 2} <= lengths and max(lengths) > 1024
    for edge in (16, 64, 128):
        assert lengths & {edge - 1, edge} and edge + 1 in lengths
    rollouts = {case.right.layout.regime for case in found if case.right}
    assert {"decode", "prefill"} <= rollouts or {"decode", "chunked_prefill"} <= rollouts


@pytest.mark.parametrize("regime", ["prefill", "chunked_prefill", "decode", "update"])
def test_batches_of_every_size_worth_a_call(regime: str) -> None:
    found = list(cases(ATTENTION, requirement(f"batch/{regime}"), PLAN))
    sizes = {len(layout.requests) for case in found for layout in layouts(case)}
    assert {1, 2, 1023, 1024} <= sizes
    for edge in EDGES["batch"]:
        assert {edge - 1, edge, edge + 1} <= sizes
    assert any(len(set(layout.requests)) < len(layout.requests) for case in found for layout in layouts(case))
    for case in found:
        assert case.right is not None
        if len(case.shape.lengths) == 1024:
            longest = max(case.shape.lengths[b] for b in case.right.layout.requests)
            assert longest > 64, "a batch of short requests alone would show no schedule"


def test_calls_on_both_sides_of_every_edge_of_rows() -> None:
    found = list(cases(ATTENTION, requirement("chunked_prefill/chunked_prefill"), PLAN))
    rows = {most for case in found for layout in layouts(case) for most in rows_of_calls(case.shape, layout)}
    for edge in EDGES["query_length"]:
        assert {edge - 1, edge, edge + 1} <= rows


@pytest.mark.parametrize("regime", ["prefill", "chunked_prefill", "decode"])
def test_page_sizes_of_the_whole_range_and_any_order(regime: str) -> None:
    found = list(cases(ATTENTION, requirement(f"paging/{regime}"), PLAN))
    right = [case.right.layout for case in found if case.right]
    assert {1, 31, 32, 33, 256} <= {layout.page_size for layout in right}
    assert all(layout.page_seed for layout in right)


def test_a_full_check_tries_every_page_size() -> None:
    full = replace(PLAN, level=Level.FULL)
    sizes = {
        layout.page_size
        for regime in ("prefill", "chunked_prefill", "decode")
        for case in cases(ATTENTION, requirement(f"paging/{regime}"), full)
        for layout in layouts(case)
    }
    assert sizes == set(range(1, 257))


@pytest.mark.parametrize(
    "name",
    [
        "decode_equals_prefill/decode",
        "chunked_prefill/chunked_prefill",
        "update_equals_rollout/update",
    ],
)
def test_every_kind_of_input_is_drawn(name: str) -> None:
    assert {case.shape.kind for case in cases(ATTENTION, requirement(name), PLAN)} == set(INPUT_KINDS)


def test_over_many_audits_every_relation_sees_every_kind() -> None:
    seen = {
        case.shape.kind
        for seed in range(40)
        for case in cases(ATTENTION, requirement("padding/decode"), replace(PLAN, seed=seed))
    }
    assert seen == set(INPUT_KINDS)


def test_errors_are_taken_where_they_mean_something() -> None:
    full = replace(PLAN, level=Level.FULL)
    for name in ("accuracy_out/prefill", "accuracy_lse/update"):
        found = list(cases(ATTENTION, requirement(name), full))
        assert {case.shape.kind for case in found} == set(ACCURACY_KINDS)
        assert all(case.right is None for case in found)


def test_empty_requests_and_requests_without_rows_take_part() -> None:
    shapes = [case.shape for case in cases(ATTENTION, requirement("decode_equals_prefill/decode"), PLAN)]
    assert any(n == 0 for shape in shapes for n in shape.lengths)
    assert any(r == 0 and n > 0 for shape in shapes for n, r in zip(shape.lengths, shape.rows, strict=True))


def test_reruns_have_other_work_between_and_processes_differ() -> None:
    reruns = list(cases(ATTENTION, requirement("rerun/decode"), PLAN))
    assert any(case.between for case in reruns) and any(not case.between for case in reruns)
    assert all(case.right is not None and case.right.repeat for case in reruns)
    for name, process in (("fresh_process/decode", "fresh"), ("implementations_agree/decode", "root")):
        for case in cases(ATTENTION, requirement(name), PLAN):
            assert case.left.process == "main" and case.right is not None and case.right.process == process


def test_prefixes_are_shared_by_one_side() -> None:
    for regime in ("prefill", "chunked_prefill", "decode"):
        found = list(cases(ATTENTION, requirement(f"prefix_cache/{regime}"), PLAN))
        assert any(layout.shared_prefix for case in found for layout in layouts(case))
        for case in found:
            contexts = [n - r for n, r in zip(case.shape.lengths, case.shape.rows, strict=True)]
            assert min(contexts) >= case.shape.shared_prefix > 0


def test_poison_differs_between_the_two_sides() -> None:
    for case in all_cases(PLAN):
        if case.right is not None and case.right.layout.requests == case.left.layout.requests:
            same_process = case.left.process == case.right.process
            assert not same_process or case.left.layout.poison_seed != case.right.layout.poison_seed, case.id


# ---- domain


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    level=st.sampled_from(Level),
    chunk=st.sampled_from((256, 1024, 4096)),
    key_block=st.sampled_from((16, 64, 256)),
    batch=st.lists(st.integers(1, 1024), max_size=3),
    query=st.lists(st.integers(1, 131072), max_size=2),
    key=st.lists(st.integers(1, 131072), max_size=3),
    page=st.lists(st.integers(1, 256), max_size=2),
)
def test_cases_stay_inside_the_domain(
    seed: int,
    level: Level,
    chunk: int,
    key_block: int,
    batch: list[int],
    query: list[int],
    key: list[int],
    page: list[int],
) -> None:
    edges = {"batch": batch, "query_length": query, "key_length": key, "page_size": page}
    plan = replace(
        PLAN,
        level=level,
        seed=seed,
        numerics={"chunk": chunk, "key_block": key_block, "exp2_degree": 6},
        edges={axis: tuple(sorted(set(values))) for axis, values in edges.items()},
    )
    rng = np.random.default_rng(seed)
    for case in all_cases(plan):
        for layout in layouts(case):
            if rng.random() < 0.05:
                for axis, value in ATTENTION.load_axes(case.shape, layout).items():
                    CONTRACT.axis(axis).check(value)
            assert len(layout.requests) <= 1024
            if layout.partition:
                wanted = [case.shape.rows[b] for b in layout.requests]
                assert [sum(pieces) for pieces in layout.partition] == wanted
                assert all(piece > 0 for pieces in layout.partition for piece in pieces)
            if layout.regime == "update":
                assert all(case.shape.rows[b] == case.shape.lengths[b] for b in layout.requests)


def test_another_operator_has_cases_inside_its_own_limits() -> None:
    plan = Plan(Level.FULL, ({"width": 8},), {"block": 16}, {"query_length": (32,)}, "float32", 1, True)
    for case in all_cases(plan, SUMS):
        for layout in layouts(case):
            for axis, value in SUMS.load_axes(case.shape, layout).items():
                SUMS.contract.axis(axis).check(value)
