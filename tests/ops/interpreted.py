"""The Triton kernels on a CPU, in Triton's interpreter: `python interpreted.py ARCHITECTURE DTYPE [CONTROL]`.

A process of its own, since the interpreter is chosen before kernels are defined. Prints a JSON object: for
each relation the elements compared and unequal, for each quantity the distance to float64. The interpreter
treats bfloat16 as integers and multiplies matrices in an order that follows their shape; both are repaired
first, the product by one that adds in ascending order, so that bits mean as much as on a GPU.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernelbraid.ops import get
from kernelbraid.ops.attention import gpu
from kernelbraid.ops.attention.reference import reference
from kernelbraid.ops.formats import BFLOAT16
from kernelbraid.ops.problem import Layout, ProblemShape, View

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
ROOT_FILE = Path(__file__).parents[2] / "examples" / "roots" / "gpu" / "straightforward.py"
AXES = (("query_heads", 3), ("kv_heads", 1), ("head_dim", 64))
LENGTHS = (1, 0, 9, 70)


# ---- Repair of the interpreter.


def is_bfloat16(handle):
    return handle.dtype.scalar == tl.bfloat16


def widened(handle):
    if not is_bfloat16(handle):
        return handle.data.astype(np.float32)
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def narrowed(numbers):
    """float32 to bfloat16's bits, to nearest even; one NaN."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    bits = numbers.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded).astype(np.uint16)


def create_dot(self, a, b, d, *_, **__):
    """a [M, K] times b [K, N] added to d, K ascending, each product exact and each sum rounded to float32."""
    left, right, total = widened(a), widened(b), d.data.astype(np.float32)
    for k in range(left.shape[1]):
        total = total + left[:, k, None] * right[None, k]
    return Handle(total, d.dtype.scalar)


def cast_impl(self, source, kind, cast=Builder.cast_impl):
    if is_bfloat16(source) and kind.scalar != tl.bfloat16:
        return Handle(widened(source).astype(interpreter._get_np_dtype(kind)), kind.scalar)
    if kind.scalar == tl.bfloat16 and not is_bfloat16(source):
        return Handle(narrowed(source.data.astype(np.float32)).reshape(source.data.shape), kind.scalar)
    return cast(self, source, kind)


def binary_op(self, left, right, operation, binary=Builder.binary_op):
    if not (is_bfloat16(left) and is_bfloat16(right)):
        return binary(self, left, right, operation)
    result = operation(widened(left), widened(right))
    return Handle(result, tl.int1) if result.dtype == bool else Handle(narrowed(result), tl.bfloat16)


def get_bf16(self, value):
    return Handle(narrowed(np.array([value], np.float32)), tl.bfloat16)


def patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
    """NumPy 2.4 makes no integer of an array with one element."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


Builder.create_dot, Builder.cast_impl, Builder.binary_op = create_dot, cast_impl, binary_op
Builder.get_bf16, interpreter._patch_lang_tensor = get_bf16, patch_tensor


# ---- Programs.


def loaded(path):
    """A file as a module, whose kernels the interpreter takes like others."""
    specification = importlib.util.spec_from_file_location("straightforward", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


ROOT = loaded(ROOT_FILE)


def tensor(array):
    array = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def run(problem, layout, kernels=gpu):
    """(quantity, request) -> rows in the order of a request, computed by the Triton kernels."""
    program = get("attention", "cuda").lower(problem, layout)
    buffers = {name: tensor(a.copy()) for name, a in (program.inputs | program.state).items()}
    for name, (shape, dtype) in program.outputs.items():
        buffers[name] = torch.full(shape, float("nan"), dtype=getattr(torch, dtype))
    for call in program.calls:
        arguments = {
            name: buffers[value.buffer][value.start : value.stop] if isinstance(value, View) else value
            for name, value in call.arguments.items()
        }
        getattr(kernels, call.entry_point)(**arguments)
    rows = {}
    for span in sorted(program.spans, key=lambda span: span.first_row):
        block = buffers[span.buffer].movedim(span.axis, 0)[span.start : span.stop]
        rows.setdefault((span.quantity, span.request), []).append(block.contiguous())
    return {key: torch.cat(blocks) for key, blocks in rows.items()}


def unequal(left, right):
    """Elements compared and unequal in bits, over the requests that both have."""
    compared = different = 0
    for key in left.keys() & right.keys():
        kind = torch.int16 if left[key].element_size() == 2 else torch.int32
        compared += left[key].numel()
        different += int((left[key].view(kind) != right[key].view(kind)).sum())
    return [compared, different]


def distances(problem, rows):
    exact, found = reference(problem), {}
    for quantity in sorted({name for name, _ in rows}):
        pairs = [
            (np.asarray(exact[key]).ravel(), rows[key].double().numpy().ravel())
            for key in rows
            if key[0] == quantity
        ]
        right, mine = (np.concatenate(each) for each in zip(*pairs, strict=True))
        found[quantity] = float(np.linalg.norm(mine - right) / np.linalg.norm(right))
    return found


def relations(problem):
    everyone = tuple(range(len(LENGTHS)))
    update, backward = (run(problem, Layout(regime, everyone)) for regime in ("update", "backward"))
    one = tuple((1,) * n for n in LENGTHS[:3])
    found = {
        "packing": unequal(update, run(problem, Layout("update", (3,), padding=2))),
        "prefill": unequal(update, run(problem, Layout("prefill", everyone, page_seed=3))),
        "page 7": unequal(
            update, run(problem, Layout("prefill", (2, 3), page_size=7, page_seed=5, padding=1))
        ),
        "chunked": unequal(
            update, run(problem, Layout("chunked_prefill", (3,), ((40, 1, 29),), page_size=64))
        ),
        "steps": unequal(update, run(problem, Layout("decode", (0, 1, 2), one))),
        "gradient_packing": unequal(backward, run(problem, Layout("backward", (3, 0)))),
        "root": unequal(update, run(problem, Layout("update", everyone), ROOT)),
        "root, page 7": unequal(update, run(problem, Layout("prefill", everyone, page_size=7), ROOT)),
        "root, steps": unequal(update, run(problem, Layout("decode", (0, 1, 2), one), ROOT)),
        "root, gradients": unequal(backward, run(problem, Layout("backward", everyone), ROOT)),
    }
    return found, distances(problem, update) | distances(problem, backward)


def last_rows(dtype):
    """A problem of long contexts of which the last rows are wanted: decode splits them."""
    shape = ProblemShape(AXES, (40, 150), (2, 2), dtype=dtype)
    return get("attention", "cuda").draw(shape, np.random.default_rng(5))


def main(architecture, dtype, control=None):
    gpu.architecture_of = lambda _: architecture
    small = {"EARLY_CHUNK": 32, "EARLY_KEYS": 64, "CHUNK": 64, "KEY_BLOCK": 32, "WALK_KEYS": 32}
    for name, value in (small | {"DEPENDENT_LAUNCH": 0}).items():
        setattr(gpu, name, value)
        setattr(ROOT, name, value)
    shape = ProblemShape(AXES, LENGTHS, LENGTHS, dtype=dtype)
    problem = get("attention", "cuda").draw(shape, np.random.default_rng(4))
    result, errors = ({}, {}) if control else relations(problem)
    long = last_rows(dtype)
    walked = run(long, Layout("prefill", (0, 1)))
    if control == "chunk":
        gpu.EARLY_CHUNK = 64
    if control == "block":
        gpu.KEY_BLOCK = gpu.SMALL_KEY_BLOCK = 16
    for programs in (264, 6):
        gpu.PROGRAMS = programs
        steps = Layout("decode", (0, 1), ((1, 1), (1, 1)), page_seed=2)
        result[f"decode {programs}"] = unequal(walked, run(long, steps))
    print(json.dumps({"compared": result, "distance": errors}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
