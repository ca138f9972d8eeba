"""One rollout of a model from the command line: what was drawn, how fast, and whether load changes bits."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kernelbraid.models.config import LARGER, NAMED, named
from kernelbraid.models.load import drawn, load
from kernelbraid.models.model import Decoder
from kernelbraid.models.vendor import vendor
from kernelbraid.rl.records import Completion, Sampling
from kernelbraid.rl.requests import EngineSettings, Request, Statistics, group
from kernelbraid.rl.rollout import Engine

KERNELS = ("unified", "vendor")


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


@dataclass(frozen=True, slots=True)
class Load:
    """A rollout of many requests of one size, some of them drawn again under other loads.

    Raises:
        ValueError: a number is not positive, or more requests are repeated than there are.
    """

    model: str
    """Name of a model, which gets random weights, or a folder or file."""
    requests: int = 256
    prompt: int = 512
    response: int = 1024
    repeated: int = 16
    """Requests that are drawn again."""
    concurrencies: tuple[int, ...] = (1, 8)
    """How many of these at a time; the whole load is the one they are compared with."""
    step_tokens: int = 8192
    kernels: str = "unified"
    """Or `vendor`."""
    device: str = "cpu"
    bandwidth: float | None = None
    """Bytes a second that the device reads at most; measured by default."""

    def __post_init__(self) -> None:
        for name in (
            "requests",
            "prompt",
            "response",
            "repeated",
            *("concurrencies",) * bool(self.concurrencies),
        ):
            value = getattr(self, name)
            if min(value) < 1 if isinstance(value, tuple) else value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, got {self.kernels!r}")
        if self.repeated > self.requests:
            raise ValueError(f"repeated must be at most requests {self.requests}, got {self.repeated}")

    def settings(self, concurrency: int) -> EngineSettings:
        """Of an engine that draws so many at a time."""
        page = EngineSettings().page_size
        length = -(-(self.prompt + self.response) // page) * page
        return EngineSettings(
            cache_tokens=concurrency * length,
            max_sequences=concurrency,
            step_tokens=max(self.step_tokens, concurrency),
            share_prefixes=False,
        )


def load_speed(load: Load, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure a load once everything is compiled and captured, and draw some of its requests again.

    A decode step reads at least the weights and the keys and values of its requests: these bytes at the
    device's bandwidth are the bound. Every request has random numbers of its own, so that with unified
    operators its tokens and log-probabilities have the same bits beside any others.

    Args:
        load: what to draw.
        progress: told what is being done.

    Returns:
        JSON-able: statistics, `decode_tokens_per_second`, `bound_seconds` of the decode steps and
        `share_of_bound`; for every concurrency tokens and numbers compared, and how many are unequal.

    Raises:
        ValueError: no such model or device.
    """
    from kernelbraid.models.evidence import stamp

    asked = Asked(load.model, lengths=(load.prompt,) * load.requests, device=load.device)
    decoder, _ = _loaded(asked)
    if load.kernels == "vendor":
        decoder = replace(decoder, operators=vendor(load.device))
    document = stamp("train", load.device, rates=load.bandwidth is None)
    bandwidth = load.bandwidth or float(document["environment"]["bandwidth"])
    sampling = Sampling(max_tokens=load.response)
    requests = [
        group(prompt, sampling, prompt_index=i, samples=1)[0]
        for i, prompt in enumerate(_prompts(asked, decoder, None))
    ]
    progress(f"{load.requests} requests, not timed: compiles and captures what the timed ones use")
    engine = Engine(decoder, load.settings(load.requests))
    before = engine.generate(requests).completions
    engine.reset_statistics()
    progress(f"{load.requests} requests, timed")
    start = time.perf_counter()
    whole = engine.generate(requests).completions
    seconds = time.perf_counter() - start
    counted, bits = engine.statistics, engine.snapshot.bits_id
    del engine
    least = decode_bytes(decoder, counted) / bandwidth
    few = whole[: load.repeated]
    repeats = [{"concurrency": load.requests, **difference(few, before[: load.repeated])}]
    for concurrency in load.concurrencies:
        progress(f"{load.repeated} of them, {concurrency} at a time")
        again = Engine(decoder, load.settings(concurrency)).generate(requests[: load.repeated]).completions
        repeats.append({"concurrency": concurrency, **difference(few, again)})
    del document["rows"], document["kind"]
    return {
        **document,
        **{name: getattr(load, name) for name in ("model", "requests", "prompt", "response", "device")},
        "kernels": load.kernels,
        "operators": decoder.operators.arithmetic,
        "bits_id": bits,
        "seconds": seconds,
        "tokens_per_second": counted.drawn_tokens / seconds,
        **counted.document(),
        "bandwidth": bandwidth,
        "bound_seconds": least,
        "share_of_bound": least / counted.decode_seconds if counted.decode_seconds else None,
        "repeats": repeats,
    }


def decode_bytes(decoder: Decoder, counted: Statistics) -> float:
    """Bytes that the decode steps of some statistics read at least: weights, keys and values.

    Of experts, as many as the rows of a step could choose at most; an embedding that is not the head counts
    for nothing.
    """
    config, size = decoder.config, decoder.weights.norm.element_size()
    dense = experts = 0
    for name, tensor in decoder.weights.tensors():
        if "experts" in name:
            experts += tensor.numel()
        elif name != "embedding" or config.tied:
            dense += tensor.numel()
    weights = float(dense * counted.decode_steps)
    if config.experts is not None:
        for rows, steps in counted.batch_sizes.items():
            weights += experts * steps * min(1.0, rows * config.experts.top_k / config.experts.count)
    keys = 2 * config.layers * config.kv_heads * config.head_dim * counted.decode_keys
    return size * (weights + keys)


def difference(one: Sequence[Completion], other: Sequence[Completion]) -> dict[str, int]:
    """How many tokens and log-probabilities of the same requests were compared, as integers, and differ."""
    found = {"tokens": 0, "unequal_tokens": 0, "unequal_logprobs": 0}
    for a, b in zip(one, other, strict=True):
        assert a.logprobs is not None and b.logprobs is not None
        longest, held = max(len(a.tokens), len(b.tokens)), min(len(a.tokens), len(b.tokens))
        found["tokens"] += longest
        for name, (x, y) in {
            "unequal_tokens": (a.tokens, b.tokens),
            "unequal_logprobs": (a.logprobs.view(torch.int32), b.logprobs.view(torch.int32)),
        }.items():
            found[name] += longest - held + int((x[:held] != y[:held]).sum())
    return found


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
        if asked.model not in {**NAMED, **LARGER}:
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
