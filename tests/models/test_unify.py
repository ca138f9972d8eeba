"""Unified transformers models: padded, packed, alone and generating, the bits of the Decoder."""

import copy
import inspect
import io
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_load import made
from tests.models.unified import (
    NAMES,
    call,
    decoded_logits,
    packed,
    packed_logits,
    padded,
    quietly,
    same,
    sequences,
    unified,
)

from kernelbraid.models import forwards
from kernelbraid.models.shared import decoder_of, packed_logprobs
from kernelbraid.models.unify import report, restore

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_a_batch_has_the_bits_of_the_decoder(name: str) -> None:
    model = unified(name)
    parts = sequences()
    wanted = packed_logits(decoder_of(model), parts)
    assert same(decoded_logits(decoder_of(model), parts), wanted), "rollout, token by token"
    for side in ("left", "right", "between"):
        ids, mask = padded(parts, side)
        assert same(call(model, ids, attention_mask=mask).logits[mask.bool()], wanted), side
    ids, offsets, longest = packed(parts)
    flat = call(model, ids[None], use_cache=False, cu_seq_lens_q=offsets, max_length_q=longest).logits[0]
    assert same(flat, wanted), "packed by offsets"
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    flat = call(model, ids[None], use_cache=False, position_ids=positions[None]).logits[0]
    assert same(flat, wanted), "packed by positions"
    for part, own in zip(parts, wanted.split([len(part) for part in parts]), strict=True):
        assert same(call(model, part[None]).logits[0], own), "alone"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampled", [False, True])
def test_generate_draws_from_the_logits_of_the_packed_forward(name: str, sampled: bool) -> None:
    model = unified(name)
    parts = sequences((9, 1, 14))
    ids, mask = padded(parts, "left")
    torch.manual_seed(0)
    options = {"max_new_tokens": 7, "pad_token_id": 0, "do_sample": sampled}
    found = model.generate(
        ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options
    )
    completions = found.sequences[:, ids.shape[1] :]
    whole = [torch.cat(pair) for pair in zip(parts, completions, strict=True)]
    wanted = packed_logits(decoder_of(model), whole).split([len(each) for each in whole])
    for row, own in enumerate(wanted):
        drawn = torch.stack([step[row] for step in found.logits])
        assert same(drawn, own[len(parts[row]) - 1 : -1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_filled_cache_is_read_in_pages(side: str) -> None:
    """More keys than a page holds, padding among them, continued by several tokens and by one."""
    model = unified("qwen3", num_hidden_layers=1, max_position_embeddings=1024)
    parts = sequences((600, 3, 530))
    wanted = packed_logits(decoder_of(model), parts).split([600, 3, 530])
    ids, mask = padded(parts, side)
    cache = transformers.DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    rows = []
    for start, stop in ((0, 590), (590, 599), (599, 600)):
        options: dict[str, Any] = {name: cache, "attention_mask": mask[:, :stop]}
        rows.append(call(model, ids[:, start:stop], use_cache=True, **options).logits)
    found = torch.cat(rows, 1)
    for row, own in enumerate(wanted):
        assert same(found[row][mask[row].bool()], own)


@pytest.mark.parametrize("seed", range(12))
def test_any_padding_in_any_chunks(seed: int) -> None:
    """Masks drawn at random, rows without a token among them, through a cache filled in random pieces."""
    rng = random.Random(seed)
    model = unified(rng.choice(NAMES), num_hidden_layers=1)
    rows, slots = rng.randint(1, 4), rng.randint(1, 40)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 200, (rows, slots), generator=generator)
    share = torch.rand(rows, 1, generator=generator) * 1.4
    mask = (torch.rand(rows, slots, generator=generator) < share).long()
    mask[0, 0] = 1
    cache = transformers.DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cuts = sorted({0, slots, *(rng.randint(0, slots) for _ in range(3))})
    pieces = []
    for start, stop in pairwise(cuts):
        options: dict[str, Any] = {name: cache, "attention_mask": mask[:, :stop], "use_cache": True}
        pieces.append(call(model, ids[:, start:stop], **options).logits)
    parts = [own[kept] for own, kept in zip(ids, mask.bool(), strict=True)]
    wanted = packed_logits(decoder_of(model), parts)
    assert same(torch.cat(pieces, 1)[mask.bool()], wanted)
    assert same(call(model, ids, attention_mask=mask).logits[mask.bool()], wanted)


def test_the_state_dict_stays_and_restore_brings_everything_back() -> None:
    for name in NAMES:
        model = made(name)
        ids, mask = padded(sequences((9, 4)), "left")
        before = call(model, ids, attention_mask=mask).logits
        state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        objects = dict(model.named_parameters())
        assert quietly(model).complete
        assert not same(call(model, ids, attention_mask=mask).logits, before)
        assert list(model.state_dict()) == list(state)
        assert all(same(tensor, state[key]) for key, tensor in model.state_dict().items())
        assert all(each is objects[key] for key, each in model.named_parameters())
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == model.config.tie_word_embeddings
        assert quietly(model).complete, "twice is once"
        restore(model)
        assert same(call(model, ids, attention_mask=mask).logits, before)
        assert list(model.state_dict()) == list(state) and not report(model).unified
        assert all("forward" not in vars(module) for module in model.modules())
        storages = [each.untyped_storage().data_ptr() for each in model.parameters()]
        assert len(set(storages)) == len(storages)
        with pytest.raises(ValueError, match="the model is not unified"):
            restore(model)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])
