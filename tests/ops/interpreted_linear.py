"""The linear layer's Triton kernels in Triton's interpreter: `interpreted_linear.py ARCHITECTURE DTYPE`.

A process of its own, as `interpreted.py`, whose repair of the interpreter it uses. Prints a JSON object: for
each way to compute one problem the elements compared and unequal, and for each quantity the distance to
float64.
"""

import json
import sys

import interpreted
import numpy as np
import torch

from kernelbraid.ops import get
from kernelbraid.ops.linear import gpu
from kernelbraid.ops.linear.reference import reference
from kernelbraid.ops.problem import Layout, ProblemShape, View

SCHEDULES = {
    "swapped": {"FEW_ROWS": 1000, "NARROW": 32, "BULK_ROWS": 1000000},
    "swapped, bulk": {"FEW_ROWS": 1000, "NARROW": 64, "BULK_ROWS": 1},
    "tiles, deep": {"FEW_ROWS": 0, "DEPTH": 128, "BULK_ROWS": 1000000},
    "bulk": {"FEW_ROWS": 0, "BULK_ROWS": 1, "STAY_TILES": 1000000, "PROGRAMS": 1},
    "bulk, stay": {"FEW_ROWS": 0, "BULK_ROWS": 1, "STAY_TILES": 1, "PROGRAMS": 2, "TOGETHER": 1},
}


def run(problem, layout):
    """(quantity, request) -> rows, computed by the Triton kernels."""
    program = get("linear", "cuda").lower(problem, layout)
    buffers = {name: interpreted.tensor(a.copy()) for name, a in program.inputs.items()}
    for name, (shape, dtype) in program.outputs.items():
        buffers[name] = torch.full(shape, float("nan"), dtype=getattr(torch, dtype))
    for call in program.calls:
        arguments = {
            name: buffers[value.buffer][value.start : value.stop] if isinstance(value, View) else value
            for name, value in call.arguments.items()
        }
        getattr(gpu, call.entry_point)(**arguments)
    rows = {}
    for span in sorted(program.spans, key=lambda span: span.first_row):
        block = buffers[span.buffer][span.start : span.stop]
        rows.setdefault((span.quantity, span.request), []).append(block)
    return {key: torch.cat(blocks) for key, blocks in rows.items()}


def main(architecture, dtype):
    gpu.architecture_of = lambda _: architecture
    compared, errors = {}, {}
    for inputs, outputs, bias, groups in ((40, 72, 1, 1), (17, 33, 1, 1), (128, 136, 0, 4)):
        gpu.K_GROUPS = gpu.N_GROUPS = groups
        axes = (("in_features", inputs), ("out_features", outputs), ("bias", bias))
        shape = ProblemShape(axes, (1, 0, 9, 70, 130), (1, 0, 9, 70, 130), dtype=dtype)
        problem = get("linear", "cuda").draw(shape, np.random.default_rng(4))
        everyone = tuple(range(5))
        wanted = {way: run(problem, Layout(way, everyone)) for way in ("update", "backward")}
        wanted["pieces"] = run(problem, Layout("backward", (4,)))
        for quantity in ("out", "dx", "dweight", *["dbias"] * bias):
            exact = reference(problem)
            pairs = [
                (exact[key].ravel(), rows.double().numpy().ravel())
                for found in (wanted["update"], wanted["backward"])
                for key, rows in found.items()
                if key[0] == quantity
            ]
            right, mine = (np.concatenate(each) for each in zip(*pairs, strict=True))
            distance = float(np.linalg.norm(mine - right) / np.linalg.norm(right))
            errors[quantity] = max(errors.get(quantity, 0.0), distance)
        kept = {name: getattr(gpu, name) for name in gpu.KNOBS}
        for name, knobs in {"alone": {}, **SCHEDULES}.items():
            vars(gpu).update(kept | {"K_GROUPS": groups, "N_GROUPS": groups} | knobs)
            label = f"{inputs}x{outputs} {name}"
            requests = (2, 3) if name == "alone" else everyone
            found = run(problem, Layout("update", requests, padding=1))
            compared[f"{label} update"] = interpreted.unequal(wanted["update"], found)
            found = run(problem, Layout("backward", requests))
            compared[f"{label} backward"] = interpreted.unequal(wanted["backward"], found)
            found = run(problem, Layout("backward", (4,), ((64, 66),)))
            compared[f"{label} pieces"] = interpreted.unequal(wanted["pieces"], found)
        vars(gpu).update(kept)
    print(json.dumps({"compared": compared, "distance": errors}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
