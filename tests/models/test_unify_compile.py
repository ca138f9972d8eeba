"""Unified models under torch.compile: the bits of eager calls, or a refusal."""

import pytest
import torch
from tests.models.unified import packed, padded, same, sequences, unified

from kernelbraid.models.shared import packed_logprobs
from kernelbraid.models.unify import report


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(model, call) -> list[torch.Tensor]:
    model.zero_grad()
    found = call()
    found.square().sum().backward()
    return [found.detach(), *(each.grad.clone() for each in model.parameters())]


def agree(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_compiled_models_have_the_bits_of_eager_ones(name: str) -> None:
    """Whole graphs without a mask; a mask is looked at between graphs."""
    model = unified(name, use_cache=False)
    ids, mask = padded(sequences((20, 7)), "left")
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert agree(trained(model, lambda: whole(ids).logits), trained(model, lambda: model(ids).logits))
    parts = torch.compile(model, backend="aot_eager")
    eager = trained(model, lambda: model(ids, attention_mask=mask).logits)
    assert agree(trained(model, lambda: parts(ids, attention_mask=mask).logits), eager)


def test_a_compiled_forward_is_the_models_own() -> None:
    """`model.forward = torch.compile(model.forward)`, the usual way to compile for `generate`."""
    model = unified("llama", use_cache=False)
    ids, _ = padded(sequences((20, 7)), "left")
    eager = trained(model, lambda: model(ids).logits)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert report(model).complete
    assert agree(trained(model, lambda: model(ids).logits), eager)
    model.forward = lambda *arguments, **options: None
    assert report(model).left == {"": "its forward was replaced by something else"}


def test_a_mask_in_a_whole_graph_is_refused() -> None:
    model = unified("llama", use_cache=False)
    ids, mask = padded(sequences((20, 7)), "left")
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        whole(ids, attention_mask=mask)


def test_compiled_updates_have_the_bits_of_eager_ones() -> None:
    model = unified("qwen3_moe")
    ids, offsets, longest = packed(sequences((20, 7)))

    def update() -> torch.Tensor:
        return packed_logprobs(model, ids, offsets, ids.roll(-1), max_seqlen=longest)

    compiled = torch.compile(update, backend="aot_eager")
    assert agree(trained(model, compiled), trained(model, update))


@pytest.mark.slow
def test_generate_of_a_compiled_model_through_inductor() -> None:
    model = unified("qwen3", num_hidden_layers=1)
    ids, mask = padded(sequences((9, 4)), "left")
    options = {"max_new_tokens": 3, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    eager = model.generate(ids, attention_mask=mask, **options).logits
    model.forward = torch.compile(model.forward)
    found = model.generate(ids, attention_mask=mask, **options).logits
    assert all(same(one, other) for one, other in zip(found, eager, strict=True))
