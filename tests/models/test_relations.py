"""Layers and whole models: token by token, in pieces and packed, the same bits; what breaks them is seen."""

from dataclasses import replace

import pytest
import torch

from kernelbraid.models import layer, model, relations
from kernelbraid.models.config import NAMED, ModelConfig, named
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Decoder
from kernelbraid.models.operators import Operators
from kernelbraid.models.relations import check_generation, check_layer, check_model, sequences_of


def narrow(config: ModelConfig) -> ModelConfig:
    """A model's heads and options over fewer hidden units."""
    return replace(config, hidden=min(config.hidden, 192), intermediate=min(config.intermediate, 320))


def decoder(name: str, layers: int = 2) -> Decoder:
    config = narrow(named(name)).small(layers=layers, vocab=300)
    return Decoder(config, drawn(config, dtype=torch.float32), positions=512)


@pytest.mark.parametrize("name", NAMED)
def test_a_layer_has_the_same_bits_in_rollout_and_update(name: str) -> None:
    findings = list(check_layer(narrow(named(name)), dtype=torch.float32, device="cpu"))
    assert len(findings) == 4
    for found in findings:
        assert found.held, found


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen2.5-1.5B", "Qwen3-MoE-small"])
def test_a_model_generates_what_the_update_scores(name: str) -> None:
    made = decoder(name)
    prompts = sequences_of(made.config, (5, 1, 17), 4, "cpu")
    for temperature in (1.0, 0.7):
        found = check_generation(made, prompts, 12, temperature=temperature)
        assert found.held and found.comparisons == 36, found


def test_generation_does_not_depend_on_neighbours() -> None:
    made = decoder("SmolLM2-135M")
    prompts = sequences_of(made.config, (9, 20), 1, "cpu")
    together = relations.generate(made, prompts, 8, seed=5)
    alone = relations.generate(made, prompts[:1], 8, seed=5, page_size=3)
    assert torch.equal(together.sequences[0], alone.sequences[0])
    assert torch.equal(together.logprobs[0], alone.logprobs[0])


class OtherNorm(Operators):
    """Another order of the same sum for single tokens."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if len(x) == 1:
            return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
        return super().rms_norm(x, weight, eps)


def test_another_kernel_for_single_tokens_is_seen() -> None:
    made = replace(decoder("SmolLM2-135M"), operators=OtherNorm())
    findings = {each.relation: each for each in check_model(made, (33, 1, 70))}
    assert not findings["packed_equals_alone"].held
    assert findings["update_equals_prefill"].held


def test_logprobs_from_another_code_path_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that every operator's own tests miss: the sampler's log-softmax is not the trainer's."""

    def log_softmax(logits, targets, *, temperature):
        return torch.log_softmax(logits / temperature, -1).gather(1, targets[:, None].long())[:, 0]

    monkeypatch.setattr(relations, "logprob_of_logits", log_softmax)
    made = decoder("SmolLM2-135M")
    found = check_generation(made, sequences_of(made.config, (5, 30), 4, "cpu"), 24)
    assert found.unequal > 0 and found.first.startswith("logprobs of request")


def test_the_update_is_differentiable_to_every_parameter() -> None:
    config = narrow(named("Qwen3-MoE-small")).small(layers=1, vocab=64)
    weights = drawn(config, dtype=torch.float32)
    parameters = dict(weights.tensors())
    for each in parameters.values():
        each.requires_grad_()
    made = Decoder(config, weights, positions=64)
    ids = sequences_of(config, (9, 14), 0, "cpu")
    cu = torch.tensor([0, 9, 23], dtype=torch.int32)
    hidden = made.hidden(torch.cat(ids), cu, 14)
    made.logprobs(hidden, torch.cat(ids).roll(-1)).sum().backward()
    for name, each in parameters.items():
        assert each.grad is not None and each.grad.abs().sum() > 0, name


def test_packed_positions_count_from_each_sequence() -> None:
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    assert layer.packed_positions(cu, 7).tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert model.packed_positions is layer.packed_positions


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown model 'GPT-5'; models are SmolLM2-135M"):
        named("GPT-5")
