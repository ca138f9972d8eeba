"""Triton kernels of an operator on rows, interpreted: `python interpreted_pointwise.py NAME DTYPE KIND`.

Prints a JSON object: for each way to run a problem the elements compared with those of all its rows at once,
and how many differ; for each quantity the distance to float64. The repairs of the interpreter are those of
`interpreted.py`, which has to be imported before any kernel.
"""

import json
import sys
from importlib import import_module

import numpy as np
import torch
from interpreted import tensor

from kernelbraid.audit.accuracy import relative_error
from kernelbraid.audit.checks import compare, gather
from kernelbraid.ops import get
from kernelbraid.ops.formats import BFLOAT16
from kernelbraid.ops.problem import Layout, ProblemShape, View

LENGTHS = (1, 0, 9, 130)
EVERYONE = tuple(range(len(LENGTHS)))
WIDTH = 300
"""More than one tile of the smallest calls."""

UPDATE, BACKWARD, LONGEST = Layout("update", EVERYONE), Layout("backward", EVERYONE), Layout("backward", (3,))
PAIRS = {
    "alone": (UPDATE, Layout("update", (3,))),
    "padded": (UPDATE, Layout("prefill", EVERYONE, padding=5)),
    "in pieces": (UPDATE, Layout("chunked_prefill", (3,), ((40, 1, 89),))),
    "row by row": (UPDATE, Layout("decode", (0, 2), ((1,), (1,) * 9))),
    "gradients in pieces": (LONGEST, Layout("backward", (3,), ((64, 66),))),
}


def array(found):
    return found.view(torch.int16).numpy().view(BFLOAT16) if found.dtype == torch.bfloat16 else found.numpy()


def run(operator, module, problem, layout):
    program = operator.lower(problem, layout)
    buffers = {name: tensor(values.copy()) for name, values in program.inputs.items()}
    for name, (shape, dtype) in program.outputs.items():
        buffers[name] = torch.full(shape, float("nan"), dtype=getattr(torch, dtype))
    for call in program.calls:
        arguments = {
            name: buffers[value.buffer][value.start : value.stop] if isinstance(value, View) else value
            for name, value in call.arguments.items()
        }
        getattr(module, call.entry_point)(**arguments)
    outputs = {name: array(buffers[name]) for name in program.outputs}
    return gather(program, outputs, problem.shape.rows)


def main(name, dtype, kind):
    operator, module = get(name, "cuda"), import_module(f"kernelbraid.ops.{name}.gpu")
    shape = ProblemShape((("width", WIDTH),), LENGTHS, LENGTHS, kind, dtype)
    problem = operator.draw(shape, np.random.default_rng(3))
    done = {layout: run(operator, module, problem, layout) for pair in PAIRS.values() for layout in pair}
    compared = {}
    for way, (left, right) in PAIRS.items():
        keys = done[left].keys() & done[right].keys()
        unequal = sum(compare(done[left][key], done[right][key]).unequal for key in keys)
        compared[way] = [sum(done[left][key].size for key in keys), unequal]
    exact, found = operator.reference(problem), done[UPDATE] | run(operator, module, problem, BACKWARD)
    errors = {}
    for quantity in sorted({quantity for quantity, _ in found}):
        rows = {key: value[0] for key, value in found.items() if key[0] == quantity}
        errors[quantity] = relative_error(rows, exact)
    print(json.dumps({"compared": compared, "distance": errors}))


if __name__ == "__main__":
    main(*sys.argv[1:])
