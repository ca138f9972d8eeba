"""Parameters of 16 bits: float32 masters that the optimizer moves, or none."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("pydantic")

from tests.rl.runs import config

from kernelbraid.models.config import named
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Decoder
from kernelbraid.rl.policy import Policy, norm_of
from kernelbraid.rl.update import Updater

STEPS = 40


def policy(masters: bool, dtype: torch.dtype = torch.bfloat16, kernels: str = "vendor") -> Policy:
    sizes = replace(named("Qwen3-0.6B").small(layers=1, vocab=64), hidden=64, intermediate=96)
    decoder = Decoder(sizes, drawn(sizes, dtype=dtype, seed=2), 64)
    return Policy(decoder, kernels, masters=masters, value=True)


def updater(of: Policy, rate: float) -> Updater:
    update = {"learning_rate": rate, "weight_decay": 0.01, "max_grad_norm": None}
    return Updater(of, config(algorithm="ppo", update=update))


def gradients(of: Policy, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(each.shape, generator=generator) for name, each in of.parameters.items()}


def equal(one: Tensor, other: Tensor) -> bool:
    assert one.dtype == other.dtype
    integers = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.detach().view(integers), other.detach().view(integers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_have_the_bits_of_float32_training(dtype: torch.dtype) -> None:
    made = policy(True, dtype)
    start = {name: each.detach().float().clone() for name, each in made.parameters.items()}
    plain = [each.clone().requires_grad_() for each in start.values()]
    reference = torch.optim.AdamW(plain, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, foreach=False)
    moved = updater(made, 1e-4)
    for step in range(STEPS):
        given = gradients(made, step)
        moved._apply(given)
        for tensor, gradient in zip(plain, given.values(), strict=True):
            tensor.grad = gradient.clone()
        reference.step()
        for (name, each), tensor in zip(made.parameters.items(), plain, strict=True):
            assert equal(made.masters[name], tensor)
            assert equal(each, tensor.to(dtype)), "parameters are the masters, rounded"
    assert all(not equal(made.masters[name], start[name]) for name in start)


def test_without_masters_small_steps_are_lost() -> None:
    """The rate is far below half of a bfloat16's last place: masters add the steps up."""
    rate = 1e-4
    found = {}
    for masters in (True, False):
        made = policy(masters)
        before = {name: each.detach().clone() for name, each in made.parameters.items()}
        moved = updater(made, rate)
        same = {name: torch.ones_like(each, dtype=torch.float32) for name, each in made.parameters.items()}
        for _ in range(4 * STEPS):
            moved._apply(same)
        norm = "layers.0.input_norm"  # near 1, where the last place is 2 ** -8
        found[masters] = equal(made.parameters[norm], before[norm])
        assert all(each.dtype == torch.bfloat16 for each in made.parameters.values())
        kinds = {each.dtype for each in made.masters.values()}
        assert kinds == ({torch.float32} if masters else {torch.bfloat16})
        states = moved.optimizer.state_dict()["state"]
        assert {each["exp_avg"].dtype for each in states.values()} == kinds
        assert all((made.masters[name] is each) == (not masters) for name, each in made.parameters.items())
    assert found == {True: False, False: True}


def test_without_masters_the_optimizer_moves_parameters_of_16_bits() -> None:
    made = policy(False)
    plain = [each.detach().clone().requires_grad_() for each in made.parameters.values()]
    reference = torch.optim.AdamW(plain, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01, foreach=False)
    moved = updater(made, 1e-2)
    for step in range(3):
        given = gradients(made, step)
        moved._apply(given)
        for tensor, gradient in zip(plain, given.values(), strict=True):
            tensor.grad = gradient.bfloat16()
        reference.step()
    assert all(map(equal, made.parameters.values(), plain))
    other = policy(True)
    again = updater(other, 1e-2)
    for step in range(3):
        again._apply(gradients(other, step))
    assert not all(map(equal, other.parameters.values(), plain)), "masters give other bits"


def test_float32_parameters_are_their_own_masters() -> None:
    for masters in (True, False):
        made = policy(masters, torch.float32, "unified")
        assert all(made.masters[name] is each for name, each in made.parameters.items())


def test_masters_survive_a_checkpoint(tmp_path: Path) -> None:
    """Masters hold bits that parameters do not: a run that goes on from rounded ones is another."""
    made, again, rounded = policy(True), policy(True), policy(True)
    moved = updater(made, 1e-4)
    for step in range(3):
        moved._apply(gradients(made, step))
    torch.save([made.masters, moved.state()], tmp_path / "state")
    masters, state = torch.load(tmp_path / "state", weights_only=True)
    for of, start in ((again, masters), (rounded, {name: each.bfloat16() for name, each in masters.items()})):
        with torch.no_grad():
            for name, each in of.masters.items():
                each.copy_(start[name])
        of.publish()
        resumed = updater(of, 1e-4)
        resumed.load(state)
        resumed.steps = 3
        resumed._apply(gradients(of, 3))
    moved._apply(gradients(made, 3))
    assert all(equal(made.masters[name], again.masters[name]) for name in masters)
    assert not all(equal(made.masters[name], rounded.masters[name]) for name in masters)


def test_norms_of_any_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    some = [torch.randn(100, 7, generator=generator), torch.randn(70000, generator=generator).bfloat16()]
    exact = float(sum(each.double().square().sum() for each in some).sqrt())  # type: ignore[union-attr]
    assert norm_of(some) == pytest.approx(exact, rel=1e-12) and norm_of([]) == 0.0


def test_a_run_says_whether_it_has_masters() -> None:
    assert config().update.masters and not config(update={"masters": False}).update.masters
