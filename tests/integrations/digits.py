"""A tiny model over digits, its tokenizer and a task, for real trainers of other frameworks."""

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<pad>", "<end>", *"0123456789", "+", "="]


def tokenizer() -> Any:
    """One token a character, no template."""
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def model(family: str = "Llama", **changes: Any) -> Any:
    """Random weights of two layers, with no forward of anybody's set."""
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in made.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return made


def dataset(rows: int = 32) -> Any:
    """Prompts of several lengths."""
    from datasets import Dataset

    prompts = ["".join(f"{(7 * i + j) % 10}+" for j in range(1 + i % 4)) for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts})


def reward(completions: list[str], **_: Any) -> list[float]:
    """More for texts with many sevens: something that a few steps change."""
    return [text.count("7") - 0.1 * len(text) for text in completions]
