"""Float32 masters of 16-bit parameters, for any optimizer of torch."""

from typing import Any

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)


def keep_float_masters(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """Let an optimizer move float32 copies of 16-bit parameters, which are rounded after each of its steps.

    Steps of policy optimization are far smaller than half a unit of bfloat16: added to the parameters
    themselves most of them would be rounded away. Gradients are the parameters' own, widened exactly. The
    optimizer's state_dict does not hold the masters: a run that is resumed begins with those of the rounded
    parameters.

    Args:
        optimizer: without state yet. Its groups hold the masters from now on; parameters of other dtypes stay
            as they are.

    Returns:
        The master of each 16-bit parameter; empty where there is none.

    Raises:
        ValueError: the optimizer took a step already.
    """
    if optimizer.state:
        raise ValueError("optimizer must not have taken a step yet: its state belongs to the parameters")
    masters: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if parameter.dtype in LOW:
                masters[parameter] = group["params"][place] = parameter.detach().float().clone()
    if not masters:
        return masters

    def widen(*_: Any) -> None:
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()

    def narrow(*_: Any) -> None:
        with torch.no_grad():
            for parameter, master in masters.items():
                if master.grad is not None:
                    parameter.copy_(master)
                    master.grad = parameter.grad = None

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(narrow)
    return masters
