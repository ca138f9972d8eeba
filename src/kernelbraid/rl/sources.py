"""Where a run's model comes from, and where it goes: a folder of Hugging Face's, or a random draw."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelbraid.models.config import ModelConfig, named
from kernelbraid.models.load import drawn, load, to_state
from kernelbraid.models.model import Decoder
from kernelbraid.rl.config import Config, RandomModel
from kernelbraid.rl.tasks.characters import VOCABULARY, Characters

THETA = 10000.0
LAST = "model"
"""Folder of the trained model, beside the checkpoints."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model and what turns its tokens into text."""

    decoder: Decoder
    tokenizer: Any
    ends: tuple[int, ...]
    """Tokens that end a sequence."""


def read_source(config: Config, folder: Path) -> Source:
    """Load the model of a configuration.

    Args:
        config: of the run.
        folder: what its path is relative to.

    Raises:
        ValueError: there is no such model, unified operators do not cover it, or its positions do not reach
            the longest sequence.
        ModuleNotFoundError: transformers is not installed (extra `models`).
    """
    section = config.model
    dtype, positions = getattr(torch, section.dtype), section.positions
    device = section.device if section.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    longest = config.task.max_prompt_tokens + config.sampling.max_tokens
    if section.random is not None:
        made = _sizes(section.random, longest)
        weights = drawn(made, dtype=dtype, device=device, seed=section.random.seed)
        return Source(Decoder(made, weights, positions or longest), Characters(), (Characters.eos_token_id,))
    if section.named is not None:
        sizes = named(section.named)
        weights = drawn(sizes, dtype=dtype, device=device, seed=config.seed)
        return Source(Decoder(sizes, weights, positions or longest), Characters(), ())
    assert section.path is not None
    place = folder / section.path
    decoder = load(place, dtype=dtype, device=device, positions=positions)
    if longest > decoder.positions:
        raise ValueError(
            f"task.max_prompt_tokens + sampling.max_tokens is {longest}, and the model has "
            f"{decoder.positions} positions"
        )
    tokenizer = _tokenizer(place)
    return Source(decoder, tokenizer, _ends(place, tokenizer))


def _sizes(section: RandomModel, longest: int) -> ModelConfig:
    sizes = (section.hidden, section.intermediate, section.layers, section.query_heads, section.kv_heads)
    return ModelConfig(VOCABULARY, *sizes, section.head_dim, THETA, max_positions=longest)


def _tokenizer(place: Path) -> Any:
    from transformers import AutoTokenizer

    if place.is_file():
        return AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name, local_files_only=True)
    return AutoTokenizer.from_pretrained(place, local_files_only=True)


def _ends(place: Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end token, and those that the model's generation_config.json names."""
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    settings = place / "generation_config.json"
    if settings.is_file():
        named = json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id")
        found |= set(named) if isinstance(named, list) else ({named} if named is not None else set())
    return tuple(sorted(int(token) for token in found))


def export(decoder: Decoder, config: Config, folder: Path, target: Path) -> Path | None:
    """Write the trained model as a folder that transformers reads, whole or not at all.

    A random model has no architecture of Hugging Face's to be written as: nothing is written for it.

    Args:
        decoder: the trained model.
        config: of the run.
        folder: what its paths are relative to.
        target: the folder; replaced where there is one.
    """
    if config.model.path is None:
        return None
    from transformers import AutoConfig, AutoModelForCausalLM

    place, name = folder / config.model.path, None
    where = place
    if place.is_file():
        where, name = place.parent, place.name
    given: dict[str, Any] = {"local_files_only": True, **({"gguf_file": name} if name else {})}
    architecture = AutoConfig.from_pretrained(where, **given)
    if getattr(architecture, "quantization_config", None) is not None:
        del architecture.quantization_config
    make: Any = AutoModelForCausalLM.from_config
    model = make(architecture, dtype=decoder.weights.norm.dtype)
    model.load_state_dict(to_state(decoder.config, decoder.weights))
    new = target.with_name(f".new-{target.name}-{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new)
    _tokenizer(place).save_pretrained(new)
    old = target.with_name(f".old-{target.name}-{os.getpid()}")
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return target
