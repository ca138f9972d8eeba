"""The static scan: what it stops, and that it lets implementations be."""

from pathlib import Path

import pytest
from tests.gpu import toy_cuda

from kernelbraid.audit import tripwires

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "text",
    [
        "import ctypes",
        "import subprocess, math",
        "import socket",
        "import sys",
        "import gc",
        "import time",
        "import inspect",
        "import numpy.ctypeslib",
        "import numba.cuda",
        "import torch",
        "import kernelbraid.audit",
        "from . import judge",
        "from os import environ",
        "from os import *",
        "from numba import objmode",
        "from llvmlite import binding",
        "from time import perf_counter",
        "import os as system",
        "import os\nos.fork()",
        "import os\nos.system('true')",
        "import os\nos.kill(1, 9)",
        "import os\nprint(os.environ)",
        "exec('1')",
        "eval('1')",
        "compile('1', '', 'eval')",
        "open('/dev/shm/x', 'wb')",
        "__import__('os')",
        "f = exec",
        "__builtins__",
        "globals()['x']",
        "getattr(object, 'x' + 'y')",
        "getattr(object, '__subclasses__')",
        "getattr(builder.__class__, 'x' + 'y')",
        "setattr(object, 'x', 1)",
        "().__class__.__bases__",
        "(lambda: 0).__globals__",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.memmap('x')",
        "def f(x):\n    x.flags.writeable = True",
        "def f(x):\n    x.setflags(write=True)",
        "from numpy import load",
        "from concurrent import futures\nfutures.ProcessPoolExecutor()",
        "from numba import jit\nf = jit(forceobj=True)",
    ],
)
def test_what_implementations_may_not_use(text: str) -> None:
    found = tripwires.scan(text)
    assert found
    assert str(found[-1]).startswith(f"line {text.count(chr(10)) + 1}: ")


@pytest.mark.parametrize(
    "text",
    [
        "from __future__ import annotations",
        "import os\nos.sched_getaffinity(0), os.getpid()\nos.register_at_fork(after_in_child=print)",
        "from concurrent.futures import ThreadPoolExecutor, wait",
        "import threading\nlock = threading.Lock()",
        "from llvmlite import ir",
        "from numba.extending import intrinsic\nfrom numba import njit, carray\nimport numba.core.cgutils",
        "import numpy as np\nx = np.empty(3).view(np.int32)\nx.shape[0]",
        "class A:\n    __slots__ = ()\n    def __init__(self): pass\nA.__name__",
        "import functools, itertools, math, operator, dataclasses, typing, enum",
        "getattr(object, 'shape', None)",
        "class V:\n    def f(self, n):\n        getattr(self.builder, n)()\n    __add__, __lt__ = f, f",
        "def f(row, builder, carray):\n    return carray(row.ctypes, (1,)), builder.load(row)",
    ],
)
def test_what_implementations_need(text: str) -> None:
    assert tripwires.scan(text) == ()


@pytest.mark.parametrize(
    "file", ["examples/roots/straightforward.py", "src/kernelbraid/ops/attention/cpu.py"]
)
def test_honest_implementations_pass(file: str) -> None:
    assert tripwires.scan((REPOSITORY / file).read_text()) == ()


def test_findings_come_in_the_order_of_lines_and_once() -> None:
    found = tripwires.scan("import sys\nx = 1\nimport gc, gc\n")
    assert [str(each) for each in found] == ["line 1: import of sys", "line 3: import of gc"]


@pytest.mark.parametrize("text", ["(" * 100_000, "x" * (1 << 20) + "y", "a\0b"])
def test_what_cannot_be_a_source(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError, MemoryError)):
        tripwires.scan(text)


# ---- for GPUs


@pytest.mark.parametrize(
    "text",
    [
        "import numba",
        "import threading",
        "import os",
        "import numpy",
        "import torch as t",
        "import torch.utils.cpp_extension",
        "from torch import _C",
        "from torch.cuda import Event",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.save(1, 'x')",
        "import torch\ntorch._C._cuda_synchronize()",
        "import torch\ntorch.cuda._sleep(1)",
        "import torch\ntorch.cuda.synchronize = print",
        "import torch\ntorch.cuda.Event.elapsed_time = print",
        "import torch\ntorch.utils.cpp_extension",
        "import torch\ntorch.from_file('x')",
        "import torch\ntorch.cuda.CUDAGraph()",
        "def f(x):\n    x.untyped_storage()",
        "from triton.runtime import driver",
        "import triton\ntriton.runtime.driver",
        "import triton\ntriton.knobs",
        "import triton.language as tl\ndel tl.load",
        "().__class__",
        "open('x')",
    ],
)
def test_what_sources_for_gpus_may_not_use(text: str) -> None:
    assert tripwires.scan(text, "cuda")


@pytest.mark.parametrize(
    "text",
    [
        toy_cuda.ROOT,
        "import torch\ntorch.cuda.get_device_properties(0).multi_processor_count",
        "import torch\nx = torch.empty(3, device='cuda')\nx.data_ptr()",
        "from triton.tools.tensor_descriptor import TensorDescriptor",
        "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as gl",
        "import triton.language as tl\ntl.load(0)\ntl.store(0, 1)",
    ],
)
def test_what_sources_for_gpus_may_use(text: str) -> None:
    assert not tripwires.scan(text, "cuda")
