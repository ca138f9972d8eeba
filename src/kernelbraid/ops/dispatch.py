"""From a public function to the implementation in use: installed winners, devices, and who watches a call.

This file needs torch alone. An implementation, and Numba or Triton with it, is loaded by the first call that
computes, so that the first call of a process may be one under `torch.compile(fullgraph=True)`.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernelbraid import ops
from kernelbraid.ops import installed

OLDEST_GPU = (8, 0)
_loading = Lock()


def implementation(name: str, device: torch.device) -> Any:
    """Return the winner installed for a device's model, otherwise the shipped implementation.

    Raises:
        RuntimeError: the GPU is not supported, or what is installed does not fit or was changed.
    """
    with _loading:
        return _found(name, device.type, device.index or 0)


@cache
def _found(name: str, backend: str, index: int) -> ModuleType:
    architecture, model = ("cpu", installed.cpu_model()) if backend == "cpu" else _gpu(name, index)
    operator = ops.get(name, backend)
    found = installed.read(name, architecture, model)
    if found is None:
        return import_module(f"kernelbraid.ops.{name}.{operator.files[0].removesuffix('.py')}")
    if found.contract != operator.contract.hash:
        raise RuntimeError(
            f"the installed {name} {found.source.short} was promoted under another contract; "
            f"run `kernelbraid demote {name}` and search again"
        )
    return installed.load(found, name)


def _gpu(name: str, index: int) -> tuple[str, str]:
    """Architecture and model of a GPU."""
    model, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if torch.version.hip is not None:
        raise RuntimeError(f"cuda:{index} is {model}: only NVIDIA's GPUs are supported")
    architecture = "sm_{}{}".format(*capability)
    if capability < OLDEST_GPU:
        oldest = "sm_{}{}".format(*OLDEST_GPU)
        raise RuntimeError(f"cuda:{index} is {model}, {architecture}: {name} needs {oldest} or newer")
    return architecture, model


def call(name: str, entry_point: str, device: torch.device, *operands: object) -> None:
    """Call an entry point: on the CPU with arrays of the tensors' memory, on a GPU with the tensors."""
    found = implementation(name, device)
    try:
        function = getattr(found, entry_point)
    except AttributeError:
        raise RuntimeError(
            f"the installed {name} has no {entry_point}; run `kernelbraid demote {name}` and search again"
        ) from None
    if device.type == "cpu":
        function(*[_array(x) if isinstance(x, Tensor) else x for x in operands])
    else:
        with torch.cuda.device(device):
            function(*operands)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()


def count_write(*tensors: Tensor) -> None:
    """Tell autograd that these are written, so that a graph that saved one of them notices."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def is_traced(tensor: Tensor) -> bool:
    """Whether somebody watches operators: a compiler, a mode, a transform or a tensor subclass."""
    return (
        torch.compiler.is_compiling()
        or (type(tensor) not in (Tensor, torch.nn.Parameter) and isinstance(tensor, Tensor))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def rows_contiguous(gradient: Tensor) -> Tensor:
    """An incoming gradient, such as the expanded one of a sum, in a layout that kernels read."""
    gradient = gradient.resolve_neg()
    return gradient if gradient.stride(-1) == 1 else gradient.contiguous()


def refuse_second(name: str) -> Callable[..., None]:
    """What stands for the gradients of an operator's gradients."""

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise RuntimeError(
            f"{name} has first derivatives only: its gradients cannot be differentiated again "
            "(double backward); compute them without create_graph=True"
        )

    return refuse
