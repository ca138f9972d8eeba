"""Float32 masters: what a 16-bit parameter cannot hold is not lost."""

import pytest
import torch

from kernelbraid.rl.masters import keep_float_masters

RATE, STEPS = 1e-4, 8


def stepped(
    dtype: torch.dtype, masters: bool, steps: int = STEPS
) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """A parameter of ones after steps of a rate far below half a unit of bfloat16 at 1."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter], lr=RATE, weight_decay=0.0)
    if masters:
        keep_float_masters(optimizer)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameter.detach(), optimizer


def test_small_steps_add_up() -> None:
    found, _ = stepped(torch.bfloat16, masters=True, steps=64)
    exact, _ = stepped(torch.float32, masters=False, steps=64)
    assert torch.equal(found, exact.to(torch.bfloat16))
    assert (found < 1).all()


def test_without_masters_they_are_rounded_away() -> None:
    """A control: the parameter itself does not move."""
    found, _ = stepped(torch.bfloat16, masters=False, steps=64)
    assert (found == 1).all()


def test_float32_parameters_stay_as_they_are() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert keep_float_masters(optimizer) == {}
    assert optimizer.param_groups[0]["params"][0] is parameter


def test_parameters_without_a_gradient_stay() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = torch.optim.SGD([used, unused], lr=0.5)
    masters = keep_float_masters(optimizer)
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert used.tolist() == [0.5, 0.5] and unused.tolist() == [1.0, 1.0]
    assert used.grad is None and masters[used].dtype == torch.float32
    assert used._version > unused._version


def test_after_a_step_it_is_refused() -> None:
    _, optimizer = stepped(torch.float32, masters=False)
    with pytest.raises(ValueError, match="must not have taken a step"):
        keep_float_masters(optimizer)
