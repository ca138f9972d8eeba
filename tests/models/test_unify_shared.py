"""The packed update over a transformers model's parameters, and the Decoder that shares their memory."""

import pytest
import torch
from tests.models.test_load import made
from tests.models.unified import (
    NAMES,
    packed,
    packed_logits,
    padded,
    quietly,
    same,
    sequences,
    unified,
)

from kernelbraid.models.config import from_hugging_face
from kernelbraid.models.load import from_state
from kernelbraid.models.model import Decoder
from kernelbraid.models.relations import generate, roll_out
from kernelbraid.models.shared import decoder_of, packed_logprobs, parts_of, refresh, shares
from kernelbraid.models.unify import restore


def gradients(model, ids, offsets, labels, **options) -> dict[str, torch.Tensor]:
    model.zero_grad()
    packed_logprobs(model, ids, offsets, labels, **options).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_the_update_scores_what_rollout_recorded(name: str) -> None:
    """Tokens drawn through the paged cache of the Decoder, at two temperatures, and given sequences."""
    model = unified(name)
    decoder = decoder_of(model)
    for temperature in (1.0, 0.7):
        with torch.no_grad():
            drawn = generate(decoder, sequences((9, 1, 14)), 8, seed=3, temperature=temperature)
        parts = [each[:-1] for each in drawn.sequences]
        labels = torch.cat([each[1:] for each in drawn.sequences])
        ids, offsets, longest = packed(parts)
        found = packed_logprobs(model, ids, offsets, labels, temperature=temperature, max_seqlen=longest)
        for own, recorded in zip(found.split([len(part) for part in parts]), drawn.logprobs, strict=True):
            assert same(own[-8:], recorded)
    parts = sequences()
    ids, offsets, _ = packed(parts)
    labels = torch.cat([part.roll(-1) for part in parts])
    with torch.no_grad():
        steps = roll_out(decoder, parts, [[1] * len(part) for part in parts])
    assert same(packed_logprobs(model, ids, offsets, labels), torch.cat(steps.logprobs))
    ignored = labels.masked_fill(torch.arange(len(labels)) % 2 == 0, -100)
    assert packed_logprobs(model, ids, offsets, ignored)[::2].abs().max() == 0


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_decoders_and_do_not_depend_on_neighbours(name: str) -> None:
    model = unified(name, tie_word_embeddings=False)
    one, other = sequences((30,), low=0, high=100)[0], sequences((45,), seed=2, low=100)[0]
    ids, offsets, _ = packed([one, other])
    labels = torch.cat([one.roll(-1), other.roll(-1)])
    found = gradients(model, ids, offsets, labels)
    again = gradients(model, ids, offsets, labels)
    assert all(same(found[key], again[key]) for key in found)

    swapped, starts, _ = packed([other, one])
    moved = gradients(model, swapped, starts, torch.cat([other.roll(-1), one.roll(-1)]))
    alone = gradients(model, *packed([one])[:2], one.roll(-1))
    rows = "model.embed_tokens.weight"
    for each in (moved, alone):
        assert same(each[rows][:100], found[rows][:100]), "what goes back through every layer to a token"
    assert not same(moved["lm_head.weight"], alone["lm_head.weight"])

    silent = torch.cat([one.roll(-1), torch.full((45,), -100)])
    beside = gradients(model, ids, offsets, silent)
    assert all(torch.equal(beside[key], alone[key]) for key in alone), "a neighbour that does not count"

    sizes = from_hugging_face(model.config)
    weights = from_state(sizes, model.state_dict(), dtype=torch.float32)
    tensors = dict(weights.tensors())
    for tensor in tensors.values():
        tensor.requires_grad_()
    plain = Decoder(sizes, weights, 256)
    plain.logprobs(plain.hidden(ids, offsets, 45), labels).sum().backward()
    names = {id(each): key for key, each in model.named_parameters()}
    for key, parts in parts_of(model).items():
        grad = tensors[key].grad
        assert grad is not None
        assert same(torch.cat([found[names[id(part)]] for part in parts]), grad), key


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_transformers_own(name: str) -> None:
    """That they are right, not only the same: both paths of the update, against torch's autograd."""
    model = made(name)
    one, other = sequences((30, 12))
    ids, mask = padded([one, other], "right")

    def grads(logits: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        scores = torch.log_softmax(logits / 0.8, -1).gather(2, ids.roll(-1, 1)[..., None])[..., 0]
        (scores * mask * weight).sum().backward()
        return [each.grad.clone() for each in model.parameters()]

    weight = torch.linspace(-1, 1, 30)
    wanted = grads(model(ids, attention_mask=mask).logits)
    assert quietly(model).complete
    found = grads(model(ids, attention_mask=mask).logits)
    model.zero_grad()
    flat, offsets, _ = packed([one, other])
    labels = ids.roll(-1, 1)[mask.bool()]
    scores = packed_logprobs(model, flat, offsets, labels, temperature=0.8)
    (scores * weight.expand(2, -1)[mask.bool()]).sum().backward()
    for each, ours, parameter in zip(wanted, found, model.parameters(), strict=True):
        limit = 1e-5 * each.abs().max() + 1e-6
        assert (ours - each).abs().max() < limit and (parameter.grad - each).abs().max() < limit


def test_memory_that_is_shared_is_no_numeric_choice() -> None:
    """Adjacent parameters and parameters that lie apart: the same values and gradients."""
    model = unified("qwen2")
    ids, offsets, _ = packed(sequences((20, 9)))
    joined = gradients(model, ids, offsets, ids.roll(-1))
    value = packed_logprobs(model, ids, offsets, ids.roll(-1))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    decoder = decoder_of(model)
    assert not shares(decoder.weights.layers[0].qkv, parts_of(model)["layers.0.qkv"])
    apart = gradients(model, ids, offsets, ids.roll(-1))
    assert same(packed_logprobs(model, ids, offsets, ids.roll(-1)), value)
    assert all(same(joined[key], apart[key]) for key in joined)


def test_checkpointing_changes_no_bit() -> None:
    model = unified("qwen3_moe").train()
    ids, offsets, _ = packed(sequences((20, 9)))
    plain = gradients(model, ids, offsets, ids.roll(-1))
    model.gradient_checkpointing_enable()
    calls = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: calls.append(x.shape) or x, lambda x: x)
    with hooks:
        packed_logprobs(model, ids, offsets, ids.roll(-1))
    fewer = len(calls)
    model.gradient_checkpointing_disable()
    calls.clear()
    with hooks:
        packed_logprobs(model, ids, offsets, ids.roll(-1))
    assert fewer < len(calls) / 2, "layers are computed again instead of kept"
    model.gradient_checkpointing_enable()
    again = gradients(model, ids, offsets, ids.roll(-1))
    assert all(same(plain[key], again[key]) for key in plain)


