"""Operators on rows as audit, search and command line see them: what follows from form and contract."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from kernelbraid.contract import Contract, Cost, Workload
from kernelbraid.ops.problem import Operator, Peer, Problem, Rows
from kernelbraid.ops.rows import KINDS, TRAINING, RowForm

FILES = {"cpu": ("cpu.py", "peers.py"), "cuda": ("gpu.py", "peers_gpu.py")}
"""Backend -> the implementation, and that of peers, in the operator's folder."""


def oracle(operator: str, function: str, problem: Problem) -> Rows:
    """Call a function of an operator's reference.py, which needs torch: it is imported at the first call."""
    rows: Rows = getattr(import_module(f"kernelbraid.ops.{operator}.reference"), function)(problem)
    return rows


def on_rows(
    backend: str,
    contract: Contract,
    form: RowForm,
    *,
    grids: Mapping[str, tuple[Workload, ...]],
    cost: Callable[..., Cost],
    peers: tuple[Peer, ...],
    scopes: tuple[Mapping[str, int], ...],
    **others: Any,
) -> Operator:
    """Make the record of an operator that is differentiable and laid out as its form says.

    Args:
        backend: `cpu` or `cuda`.
        contract: its contract there; workloads are timed in the first of its dtypes.
        form: its tensors and entry points.
        grids: named workloads.
        cost: of a workload, with the keyword `dtype`.
        peers: whom a benchmark runs beside it.
        scopes: constant axes to verify beside those of the grids.
        others: any other field of `Operator`, such as `figures`, or one that differs from the above.
    """
    name, dtype = contract.operator, contract.dtypes[0]
    file, peer_file = FILES[backend]
    fields: dict[str, Any] = {
        "files": (file,),
        "entry_points": form.entry_points,
        "regimes": TRAINING,
        "draw": partial(form.draw, dtypes=contract.dtypes),
        "lower": form.lower,
        "reference": partial(oracle, name, "reference"),
        "vendor": partial(oracle, name, "vendor"),
        "cost": partial(cost, dtype=dtype),
        "load_axes": form.load_axes,
        "timed": partial(form.timed, dtype=dtype),
        "kinds": KINDS,
        **others,
    }
    return Operator(
        name=name,
        backend=backend,
        contract=contract,
        grids=grids,
        peers=peers,
        peer_file=peer_file,
        scopes=scopes,
        **fields,
    )
