"""Weights of transformers models, arranged: log-probabilities agree with the model's own."""

from pathlib import Path

import pytest
import torch

from kernelbraid.models.config import from_hugging_face, named
from kernelbraid.models.load import drawn, from_state, load
from kernelbraid.models.model import Decoder

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 200,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
THETA = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": ("LlamaConfig", {"head_dim": 64, "rope_parameters": THETA, "tie_word_embeddings": True}),
    "llama3": ("LlamaConfig", {"head_dim": 64, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2Config", {"hidden_size": 256, "rope_parameters": THETA}),
    "qwen3": ("Qwen3Config", {"head_dim": 64, "rope_parameters": THETA}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 64,
            "rope_parameters": THETA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    ),
}


def made(name: str, **changes: object):
    kind, options = CONFIGS[name]
    config = getattr(transformers, kind)(**{**SIZES, **options, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_agree_with_the_models_own(name: str) -> None:
    model = made(name)
    config = from_hugging_face(model.config)
    ours = Decoder(config, from_state(config, model.state_dict(), dtype=torch.float32), positions=256)
    ids = torch.randint(0, 200, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = torch.log_softmax(model(ids).logits, -1)[:, :-1]
        wanted = wanted.gather(2, ids[:, 1:, None]).flatten()
        packed = ids[:, :-1].reshape(-1).to(torch.int32)
        hidden = ours.hidden(packed, torch.tensor([0, 59, 118], dtype=torch.int32), 59)
        found = ours.logprobs(hidden, ids[:, 1:].reshape(-1))
    assert (found - wanted).abs().max() < 2e-5


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    model = made("qwen3")
    model.save_pretrained(tmp_path)
    ours = load(tmp_path, dtype=torch.float32)
    assert ours.positions == 256
    assert torch.equal(ours.weights.head, model.lm_head.weight)
    with pytest.raises(ValueError, match="no model at"):
        load(tmp_path / "absent", dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias is not covered"),
        ("llama", {"attention_bias": True}, "attention_bias is covered for qwen2 alone"),
        ("qwen2", {"use_sliding_window": True}, "sliding-window attention is not covered"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "every layer must be sparse"),
    ],
)
def test_what_is_not_covered_is_refused(name: str, changes: dict[str, object], message: str) -> None:
    kind, options = CONFIGS[name]
    config = getattr(transformers, kind)(**{**SIZES, **options, **changes})
    with pytest.raises(ValueError, match=message):
        from_hugging_face(config)


def test_other_families_and_scalings_are_refused() -> None:
    with pytest.raises(ValueError, match="model_type must be one of llama, qwen2"):
        from_hugging_face(transformers.GPT2Config())
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(**{**SIZES, "rope_parameters": yarn})
    with pytest.raises(ValueError, match="rope_type must be default or llama3, got 'yarn'"):
        from_hugging_face(config)


def test_missing_and_unknown_parameters_are_refused() -> None:
    model = made("qwen3")
    config = from_hugging_face(model.config)
    state = model.state_dict()
    with pytest.raises(ValueError, match=r"no known place: model\.layers\.0\.extra"):
        from_state(config, {**state, "model.layers.0.extra": state["model.norm.weight"]}, dtype=torch.float32)
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match=r"has no model\.norm\.weight"):
        from_state(config, state, dtype=torch.float32)


def test_drawn_weights_repeat() -> None:
    config = named("Qwen3-MoE-small")
    one, other = (dict(drawn(config, dtype=torch.float32, seed=3).tensors()) for _ in range(2))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
