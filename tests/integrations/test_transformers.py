"""Unified attention under a name of transformers: its bits are the operator's, its logits near eager's."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

transformers = pytest.importorskip("transformers")

from tests.integrations.recorded import NAMES, calls, made, packed_attention, quietly_register, rows  # noqa: E402  # noqa: E402
from tests.models.unified import bits, call, padded, quietly, same, sequences  # noqa: E402

from kernelbraid.integrations import transformers as integration  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [33, 1, 17, 50]
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def eager(name: str, **changes: object) -> Any:
    return made(name, "eager", **changes)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_padded_batches(name: str, side: str) -> None:
    ids, mask = padded(sequences(LENGTHS), side)
    found = call(made(name), ids, attention_mask=mask).logits
    q, k, v, out = calls[0]
    wanted = call(eager(name), ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], **NEAR)
    direct = packed_attention(rows(q, mask), rows(k, mask), rows(v, mask), LENGTHS)
    assert same(out[mask.bool()], direct)
    assert not out[~mask.bool()].any()


def test_bits_of_another_attention_are_others() -> None:
    """A control of the comparison above: torch's attention of the same rows has other bits."""
    ids = sequences([50])[0][None]
    call(made("qwen3"), ids)
    q, k, v, out = calls[0]
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, theirs, **NEAR)
    assert not torch.equal(bits(out), bits(theirs))


def test_a_neighbour_that_leaks_in_is_seen() -> None:
    """A control: where a slot of padding counts as a token, real rows change."""
    ids, mask = padded(sequences([9, 12]), "left")
    model = made("llama")
    call(model, ids, attention_mask=mask)
    right = calls[0][3]
    mask[0, 2] = 1
    call(model, ids, attention_mask=mask)
    assert not same(calls[1][3][0, 3:], right[0, 3:])


