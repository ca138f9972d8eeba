"""What `unify` refuses, by name and before anything is changed, and what its calls refuse."""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.test_load import made
from tests.models.unified import call, padded, quietly, sequences, unified

from kernelbraid.audit import certificates
from kernelbraid.models.certified import certified
from kernelbraid.models.unify import report, unify

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1 is not covered: load with"),
        ("llama", {"attention_bias": True}, "attention_bias is covered for qwen2 alone"),
        ("qwen3", {"attention_bias": True}, "attention_bias is covered for qwen2 alone"),
        ("llama", {"mlp_bias": True}, "mlp_bias is not covered"),
        ("llama", {"rope_parameters": YARN}, "rope_type must be default or llama3, got 'yarn'"),
        ("llama", {"rope_parameters": PARTIAL}, "partial_rotary_factor is not covered"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            "sliding-window",
        ),
        ("qwen3", {"head_dim": 32}, r"head_dim must be one of \(64, 128\), got 32"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "every layer must be sparse"),
    ],
)
def test_options_that_are_not_covered_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    model = made(name, **changes)
    with pytest.raises(ValueError, match=message):
        unify(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_an_option_set_after_loading_is_seen_in_the_modules() -> None:
    for option, value in (("attention_dropout", 0.2), ("sliding_window", 64)):
        model = made("qwen3")
        setattr(model.model.layers[1].self_attn, option, value)
        with pytest.raises(
            ValueError, match=rf"model\.layers\.1\.self_attn\.{option}={value} is not covered"
        ):
            unify(model)
    model = made("llama")
    model.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal=False is not covered"):
        unify(model)


def test_other_models_are_refused() -> None:
    with pytest.raises(
        ValueError, match="model_type must be one of llama, qwen2, qwen3, qwen3_moe, got None"
    ):
        unify(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model must be a LlamaForCausalLM, got LlamaModel: pass the model"):
        unify(made("llama").model)


def test_angles_that_are_not_the_configurations_are_refused() -> None:
    model = made("llama")
    model.model.rotary_emb.inv_freq.mul_(2)
    with pytest.raises(ValueError, match=r"model\.rotary_emb has other angles than rope_parameters"):
        unify(model)


def test_quantised_weights_are_refused() -> None:
    model = made("llama")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ValueError, match="quantization_config states gptq weights"):
        unify(model)
    model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ValueError, match="quantization_config states bitsandbytes weights"):
        unify(model)
    del model.config.quantization_config

    class Params4bit(torch.nn.Parameter):
        pass

    model.model.layers[0].mlp.up_proj.weight = Params4bit(torch.zeros(160, 96))
    with pytest.raises(ValueError, match=r"up_proj\.weight is a Params4bit, which is not covered"):
        unify(model)


def test_adapters_are_refused() -> None:
    model = made("llama")
    kind = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.model.layers[0].self_attn.q_proj.__class__ = kind
    with pytest.raises(ValueError, match=r"self_attn\.q_proj is a PEFT adapter \(LoRA\), .* merge it first"):
        unify(model)
    model = made("llama")
    model.peft_config = {}
    with pytest.raises(ValueError, match=r"PEFT adapters \(LoRA\), which are not covered"):
        unify(model)


def test_peft_itself_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = unified("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    for refused in (lambda: unify(adapted), lambda: unify(model), lambda: report(model)):
        with pytest.raises(ValueError, match=r"PEFT adapter"):
            refused()
    with pytest.raises(ValueError, match="q_proj was replaced since unify"):
        call(adapted, sequences((5,))[0][None])


def test_other_dtypes_and_devices_are_refused() -> None:
    model = made("llama").to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"weight is bfloat16, parameters must be one of float32 throughout on cpu"
    ):
        unify(model)
    model = made("llama")
    model.model.norm.to(torch.float64)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is float64"):
        unify(model)
    with pytest.raises(ValueError, match="parameters are on meta: move the model"):
        unify(made("llama").to("meta"))
    with pytest.raises(ValueError, match="max_positions must be between 1 and 131072, got 0"):
        unify(made("llama"), positions=0)


def test_other_versions_of_transformers_are_refused_or_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = sys.modules[
        "transformers"
    ]  # another object than at the start of this file, once peft is there
    monkeypatch.setattr(imported, "__version__", "4.57.0")
    with pytest.raises(ValueError, match=r"transformers 4\.57\.0 is not covered: install transformers 5"):
        unify(made("llama"))
    monkeypatch.setattr(imported, "__version__", "5.99.0")
    with pytest.warns(UserWarning, match=r"was tested with transformers 5\.0\.0.*, not with 5\.99\.0"):
        unify(made("llama"))


