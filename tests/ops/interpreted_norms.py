"""Triton kernels of operators on rows in Triton's interpreter: `python interpreted_norms.py NAME DTYPE`.

Prints a JSON object: for each relation the elements compared and unequal, for each quantity the distance to
float64. NAME `fused` compares the rollout's fused step with the operators that it fuses. `interpreted.py`
says what is repaired first.
"""

import json
import sys
from importlib import import_module

import interpreted
import numpy as np
import torch

from kernelbraid.audit.accuracy import relative_error
from kernelbraid.audit.checks import compare, gather
from kernelbraid.ops import get
from kernelbraid.ops.problem import Layout, ProblemShape, View

LENGTHS = (1, 0, 5, 21)
HEADS = (("query_heads", 5), ("kv_heads", 2))
AXES = {
    "add_rms_norm": (("width", 100),),
    "qk_norm": (*HEADS, ("head_dim", 24)),
    "rope": (*HEADS, ("head_dim", 24)),
    "qk_norm_rope_cache": (*HEADS, ("head_dim", 64), ("norm", 1)),
}


def array(tensor):
    """A tensor's memory as numpy, bfloat16 too."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(interpreted.BFLOAT16)
    return tensor.numpy()


def run(name, problem, layout):
    """(quantity, request) -> rows, one entry a copy, computed by the Triton kernels."""
    program = get(name, "cuda").lower(problem, layout)
    module = import_module(f"kernelbraid.ops.{name}.gpu")
    buffers = {n: interpreted.tensor(a.copy()) for n, a in (program.inputs | program.state).items()}
    for n, (shape, dtype) in program.outputs.items():
        buffers[n] = torch.full(shape, float("nan"), dtype=getattr(torch, dtype))
    for call in program.calls:
        arguments = {
            n: buffers[value.buffer][value.start : value.stop] if isinstance(value, View) else value
            for n, value in call.arguments.items()
        }
        getattr(module, call.entry_point)(**arguments)
    return gather(program, {n: array(buffers[n]) for n in program.outputs}, problem.shape.rows)


def unequal(left, right):
    """Elements compared and unequal in bits, over what both have."""
    pairs = [(left[key][0], right[key][0]) for key in left.keys() & right.keys()]
    return [sum(a.size for a, _ in pairs), sum(compare(a, b).unequal for a, b in pairs)]


def relations(name, dtype):
    operator = get(name, "cuda")
    shape = ProblemShape(AXES[name], LENGTHS, LENGTHS, dtype=dtype)
    problem = operator.draw(shape, np.random.default_rng(4))
    everyone = tuple(range(len(LENGTHS)))
    prompt = run(name, problem, Layout("prefill", everyone))
    compared = {
        "batch": unequal(prompt, run(name, problem, Layout("prefill", (3, 0), page_seed=3))),
        "padding": unequal(prompt, run(name, problem, Layout("prefill", (2, 3), padding=3, page_size=7))),
        "chunked": unequal(prompt, run(name, problem, Layout("chunked_prefill", (3,), ((12, 1, 8),)))),
        "decode": unequal(prompt, run(name, problem, Layout("decode", (2, 0), ((1,) * 5, (1,))))),
    }
    found = prompt
    if "backward" in operator.regimes:
        backward = run(name, problem, Layout("backward", everyone))
        compared["gradient_packing"] = unequal(backward, run(name, problem, Layout("backward", (3, 0))))
        found = prompt | backward
    exact = operator.reference(problem)
    names = {bound.quantity for bound in operator.contract.accuracy}
    distance = {
        each: relative_error({k: rows[0] for k, rows in found.items() if k[0] == each}, exact)
        for each in sorted(names)
    }
    return compared, distance


def fused(dtype):
    """The fused step beside qk_norm, rope and write_kv_cache, each by its own Triton kernel."""
    kernels = {
        name: import_module(f"kernelbraid.ops.{name}.gpu") for name in ("qk_norm", "rope", "attention")
    }
    compared = {}
    for normed in (0, 1):
        axes = (*HEADS, ("head_dim", 64), ("norm", normed))
        shape = ProblemShape(axes, (3, 0, 5, 40), (2, 0, 5, 19), "non_finite", dtype)
        problem = get("qk_norm_rope_cache", "cuda").draw(shape, np.random.default_rng(6))
        layout = Layout("prefill", (3, 0, 1, 2), page_size=7, page_seed=2, padding=1)
        ours = run("qk_norm_rope_cache", problem, layout)
        program = get("qk_norm_rope_cache", "cuda").lower(problem, layout)
        given = {name: interpreted.tensor(a.copy()) for name, a in program.inputs.items()}
        made = {
            name: torch.full(size, float("nan"), dtype=getattr(torch, kept))
            for name, (size, kept) in program.outputs.items()
        }
        q, k, about = given["q"], given["k"], (given["positions"], given["cos"], given["sin"])
        if normed:
            outs = torch.empty_like(q), torch.empty_like(k)
            kernels["qk_norm"].qk_norm(q, k, given["q_weight"], given["k_weight"], 1e-6, *outs)
            q, k = outs
        turned = torch.empty_like(k)
        kernels["rope"].rope(q, k, *about, made["q_out"], turned)
        where = (given["page_table"], given["cu_seqlens_q"], given["seqlens_k"])
        kernels["attention"].write_kv_cache(turned, given["v"], made["k_cache"], made["v_cache"], *where)
        theirs = gather(program, {name: array(each) for name, each in made.items()}, shape.rows)
        compared[f"norm {normed}"] = unequal(ours, theirs)
    return compared, {}


def main(name, dtype):
    compared, distance = fused(dtype) if name == "fused" else relations(name, dtype)
    print(json.dumps({"compared": compared, "distance": distance}))


if __name__ == "__main__":
    main(*sys.argv[1:])
