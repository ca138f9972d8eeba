"""Each relation rejects the broken attentions that it is there for, and accepts the good one."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.audit.local import LocalRunner
from tests.controls.broken import CONTROLS, GOOD, Control

from kernelbraid.audit.checks import check, check_all
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.verify import with_numerics
from kernelbraid.contract import Requirement, Source
from kernelbraid.ir.evidence import Level, Verdict
from kernelbraid.ops.attention.spec import ATTENTION

PLAN = Plan(
    level=Level.SCREEN,
    constant_axes=({"query_heads": 3, "kv_heads": 1, "head_dim": 64},),
    numerics={"chunk": 256, "key_block": 32, "exp2_degree": 6},
    edges={},
    dtype="float32",
    seed=20,
    root_agrees=True,
)


def requirement(name: str) -> Requirement:
    return next(r for r in ATTENTION.contract.requirements if r.id == f"{ATTENTION.contract.name}/{name}")


def verdict(control: Control, runner: LocalRunner, name: str) -> Verdict:
    return check(ATTENTION, requirement(name), replace(PLAN, edges=control.edges), runner)


def test_the_good_attention_holds_every_requirement(tmp_path: Path) -> None:
    verdicts = list(check_all(ATTENTION, PLAN, LocalRunner(GOOD, tmp_path, GOOD)))
    assert [v.requirement for v in verdicts] == [r.id for r in ATTENTION.contract.requirements]
    assert [v.difference for v in verdicts if not v.held] == []
    assert all(v.cases and v.comparisons for v in verdicts)


def test_the_good_attention_agrees_with_an_independent_one(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "examples" / "roots" / "straightforward.py"
    root = with_numerics(Source(path.read_text()), PLAN.numerics)
    runner = LocalRunner(GOOD, tmp_path, root.text)
    for regime in ATTENTION.regimes:
        agreed = check(ATTENTION, requirement(f"implementations_agree/{regime}"), PLAN, runner)
        assert agreed.held and agreed.comparisons, agreed


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_broken_attention_is_rejected(control: Control, tmp_path: Path) -> None:
    runner = LocalRunner(control.text, tmp_path, GOOD)
    rejection = verdict(control, runner, control.rejected_by)
    assert not rejection.held
    assert rejection.requirement.endswith(control.rejected_by)
    difference = rejection.difference
    assert difference is not None
    assert difference.case.startswith(f"{rejection.requirement}/screen/float32/3-1-64/256-32-6/")
    assert "row" in difference.place and "0x" in difference.left
    if rejection.error is None:
        assert difference.unequal > 0
        assert difference.left != difference.right
    else:
        assert rejection.error > 1
    for name in control.held:
        held = verdict(control, runner, name)
        assert held.held, held


def test_an_edge_must_be_declared_to_be_found(tmp_path: Path) -> None:
    control = next(c for c in CONTROLS if c.edges)
    undeclared = check(ATTENTION, requirement(control.rejected_by), PLAN, LocalRunner(control.text, tmp_path))
    assert undeclared.held


def test_controls_cover_every_relation() -> None:
    rejected = {control.rejected_by.split("/")[0] for control in CONTROLS}
    assert rejected >= {relation.name for relation in ATTENTION.contract.relations}
