"""One rollout of a model from the command line: what was drawn, and how fast, by phase."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernelbraid.models.config import NAMED, named
from kernelbraid.models.load import drawn, load
from kernelbraid.models.model import Decoder
from kernelbraid.rl.records import Sampling
from kernelbraid.rl.requests import EngineSettings, Request, group
from kernelbraid.rl.rollout import Engine


@dataclass(frozen=True, slots=True)
class Asked:
    """What to roll out.

    Raises:
        ValueError: there are no prompts, or both texts and lengths.
    """

    model: str
    """A folder or a GGUF file, or the name of a model, which gets random weights."""
    texts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    """Of prompts of random token ids."""
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    settings: EngineSettings = field(default_factory=EngineSettings)
    device: str = "cpu"
    warm: bool = True
    """Draw a few tokens first, so that compiling is not counted."""

    def __post_init__(self) -> None:
        if bool(self.texts) == bool(self.lengths):
            raise ValueError("give prompts or lengths of random ones, and not both")
        if any(length < 1 for length in self.lengths):
            raise ValueError(f"lengths must be at least 1, got {min(self.lengths)}")


def roll_out(asked: Asked, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Draw all completions; the statistics and, where there is a tokenizer, the texts, as JSON can hold them.

    Args:
        asked: what to do.
        progress: told what is being done.

    Raises:
        ValueError: no such model or file, or a request can never be served.
        ModuleNotFoundError: transformers is not installed (extra `models`).
    """
    decoder, tokenizer = _loaded(asked)
    decode = None if tokenizer is None else tokenizer.decode
    if tokenizer is None and asked.texts:
        raise ValueError(
            f"{asked.model} has random weights and no tokenizer: give lengths instead of prompts"
        )
    prompts = _prompts(asked, decoder, tokenizer)
    requests: list[Request] = []
    for i, prompt in enumerate(prompts):
        requests += group(prompt, asked.sampling, prompt_index=i, samples=asked.samples)
    engine = Engine(decoder, asked.settings, decode=decode)
    if asked.warm:
        progress("computing a few tokens first: the first call compiles")
        few = Sampling(max_tokens=min(3, asked.sampling.max_tokens))
        engine.generate(group(prompts[0], few, prompt_index=2**31 - 1, samples=1))
        engine.forget_prefixes()
        engine.reset_statistics()
    progress(f"{len(requests)} completions of {len(prompts)} prompts")
    batch = engine.generate(requests)
    completions = [
        {
            "prompt": each.prompt_index,
            "sample": each.sample_index,
            "tokens": each.tokens.tolist(),
            "logprobs": None if each.logprobs is None else each.logprobs.tolist(),
            "finish": each.finish.value,
            "text": None if decode is None else decode(each.tokens.tolist()),
        }
        for each in batch.completions
    ]
    return {
        "model": asked.model,
        "device": asked.device,
        "threads": torch.get_num_threads(),
        "bits_id": engine.snapshot.bits_id,
        **engine.statistics.document(),
        "completions": completions,
    }


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        ValueError: there is no such file, or it is empty.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    found = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found


def _loaded(asked: Asked) -> tuple[Decoder, Any]:
    """The model and its tokenizer, None for random weights."""
    dtype = torch.float32 if asked.device == "cpu" else torch.bfloat16
    place = Path(asked.model)
    if not place.exists():
        if asked.model not in NAMED:
            raise ValueError(f"no model at {asked.model}, and names are {', '.join(NAMED)}")
        config = named(asked.model)
        return Decoder(config, drawn(config, dtype=dtype, device=asked.device), config.max_positions), None
    from transformers import AutoTokenizer

    decoder = load(place, dtype=dtype, device=asked.device)
    where = {"gguf_file": place.name} if place.is_file() else {}
    folder = place.parent if place.is_file() else place
    return decoder, AutoTokenizer.from_pretrained(folder, local_files_only=True, **where)


def _prompts(asked: Asked, decoder: Decoder, tokenizer: Any) -> Sequence[Sequence[int]]:
    if asked.texts:
        return [[int(token) for token in tokenizer(text)["input_ids"]] for text in asked.texts]
    random = torch.Generator().manual_seed(asked.settings.seed)
    drawn_ids = [torch.randint(decoder.config.vocab, (n,), generator=random) for n in asked.lengths]
    return [ids.tolist() for ids in drawn_ids]