def test_saved_and_loaded_models_are_the_same(name: str, tmp_path: Path) -> None:
    """Parameters that share a storage are saved under their own names, tied ones once."""
    model = unified(name)
    state = model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.state_dict().keys() == state.keys()
    assert all(same(tensor, state[key]) for key, tensor in loaded.state_dict().items())
    ids, mask = padded(sequences((9, 4)), "left")
    wanted = call(model, ids, attention_mask=mask).logits
    quietly(loaded)
    assert same(call(loaded, ids, attention_mask=mask).logits, wanted)
    other = unified(name, initializer_range=0.5)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(state)
    assert same(call(other, ids, attention_mask=mask).logits, wanted)


def test_copies_and_pickles_stay_unified() -> None:
    model = unified("llama")
    ids = sequences((9,))[0][None]
    wanted = call(model, ids).logits
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert report(other).complete
        assert other.lm_head.weight is other.model.embed_tokens.weight
        other.model.norm.weight.data.zero_()
        assert call(other, ids).logits.abs().max() == 0
    assert same(call(model, ids).logits, wanted)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_training_with_gradient_checkpointing_has_the_same_bits(name: str, reentrant: bool) -> None:
    model = unified(name).train()
    ids, mask = padded(sequences((20, 7)), "left")

    def trained() -> list[torch.Tensor]:
        model.zero_grad()
        found = model(ids, attention_mask=mask, labels=ids, use_cache=False)
        found.loss.backward()
        return [found.logits.detach(), *(each.grad for each in model.parameters())]

    plain = trained()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert all(same(one, other) for one, other in zip(plain, trained(), strict=True))
    assert same(plain[0][mask.bool()], packed_logits(decoder_of(model), [ids[0], ids[1, 13:]]))


def test_hidden_states_hooks_and_router_logits_work() -> None:
    model = unified("qwen3_moe")
    ids = sequences((9,))[0][None]
    seen = []
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(1))
    found = call(model, ids, output_hidden_states=True, output_router_logits=True)
    handle.remove()
    assert len(found.hidden_states) == 3 and len(found.router_logits) == 2 and seen == [1]


