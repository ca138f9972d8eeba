"""Triton kernels of an operator on rows on a CPU: `python interpreted_rows.py NAME DTYPE AXIS=VALUE ...`.

As `interpreted.py`, whose repairs of Triton's interpreter it uses. Prints a JSON object: for each relation
the elements compared and unequal, for each quantity the distance to float64.
"""

import json
import sys
from importlib import import_module

import numpy as np
import torch
from interpreted import tensor

from kernelbraid.ops import get
from kernelbraid.ops.problem import Layout, ProblemShape, View

LENGTHS = (1, 0, 9, 130)
BITS = {2: torch.int16, 4: torch.int32}


def run(operator, module, problem, layout):
    """(quantity, request) -> rows, computed by the Triton kernels."""
    program = operator.lower(problem, layout)
    buffers = {name: tensor(array.copy()) for name, array in program.inputs.items()}
    for name, (shape, dtype) in program.outputs.items():
        kind = getattr(torch, dtype)
        fill = float("nan") if kind.is_floating_point else -77
        buffers[name] = torch.full(shape, fill, dtype=kind)
    for call in program.calls:
        arguments = {
            name: buffers[value.buffer][value.start : value.stop] if isinstance(value, View) else value
            for name, value in call.arguments.items()
        }
        getattr(module, call.entry_point)(**arguments)
    rows = {}
    for span in sorted(program.spans, key=lambda span: span.first_row):
        block = buffers[span.buffer][span.start : span.stop]
        rows.setdefault((span.quantity, span.request), []).append(block.contiguous())
    return {key: torch.cat(blocks) for key, blocks in rows.items()}


def unequal(left, right):
    compared = different = 0
    for key in left.keys() & right.keys():
        kind = BITS[left[key].element_size()]
        compared += left[key].numel()
        different += int((left[key].view(kind) != right[key].view(kind)).sum())
    return [compared, different]


def distances(exact, rows):
    found = {}
    for quantity in sorted({name for name, _ in rows}):
        pairs = [
            (exact[key].ravel(), rows[key].double().numpy().ravel()) for key in rows if key[0] == quantity
        ]
        right, mine = (np.concatenate(each) for each in zip(*pairs, strict=True))
        found[quantity] = float(np.linalg.norm(mine - right) / np.linalg.norm(right))
    return found


def main(name, dtype, kind, *axes):
    operator, module = get(name, "cuda"), import_module(f"kernelbraid.ops.{name}.gpu")
    constant = tuple((a.split("=")[0], int(a.split("=")[1])) for a in axes)
    shape = ProblemShape(constant, LENGTHS, LENGTHS, kind, dtype)
    problem = operator.draw(shape, np.random.default_rng(3))

    def of(layout):
        return run(operator, module, problem, layout)

    everyone = tuple(range(len(LENGTHS)))
    update, backward = of(Layout("update", everyone)), of(Layout("backward", everyone))
    alone, pieces = of(Layout("backward", (3,))), of(Layout("backward", (3,), ((64, 66),)))
    compared = {
        "packing": unequal(update, of(Layout("update", (3,)))),
        "padding": unequal(update, of(Layout("prefill", everyone, padding=5))),
        "chunked": unequal(update, of(Layout("chunked_prefill", (3,), ((40, 1, 89),)))),
        "steps": unequal(update, of(Layout("decode", (0, 2), ((1,), (1,) * 9)))),
        "gradient_packing": unequal(backward, alone),
        "gradient_accumulation": unequal(alone, pieces),
    }
    finite = kind != "non_finite"
    errors = distances(operator.reference(problem), update | backward) if finite else {}
    print(json.dumps({"compared": compared, "distance": errors}))


if __name__ == "__main__":
    main(*sys.argv[1:])
