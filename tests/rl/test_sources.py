"""Models of Hugging Face's: read, trained, written again."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

from tests.rl.runs import config, folder

from kernelbraid.rl.trainer import Trainer, train

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen2": {"num_attention_heads": 1, "hidden_size": 64},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def written(kind: str, place: Path) -> Path:
    """A folder with a small model of a family and a tokenizer of characters."""
    torch.manual_seed(0)
    sizes = {**SIZES, **KINDS[kind], "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None}
    made = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForCausalLM")(made).save_pretrained(place)
    characters = {chr(code + 31): code for code in range(1, 95)}
    model = tokenizers.models.WordLevel({"[E]": 0, **characters, "[U]": 95}, unk_token="[U]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[U]", eos_token="[E]")
    whole.save_pretrained(place)
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_is_one_of_transformers(kind: str, tmp_path: Path) -> None:
    place = folder(tmp_path)
    written(kind, place / "small")
    made = config(
        rollouts=1, model={"random": None, "path": "small"}, sampling={"max_tokens": 12},
        checkpoints={"every": 0},
    )  # fmt: skip
    with Trainer(made, place) as trainer:
        assert trainer.source.ends == (0,)
        before = trainer.policy.digest()
        found = trainer.run()
        assert found["weights"] != before and found["unequal_tokens"] == 0 < found["checked_tokens"]
    target = place / "checkpoints" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    assert transformers.AutoTokenizer.from_pretrained(target)("ab")["input_ids"] == [66, 67]
    # Hugging Face's own forward gives what the run's would: near, its kernels are others
    ids = torch.arange(1, 40, dtype=torch.int32)
    offsets = torch.tensor([0, len(ids)], dtype=torch.int32)
    with torch.no_grad():
        ours = trainer.policy.decoder.logits(trainer.policy.decoder.hidden(ids, offsets, len(ids)))
        theirs = model(ids[None].long()).logits[0]
    assert float((ours - theirs).abs().max()) < 1e-4 * max(1.0, float(theirs.abs().max()))
    again = config(
        rollouts=1, model={"random": None, "path": "checkpoints/model"}, checkpoints={"folder": "b"}
    )
    with Trainer(again, place) as trainer:
        assert trainer.initial == found["weights"], "a digest of the exported parameters"


def test_families_that_are_not_covered(tmp_path: Path) -> None:
    place = folder(tmp_path)
    made = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=96)
    transformers.GPT2LMHeadModel(made).save_pretrained(place / "small")
    with pytest.raises(ValueError, match=r"model_type must be one of llama, .* got 'gpt2'"):
        train(config(model={"random": None, "path": "small"}), folder=place)
    assert not (place / "checkpoints").exists()


def test_more_positions_than_the_model_has(tmp_path: Path) -> None:
    place = folder(tmp_path)
    written("Llama", place / "small")
    changes: dict[str, Any] = {"sampling": {"max_tokens": 300}, "rollout": {"cache_tokens": 400}}
    with pytest.raises(ValueError, match="is 316, and the model has 256 positions"):
        train(config(model={"random": None, "path": "small"}, **changes), folder=place)