@pytest.mark.parametrize("name", NAMES)
def test_generate_decodes_with_the_packed_bits(name: str) -> None:
    ids, mask = padded(sequences([7, 12, 3]), "left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model = made(name)
    model.generation_config.eos_token_id = None
    tokens = model.generate(ids, **options)
    steps = list(calls)
    assert [step[0].shape[2] for step in steps] == [12, 1, 1, 1, 1, 1]
    other = eager(name)
    other.generation_config.eos_token_id = None
    assert torch.equal(tokens, other.generate(ids, **options))
    whole = torch.cat([mask, torch.ones(3, 5, dtype=mask.dtype)], 1)
    q = torch.cat([step[0] for step in steps], 2)
    out = torch.cat([step[3] for step in steps], 1)
    k, v = steps[-1][1:3]
    direct = packed_attention(rows(q, whole), rows(k, whole), rows(v, whole), [12, 17, 8])
    assert same(out[whole.bool()], direct)


def test_chunks_of_a_prompt() -> None:
    ids = sequences([40, 40])
    model, cache = made("qwen3"), transformers.DynamicCache()
    both = torch.stack(ids)
    for begin, end in ((0, 11), (11, 12), (12, 40)):
        call(model, both[:, begin:end], past_key_values=cache)
    q = torch.cat([step[0] for step in calls], 2)
    out = torch.cat([step[3] for step in calls], 1)
    k, v = calls[-1][1:3]
    every = torch.ones_like(both)
    assert same(out.flatten(0, 1), packed_attention(rows(q, every), rows(k, every), rows(v, every), [40, 40]))


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences(name: str) -> None:
    ids = torch.cat(sequences(LENGTHS))[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    model = made(name)
    found = call(model, ids, position_ids=positions, use_cache=False).logits
    q, k, v, out = calls[0]
    every = torch.ones_like(ids)
    assert same(out[0], packed_attention(rows(q, every), rows(k, every), rows(v, every), LENGTHS))
    wanted = call(eager(name), ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, wanted, **NEAR)
    lengths = {"max_length_q": 50, "max_length_k": 50}
    starts = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    again = call(model, ids, position_ids=positions, use_cache=False, **starts, **lengths).logits
    assert same(found, again)


def test_a_long_packed_mask_is_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "MASK_ROWS", 7)
    test_packed_sequences("llama")


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_gradients(name: str) -> None:
    ids, mask = padded(sequences([20, 9]), "right")
    labels = ids.masked_fill(mask == 0, -100)
    models = made(name), eager(name)
    for model in models:
        model.train()
        model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    for (part, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, part
        largest = theirs.grad.abs().max().clamp_min(1e-12)
        assert (ours.grad - theirs.grad).abs().max() <= 1e-4 * largest, part


def test_checkpointing_changes_no_gradient() -> None:
    ids, mask = padded(sequences([20, 9]), "left")
    gradients = []
    for checkpointed in (False, True):
        model = made("qwen3").train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()].square().mean().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert same(*gradients)


def test_compiled_models_have_the_same_attention() -> None:
    ids, mask = padded(sequences([20, 9]), "left")
    model = made("qwen3", "kernelbraid")
    compiled = torch.compile(model, backend="eager")
    found = call(compiled, ids, attention_mask=mask).logits
    assert same(found, call(model, ids, attention_mask=mask).logits)


def test_gradients_through_a_cache_are_refused() -> None:
    model, cache = made("qwen3"), transformers.DynamicCache()
    ids = sequences([10])[0][None]
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(ids[:, :1], past_key_values=cache)


def test_unify_stays_what_it_is() -> None:
    ids, mask = padded(sequences(LENGTHS), "left")
    found = []
    for implementation in ("kernelbraid", "eager"):
        model = made("qwen3", implementation)
        assert quietly(model).complete
        found.append(call(model, ids, attention_mask=mask).logits[mask.bool()])
    assert same(*found)


def sliding() -> Any:
    return made("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)


IDS = torch.arange(12)[None]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"attention_dropout": 0.1}, {}, "dropout=0.1"),
        ({"is_causal": False}, {}, "is_causal=False"),
        ({}, {"output_attentions": True}, "output_attentions"),
        ({}, {"is_causal": False}, "is_causal"),
        ({}, {"softcap": 30.0}, "softcap.*capped"),
        ({}, {"s_aux": torch.zeros(4)}, "s_aux.*sinks"),
        ({}, {"position_bias": torch.zeros(4)}, "position_bias"),
        ({}, {"temperature": 2.0}, "temperature"),
        ({}, {"attention_mask": torch.zeros(1, 1, 12, 12)}, r"attention_mask.*\[1, 1, 12, 12\]"),
        ({}, {"position_ids": torch.arange(12)[None] % 6}, "position_ids.*use_cache=False"),
        ({}, {"cu_seq_lens_q": torch.tensor([0, 6, 12], dtype=torch.int32)}, "cu_seq_lens_q.*position_ids"),
        ({"head_dim": 32}, {}, "32"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value) or "none",
)
def test_what_the_contract_excludes_is_refused(change: Any, options: Any, message: str) -> None:
    model = made("qwen3", **change)
    model.train(bool(change.get("attention_dropout")))
    with pytest.raises(ValueError, match=message):
        call(model, IDS, **options)


SMALL = {
    **{
        "vocab_size": 200,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "head_dim": 64,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}


def of_another_family(kind: str, **options: Any) -> Any:
    quietly_register()
    config = getattr(transformers, kind)(**SMALL, **options)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="kernelbraid", dtype=torch.float32
    ).eval()


def test_other_families_that_state_what_is_excluded_are_refused() -> None:
    whole = {"layer_types": ["full_attention"] * 2}
    with pytest.raises(ValueError, match="sliding_window"):
        call(of_another_family("MistralConfig", sliding_window=4096), IDS)
    with pytest.raises(ValueError, match="sliding_window"):  # its masks come first, then softcap
        call(of_another_family("Gemma2Config", query_pre_attn_scalar=64, **whole), IDS)
    with pytest.raises(ValueError, match="sliding_window"):  # and s_aux
        call(of_another_family("GptOssConfig", num_local_experts=4, num_experts_per_tok=2, **whole), IDS)
    assert call(of_another_family("MistralConfig", sliding_window=None), IDS).logits.isfinite().all()