def test_padding_idx_gets_no_gradient_from_the_embedding() -> None:
    """As in torch, in both paths; ids and loss are such that it would get one."""
    model = unified("qwen3", pad_token_id=7)
    assert model.model.embed_tokens.padding_idx == 7
    ids = torch.tensor([3, 7, 9, 7])
    for loss in (
        model(ids[None]).logits.square().sum(),
        packed_logprobs(model, ids, torch.tensor([0, 4], dtype=torch.int32), ids.roll(-1)).sum(),
    ):
        model.zero_grad()
        loss.backward()
        rows = model.model.embed_tokens.weight.grad.abs().sum(1)
        assert rows[7] == 0 and rows[3] > 0 and rows[9] > 0


def test_beams_are_read_from_a_reordered_cache() -> None:
    model = unified("qwen3")
    parts = sequences((9, 4))
    ids, mask = padded(parts, "left")
    with torch.inference_mode():
        found = model.generate(
            *(ids,),
            **{"attention_mask": mask, "max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 4},
            **{"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0},
        )
    moved = 0
    for row, completion in enumerate(found.sequences[:, ids.shape[1] :]):
        part = parts[row // 4]
        whole = torch.cat([part, completion])
        wanted = packed_logits(decoder_of(model), [whole])[len(part) - 1 : -1]
        beams = found.beam_indices[row]
        drawn = torch.stack([step[beam] for step, beam in zip(found.logits, beams, strict=True)])
        assert same(drawn, wanted)
        moved += len(set(beams.tolist())) > 1
    assert moved > 2


# ---- Negative controls ----


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_not_unified_differs(name: str) -> None:
    model = unified(name)
    parts = sequences((40,))
    wanted = packed_logits(decoder_of(model), parts)
    restore(model)
    assert not same(call(model, parts[0][None]).logits[0], wanted)


class OwnNorm(transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm):  # type: ignore[misc, name-defined]
    """What a user's own module is: of a class that nobody tested."""


def test_a_module_that_is_left_is_listed_and_nothing_is_claimed() -> None:
    model = made("qwen3")
    model.model.layers[1].post_attention_layernorm.__class__ = OwnNorm
    found = quietly(model)
    assert not found.complete
    assert dict(found.left) == {"model.layers.1.post_attention_layernorm": "OwnNorm, not Qwen3RMSNorm"}
    parts = sequences((40,))
    message = r"not unified, so that bits may differ: model\.layers\.1\.post_attention_layernorm \(OwnNorm"
    for refused in (
        lambda: decoder_of(model),
        lambda: packed_logprobs(model, parts[0], torch.tensor([0, 40], dtype=torch.int32), parts[0]),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    left = call(model, parts[0][None]).logits[0]
    model.model.layers[1].post_attention_layernorm.__class__ = OwnNorm.__mro__[1]
    assert quietly(model).complete
    assert not same(left, packed_logits(decoder_of(model), parts)), "the one module that was left is seen"


def test_other_modules_that_stay_are_listed() -> None:
    model = made("qwen2")
    model.value_head = torch.nn.Linear(256, 1)
    model.model.layers[0].mlp.down_proj.forward = lambda x: x
    assert dict(quietly(model).left) == {
        "value_head": "Linear at a place that the family does not have",
        "model.layers.0.mlp.down_proj": "its forward was replaced by something else",
    }


@pytest.mark.parametrize(
    ("name", "module", "option", "value", "reason"),
    [
        ("llama", "model.norm", "variance_epsilon", 0.5, "its variance_epsilon is 0.5, the configuration's"),
        ("qwen3", "model.layers.0.self_attn.k_norm", "variance_epsilon", 0.5, "its variance_epsilon is 0.5"),
        (
            "qwen2",
            "model.layers.1.self_attn",
            "scaling",
            0.5,
            "its scaling is 0.5, the configuration's",
        ),
        ("qwen3_moe", "model.layers.0.mlp.gate", "top_k", 3, "its top_k is 3, the configuration's 2"),
        (
            *("llama", "lm_head", "bias", torch.nn.Parameter(torch.ones(200))),
            "it has a bias that the family does not have",
        ),
        ("qwen2", "model.layers.0.self_attn.v_proj", "bias", None, "it has no bias"),
        ("qwen3", "model.embed_tokens", "max_norm", 1.0, "max_norm, scale_grad_by_freq and sparse"),
    ],
)
def test_modules_that_are_not_as_configured_are_listed(
    name: str, module: str, option: str, value: object, reason: str
) -> None:
    for model in (made(name), unified(name)):
        setattr(model.get_submodule(module), option, value)
        for found in (report(model), quietly(model)):
            assert not found.complete and found.left[module].startswith(reason)


def test_a_feed_forward_with_a_projection_of_another_make_is_left_and_works() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    ids = sequences((9,))[0][None]
    for model in (made("llama"), unified("llama")):
        model.model.layers[1].mlp.up_proj.__class__ = Scaled
        vars(model.model.layers[1].mlp.up_proj).pop("forward", None)
        found = quietly(model)
        assert dict(found.left) == {
            "model.layers.1.mlp": "model.layers.1.mlp.up_proj cannot be unified",
            "model.layers.1.mlp.up_proj": "Scaled, not Linear",
        }
        ours = call(model, ids).logits
        restore(model)
        difference = (ours - call(model, ids).logits).abs().max()
        assert 0 < difference < 1e-4


def test_attention_is_unified_as_a_whole_or_not_at_all() -> None:
    """A layer of another make needs transformers' mask and angles, and gets them."""
    model = made("llama")
    ids, mask = padded(sequences((9, 4)), "left")
    wanted = call(model, ids, attention_mask=mask).logits
    assert quietly(model).complete
    kind = type(model.model.layers[0].self_attn)
    model.model.layers[0].self_attn.__class__ = type("Own", (kind,), {})
    found = quietly(model)
    assert found.left["model.layers.0.self_attn"] == "Own, not LlamaAttention"
    reason = "attention is unified as a whole, and model.layers.0.self_attn cannot be"
    for name in ("model", "model.rotary_emb", "model.layers.1.self_attn", "model.layers.0.self_attn.o_proj"):
        assert found.left[name] == reason
    assert "model.norm" in found.unified and "model.layers.0.mlp" in found.unified
    difference = (call(model, ids, attention_mask=mask).logits - wanted)[mask.bool()].abs().max()
    assert 0 < difference < 1e-4


def test_what_replaces_or_hooks_a_joined_projection_is_refused() -> None:
    model = unified("qwen2")
    ids = sequences((5,))[0][None]
    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="k_proj has hooks, which do not run in a joint projection"):
        call(model, ids)
    handle.remove()
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(256, 160, bias=False)
    with pytest.raises(ValueError, match="up_proj was replaced since unify"):
        call(model, ids)
    left = report(model).left
    assert left["model.layers.0.mlp.up_proj"] == "its forward is transformers' own: call unify(model)"


def row_dependent(x, weight, *, eps):
    """Another order of the same sum for few rows: what unified operators never do."""
    if x.shape[:-1].numel() < 30:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return unified_norm(x, weight, eps=eps)


unified_norm = forwards.rms_norm


def test_an_operator_that_depends_on_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = unified("llama")
    parts = sequences((40, 20))
    monkeypatch.setattr(forwards, "rms_norm", row_dependent)
    wanted = packed_logits(decoder_of(model), parts)
    ids, mask = padded(parts, "left")
    assert same(call(model, ids, attention_mask=mask).logits[mask.bool()], wanted)
    assert not same(call(model, parts[1][None]).logits[0], wanted[40:])


def test_positions_that_ignore_the_mask_would_be_seen() -> None:
    """Angles counted from padding give other bits, which is why they are refused."""
    model = unified("llama")
    part = sequences((20,))[0]
    tables = vars(model.model.rotary_emb)[forwards.TABLES]
    wanted = call(model, part[None]).logits
    vars(model.model.rotary_emb)[forwards.TABLES] = type(tables)(tables.cos[5:], tables.sin[5:])
    assert not same(call(model, part[None]).logits, wanted)
