"""Checks that every public function makes of its tensors; each raises ValueError naming the argument."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernelbraid import ops
from kernelbraid.contract import Contract

INDEX_DTYPES = (torch.int32,)


def contract_of(operator: str, name: str, tensor: Tensor) -> Contract:
    """The contract of an operator on the device of a call's first tensor."""
    check_is_tensor(name, tensor)
    if tensor.is_cpu or tensor.is_cuda:
        return ops.get(operator, "cpu" if tensor.is_cpu else "cuda").contract
    device = tensor.device.type
    raise ValueError(f"{name} is on {device}, for which this version has no backend: move it to the CPU")


def dtypes_of(contract: Contract) -> tuple[torch.dtype, ...]:
    """The dtypes that a contract admits."""
    return tuple(getattr(torch, name) for name in contract.dtypes)


def refuse_features(contract: Contract, **features: object) -> None:
    """Refuse what the contract excludes."""
    for exclusion in contract.exclusions:
        if features.get(exclusion.feature) is not None:
            raise ValueError(
                f"{exclusion.feature} is not part of contract {contract.name}: {exclusion.reason}; pass None"
            )


def refuse_tangents(operator: str, **tensors: Tensor) -> None:
    """Refuse forward-mode derivatives, which would silently be left out."""
    if forward_ad._current_level >= 0:
        for name, tensor in tensors.items():
            dual = forward_ad.unpack_dual(tensor) if isinstance(tensor, Tensor) else None  # type: ignore[no-untyped-call]
            if dual is not None and dual.tangent is not None:
                raise ValueError(f"{name} has a tangent, and {operator} has no forward-mode derivatives")


def check_is_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")


def check_tensor(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], dimensions: int, device: torch.device | None
) -> None:
    """Check device, layout, dtype and number of dimensions; the last dimension must be contiguous."""
    check_is_tensor(name, tensor)
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, others on {device}: move them to one device")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d) for d in dtypes)
        where = "" if dtypes == INDEX_DTYPES else f" on {tensor.device.type}"
        raise ValueError(f"{name} must be {wanted}, got {tensor.dtype}{where}")
    if tensor.dim() != dimensions:
        raise ValueError(f"{name} must have {dimensions} dimensions, got shape {tuple(tensor.shape)}")
    if tensor.is_neg():
        raise ValueError(f"{name} is a lazily negated view: call .resolve_neg()")
    stride = tensor.stride(-1)
    if stride != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise ValueError(f"{name}'s last dimension must have stride 1, not {stride}: call .contiguous()")


def check_shape(name: str, tensor: Tensor, wanted: tuple[int | None, ...], source: str) -> None:
    """Compare a shape with another argument's; None stands for any size."""
    given = tensor.shape
    if given == wanted:
        return
    for size, found in zip(wanted, given, strict=True):
        if size != found and size is not None:
            shown = ", ".join("any" if size is None else str(size) for size in wanted)
            raise ValueError(f"{name} must have shape [{shown}] to fit {source}, got {list(given)}")


def check_axis(contract: Contract, axis: str, name: str, size: int) -> None:
    """Compare a tensor's size with the contract's limits of an axis."""
    try:
        contract.axis(axis).check(size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_integer(name: str, bound: int) -> None:
    """Refuse anything but an int."""
    if isinstance(bound, bool) or not isinstance(bound, int):
        raise ValueError(f"{name} must be an int, got {type(bound).__name__}")


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Refuse anything but a number above `low` and up to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not low < value <= high:
        raise ValueError(f"{name} must be above {low:g} and at most {high:g}, got {value!r}")


def check_written(name: str, tensor: Tensor, others: Mapping[str, Tensor]) -> None:
    """Refuse a tensor whose elements share memory with each other or with an input's."""
    if not tensor.is_contiguous():
        extent = 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1:
                if stride < extent:
                    raise ValueError(f"{name}'s elements overlap in memory: pass a tensor of its own")
                extent += stride * (size - 1)
    first, end = _span(tensor)
    for other_name, other in others.items():
        other_first, other_end = _span(other)
        near = other_first < end and first < other_end
        if near and np.shares_memory(_layout(tensor), _layout(other)):
            raise ValueError(f"{name} must not share memory with {other_name}")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses between which a tensor's elements lie."""
    if tensor.is_contiguous():
        first = tensor.data_ptr()
        return first, first + tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class _Placed:
    """Where a tensor's elements lie, as numpy describes it; nothing is read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
        }


def _layout(tensor: Tensor) -> npt.NDArray[Any]:
    return np.asarray(_Placed(tensor))