@pytest.mark.parametrize("name", NAMES)
def test_the_decoder_sees_an_optimizers_step_in_place(name: str) -> None:
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    assert quietly(model).complete
    decoder = decoder_of(model)
    tensors = dict(decoder.weights.tensors())
    assert all(shares(tensors[key], parts) for key, parts in parts_of(model).items()), "no copies"
    assert not any(tensor.requires_grad for tensor in tensors.values())
    parts = sequences((12, 5))
    ids, offsets, _ = packed(parts)
    before = packed_logits(decoder, parts)
    packed_logprobs(model, ids, offsets, ids.roll(-1)).sum().backward()
    optimizer.step()
    after = packed_logits(decoder, parts)
    assert not same(after, before)
    fresh = made(name)
    fresh.load_state_dict(model.state_dict())
    assert quietly(fresh).complete
    assert same(packed_logits(decoder_of(fresh), parts), after)
    done = refresh(decoder, model, version=1)
    assert (done.version, done.copied, decoder.version) == (1, 0, 1)
    assert done.shared == len(tensors)


def test_parameters_that_moved_are_copied_into_place() -> None:
    model = unified("qwen2")
    decoder = decoder_of(model)
    parts = sequences((12, 5))
    held = dict(decoder.weights.tensors())
    addresses = {key: tensor.data_ptr() for key, tensor in held.items()}
    stale = packed_logits(decoder, parts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter * 1.5
    assert same(packed_logits(decoder, parts), stale), "the decoder kept the old memory"
    done = refresh(decoder, model, version=4)
    assert (done.version, done.shared, done.copied) == (4, 0, len(held))
    assert {key: tensor.data_ptr() for key, tensor in decoder.weights.tensors()} == addresses
    assert same(packed_logits(decoder, parts), packed_logits(decoder_of(model), parts))
    assert not same(packed_logits(decoder, parts), stale)


def test_a_restored_models_decoder_keeps_its_memory() -> None:
    model = unified("llama")
    decoder = decoder_of(model)
    before = packed_logits(decoder, sequences((5,)))
    restore(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    assert same(packed_logits(decoder, sequences((5,))), before)


def test_a_refresh_that_does_not_fit_writes_nothing() -> None:
    model = unified("qwen2")
    decoder = decoder_of(model)
    before = packed_logits(decoder, sequences((5,)))
    other = unified("qwen2", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"do not have the same tensors: layers\.1"):
        refresh(decoder, other, version=1)
    wide = unified("qwen2", intermediate_size=96)
    with pytest.raises(ValueError, match=r"layers\.0\.down is \[256, 160\] torch.float32 in the decoder"):
        refresh(decoder, wide, version=1)
    refresh(decoder, model, version=3)
    with pytest.raises(ValueError, match="version must be at least 3, the decoder's, got 2"):
        refresh(decoder, model, version=2)
    assert same(packed_logits(decoder, sequences((5,))), before) and decoder.version == 3


def test_a_weight_changed_before_backward_is_noticed() -> None:
    """The joined matrix is another tensor to autograd; its parts' versions are checked all the same."""
    model = unified("llama")
    ids, offsets, _ = packed(sequences((9,)))
    found = packed_logprobs(model, ids, offsets, ids.roll(-1)).sum()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


def test_memory_with_other_owners_stays_where_it_is() -> None:
    model = made("llama")
    attention = model.model.layers[0].self_attn
    shared = attention.q_proj.weight.data = attention.q_proj.weight.data.share_memory_()
    flat = torch.cat([attention.k_proj.weight.data.flatten() for _ in range(2)])
    model.model.layers[1].self_attn.k_proj.weight.data = flat[: len(flat) // 2].view(128, 96)
    quietly(model)
    assert attention.q_proj.weight.data_ptr() == shared.data_ptr()
    assert model.model.layers[1].self_attn.k_proj.weight.data_ptr() == flat.data_ptr()
    parts = sequences((12, 5))
    with torch.no_grad():
        found = model(parts[0][None]).logits[0]
    assert same(found, packed_logits(decoder_of(model), parts)[:12])


def test_wrong_shapes_and_lengths_are_refused() -> None:
    model = unified("llama")
    ids, offsets, _ = packed(sequences((9,)))
    with pytest.raises(ValueError, match=r"input_ids must be \[tokens\], packed, got \[1, 9\]"):
        packed_logprobs(model, ids[None], offsets, ids[None])
    with pytest.raises(ValueError, match=r"labels must have the shape of input_ids, \[9\], got \[8\]"):
        packed_logprobs(model, ids, offsets, ids[1:])
    quietly(model, positions=8)
    with pytest.raises(ValueError, match="a sequence has 9 tokens, and positions cover 8"):
        packed_logprobs(model, ids, offsets, ids)
    with pytest.raises(ValueError, match="a request has 9 tokens, and positions cover 8"):
        model(ids[None])
