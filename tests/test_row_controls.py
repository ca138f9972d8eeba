"""Each relation rejects the broken operators on rows that it is there for, and accepts the shipped ones."""

from pathlib import Path
from types import ModuleType

import pytest
from numba.core.dispatcher import Dispatcher
from tests.audit.local import LocalRunner, load
from tests.controls.rows import OPERATORS, Control, axes, controls

from kernelbraid import ops
from kernelbraid.audit.cases import Process
from kernelbraid.audit.checks import check, check_all
from kernelbraid.audit.drawings import Plan
from kernelbraid.ir.evidence import Level
from kernelbraid.ops.problem import Operator

EVERY = [pytest.param(name, each, id=f"{name}: {each.name}") for name in OPERATORS for each in controls(name)]


KERNELS: dict[str, ModuleType] = {}
"""Text of kernels -> a module that has compiled them: most controls differ in the host's part alone."""


class SharingRunner(LocalRunner):
    """Compiles equal kernels once for all sources."""

    def module(self, process: Process) -> ModuleType:
        module = super().module(process)
        kernels = str(self._texts[process]).split("# ---- Host.")[0]
        known = module if "__file__" in kernels else KERNELS.setdefault(kernels, module)
        for name, value in vars(known).items():
            if isinstance(value, Dispatcher) or name == "UNCOMPILED":
                setattr(module, name, value)
        return module


def plan(operator: Operator, folder: Path, control: Control | None = None) -> Plan:
    module = load(ops.source(operator).text, folder)
    edges = {"tokens": control.tokens} if control and control.tokens else {}
    constant = axes(operator.name)
    numerics = module.numerics(constant)
    return Plan(Level.SCREEN, (constant,), numerics, edges, operator.contract.dtypes[0], 20, root_agrees=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_shipped_operator_holds_every_requirement(name: str, tmp_path: Path) -> None:
    operator = ops.get(name)
    text = ops.source(operator).text
    verdicts = list(check_all(operator, plan(operator, tmp_path), SharingRunner(text, tmp_path, text)))
    assert [v.requirement for v in verdicts] == [r.id for r in operator.contract.requirements]
    assert [v.difference for v in verdicts if not v.held] == []
    assert all(v.cases and v.comparisons for v in verdicts)


@pytest.mark.parametrize(("name", "control"), EVERY)
def test_a_broken_operator_is_rejected(name: str, control: Control, tmp_path: Path) -> None:
    operator = ops.get(name)
    good = ops.source(operator).text
    runner = SharingRunner(control.text(name), tmp_path, good)
    wanted = f"{operator.contract.name}/{control.rejected_by}"
    requirement = next(each for each in operator.contract.requirements if each.id == wanted)
    rejection = check(operator, requirement, plan(operator, tmp_path, control), runner)
    assert not rejection.held
    difference = rejection.difference
    assert difference is not None and "row" in difference.place
    if rejection.error is None:
        assert difference.unequal > 0 and difference.left != difference.right
    else:
        assert rejection.error > 1


@pytest.mark.parametrize("name", OPERATORS)
def test_controls_cover_every_relation_and_bound(name: str) -> None:
    contract = ops.get(name).contract
    rejected = {control.rejected_by.split("/")[0] for control in controls(name)}
    assert rejected >= {relation.name for relation in contract.relations}
    assert rejected >= {f"accuracy_{bound.quantity}" for bound in contract.accuracy}


def test_every_operator_on_rows_has_controls() -> None:
    assert set(OPERATORS) == {each.name for each in ops.OPERATORS} - {"attention"}