def test_the_installed_version_was_tested() -> None:
    from kernelbraid.models.coverage import TESTED_TRANSFORMERS

    assert transformers.__version__ in TESTED_TRANSFORMERS


# ---- Calls ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "output_attentions=True is not covered by unified attention"),
        ({"is_causal": False}, "is_causal=False is not covered by unified attention"),
        (
            {"attention_mask": torch.ones(2, 1, 9, 9)},
            "attention_mask must be .* prepared masks are not covered",
        ),
        ({"attention_mask": torch.ones(2, 8)}, r"attention_mask must be \[2, 9\].*got \[2, 8\]"),
        ({"position_ids": torch.arange(1, 10)[None]}, "position_ids must count from 0 in every sequence"),
        ({"position_ids": torch.zeros(3, 9, 9)}, r"position_ids must be \[2, 9\], got \[3, 9, 9\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "cu_seq_lens_q is for one row of packed sequences"),
    ],
)
def test_calls_that_are_not_covered_are_refused(options: dict[str, Any], message: str) -> None:
    model = unified("llama")
    with pytest.raises(ValueError, match=message):
        call(model, padded(sequences((9, 9)), "left")[0], use_cache=False, **options)


def test_positions_that_do_not_fit_the_mask_are_refused() -> None:
    model = unified("qwen2")
    ids, mask = padded(sequences((9, 4)), "left")
    with pytest.raises(ValueError, match="position_ids differ from those that attention_mask gives"):
        call(model, ids, attention_mask=mask, position_ids=torch.arange(9)[None])
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    call(model, ids, attention_mask=mask, position_ids=counted)


def test_other_caches_are_refused() -> None:
    model = unified("llama")
    ids = sequences((9,))[0][None]
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(ids, max_new_tokens=2, pad_token_id=0, cache_implementation="static")
    static = transformers.StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(
        ValueError, match="cache is a StaticCache of StaticLayer, which unified attention does not"
    ):
        call(model.model, ids, None, None, past_key_values=static)


def test_gradients_through_a_filled_cache_are_refused() -> None:
    model = unified("llama")
    ids = sequences((9,))[0][None]
    cache = transformers.DynamicCache(config=model.config)
    call(model.model, ids, None, None, past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="gradients through a cache that holds tokens are not covered"):
        model.model(ids[:, :1], None, None, past_key_values=cache, use_cache=True)


def test_a_cache_that_checkpointing_would_leave_out_is_refused() -> None:
    model = unified("llama").train()
    ids = sequences((9,))[0][None]
    cache = transformers.DynamicCache(config=model.config)
    call(model.model, ids, None, None, past_key_values=cache, use_cache=True)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing leaves the cache out"):
        model.model(ids[:, :1], None, None, past_key_values=cache)


def test_a_layer_alone_is_refused() -> None:
    model = unified("llama")
    with pytest.raises(ValueError, match="call the model, not its layers"):
        model.model.layers[0](torch.zeros(1, 4, 96))


# ---- Certificates ----


def test_certificates_are_required_or_missed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path))
    model = made("qwen3_moe")
    wanted = "no certificate of embedding, rms_norm, .* qk_norm, moe_router, moe_experts, logprob"
    with pytest.raises(RuntimeError, match=wanted):
        unify(model, require_certificate=True)
    assert not report(model).unified
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert unify(model).complete
    assert [each.category for each in seen] == [UserWarning] and seen[0].filename == __file__
    assert "run `kernelbraid verify --local`" in str(seen[0].message)


def test_certificates_of_the_operators_in_use_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def local_certificate(operator):
        asked.append((operator.name, operator.backend))
        return SimpleNamespace()

    monkeypatch.setattr(certificates, "local_certificate", local_certificate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = unify(made("llama"), require_certificate=True)
    assert found.complete and certified("linear")
    names = [name for name, _ in asked[:-1]]
    assert tuple(names) == found.operators and len(set(names)) == len(names)
    assert {"attention", "swiglu", "logprob"} <= set(names) and "moe_router" not in names
    with pytest.raises(ValueError, match="unknown operator 'softmax'"):
        certified("softmax")


def test_one_certificate_does_not_stand_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"linear", "attention"}
    monkeypatch.setattr(certificates, "local_certificate", lambda each: each if each.name in held else None)
    model = made("llama")
    with pytest.raises(RuntimeError) as caught:
        unify(model, require_certificate=True)
    listed = str(caught.value).split(":")[0]
    assert "linear" not in listed and "attention" not in listed and "rms_norm" in listed
    assert not quietly(model).left
    assert report(model).complete