def test_other_dtypes_and_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"query must be float32 on cpu, got torch\.bfloat16"):
        call(made("llama").bfloat16(), IDS)
    with pytest.raises(ValueError, match="sliding_window"):
        call(sliding(), IDS)


def test_masks_of_ones_own_are_refused() -> None:
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    def with_prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return causal_mask_function(batch, head, query, key) | (key < 4)

    def with_gap(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return causal_mask_function(batch, head, query, key) & ((key != 2) | (query == key))

    def returning(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return causal_mask_function(batch, head, query, key) & (key >= torch.where(query % 4 < 2, 0, query))

    for function in (bidirectional_mask_function, with_prefix, with_gap, returning):
        with pytest.raises(ValueError, match="mask_function must be causal"):
            integration.prepare(2, 9, 9, mask_function=function)
    with pytest.raises(ValueError, match="or_mask_function"):
        integration.prepare(2, 9, 9, use_vmap=True)
    with pytest.raises(ValueError, match="is_causal"):
        integration.prepare(2, 9, 9, allow_is_bidirectional_skip=True)


def test_static_caches_are_refused() -> None:
    model = made("qwen3")
    with pytest.raises(ValueError, match="DynamicCache"):
        model.generate(IDS, max_new_tokens=3, cache_implementation="static", disable_compile=True)


def test_the_guard_sees_configurations_and_caches() -> None:
    from transformers.cache_utils import DynamicLayer

    class QuantizedLayer(DynamicLayer):
        pass

    model = made("qwen3")
    handle = integration.guard(model)
    assert model.generate(IDS, max_new_tokens=2, pad_token_id=0).shape == (1, 14)
    cache = transformers.DynamicCache()
    cache.layers = [QuantizedLayer(), QuantizedLayer()]
    with pytest.raises(ValueError, match="QuantizedLayer"):
        call(model, IDS, past_key_values=cache)
    handle.remove()
    call(model, IDS, past_key_values=cache)  # without the guard nothing can see it
    refused = {"attention_dropout": 0.1, "is_causal": False}
    for option, value in refused.items():
        with pytest.raises(ValueError, match=option):
            integration.guard(made("qwen3", **{option: value}))
    with pytest.raises(ValueError, match="sliding_window"):
        integration.guard(sliding())
    with pytest.raises(ValueError, match="dtype must be float32"):
        integration.guard(made("qwen3").double())
    model.generation_config.cache_implementation = "quantized"
    with pytest.raises(ValueError, match="cache_implementation='quantized'"):
        integration.guard(model)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_register_warns_once_and_only_itself() -> None:
    code = (
        "import warnings, kernelbraid.integrations.transformers as t, transformers\n"
        "assert 'kernelbraid' not in transformers.AttentionInterface().valid_keys()\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    t.register(); t.register()\n"
        "[one] = [str(each.message) for each in seen if 'unify(model)' in str(each.message)]\n"
        "transformers.AttentionInterface.register('kernelbraid', print)\n"
        "try: t.register()\n"
        "except ValueError as error: print('refused', error)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused attn_implementation")


def test_without_the_extra_the_import_says_what_to_install() -> None:
    code = (
        "import sys\nsys.modules['transformers'] = None\nimport kernelbraid, kernelbraid.integrations\n"
        "try: import kernelbraid.integrations.transformers\n"
        "except RuntimeError as error: print(error)\n"
    )
    assert "kernelbraid[models]" in run(code).stdout


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    quietly_register()
    runpy.run_path(str(ROOT / "examples" / "transformers_attention.py"))
    assert "bits of attention equal" in capsys.readouterr().out


def test_the_pages_example_runs() -> None:
    quietly_register()
    page = (ROOT / "docs" / "transformers.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"].config._attn_implementation == "kernelbraid"


def test_tested_versions_are_stated() -> None:
    quietly_register()
    assert transformers.__version__ in integration.TESTED_TRANSFORMERS
