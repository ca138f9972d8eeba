"""The verb that rolls out: its document, its errors; and the speed of a load."""

import json
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kernelbraid.cli import app
from kernelbraid.models.config import named
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Decoder
from kernelbraid.rl import speed
from kernelbraid.rl.requests import Statistics
from kernelbraid.rl.speed import Load, decode_bytes, load_speed


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["rollout", *words])
    return done.exit_code, done.stdout, done.stderr


SMALL = ("Qwen3-MoE-small", "--max-tokens", "5", "--cache-tokens", "256")


def test_a_rollout_is_one_document() -> None:
    code, text, _ = run(*SMALL, "--length", "20", "--length", "3", "--samples", "2", "--json")
    assert code == 0
    document = json.loads(text)
    assert document["drawn_tokens"] == 20 and document["prefill_tokens"] + document["prefix_hits"] == 46
    assert document["prefix_hits"] == 16
    assert document["decode_tokens_per_second"] > 0 and document["prefill_tokens_per_second"] > 0
    names = [(each["prompt"], each["sample"]) for each in document["completions"]]
    assert names == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(len(each["tokens"]) == len(each["logprobs"]) == 5 for each in document["completions"])
    again = json.loads(
        run(*SMALL, "--length", "20", "--length", "3", "--samples", "2", "--concurrency", "1", "--json")[1]
    )
    assert again["completions"] == document["completions"]


def test_people_get_lines() -> None:
    code, text, told = run(*SMALL, "--length", "4")
    assert code == 0 and "decode_tokens_per_second" in text and "1 completions of 1 prompts" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("GPT-5", "--length", "3"), "no model at GPT-5, and names are SmolLM2-135M"),
        (SMALL, "give prompts or lengths of random ones, and not both"),
        ((*SMALL, "--prompt", "x"), "no tokenizer: give lengths instead of prompts"),
        ((*SMALL, "--prompts", "nowhere.txt"), "there is no file nowhere.txt"),
        ((*SMALL, "--length", "252"), "prompt 252 + max_tokens 5 = 257 tokens never fit"),
    ],
)
def test_mistakes_are_one_sentence(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, text, told = run(*words)
    assert code == 2 and text == "" and message in told


LOAD = Load("Qwen3-MoE-small", requests=6, prompt=20, response=12, repeated=3, concurrencies=(1, 2))


def test_a_load_has_the_same_bits_at_any_concurrency() -> None:
    found = load_speed(replace(LOAD, bandwidth=1e9))
    assert [each["concurrency"] for each in found["repeats"]] == [6, 1, 2]
    for each in found["repeats"]:
        assert each["tokens"] == 36 and each["unequal_tokens"] == each["unequal_logprobs"] == 0
    assert found["drawn_tokens"] == 72 and found["decode_steps"] == 11 and found["prefix_hits"] == 0
    assert found["decode_keys"] == 6 * sum(range(21, 32))
    assert 0 < found["share_of_bound"] == found["bound_seconds"] / found["decode_seconds"]
    theirs = load_speed(replace(LOAD, bandwidth=2e9, kernels="vendor"))
    assert theirs["bound_seconds"] == pytest.approx(found["bound_seconds"] / 2)
    assert theirs["bits_id"] != found["bits_id"]
    assert sum(each["unequal_logprobs"] for each in theirs["repeats"]) > 0, "the comparison sees other bits"


def test_bytes_of_decode_steps() -> None:
    made = Decoder(config := named("Qwen3-MoE-small"), drawn(config, dtype=torch.float32), 64)
    sizes = {name: each.numel() for name, each in made.weights.tensors()}
    experts = sum(count for name, count in sizes.items() if "experts" in name)
    dense = sum(sizes.values()) - experts - sizes["embedding"]
    keys = 2 * config.layers * config.kv_heads * config.head_dim
    counted = Statistics(decode_steps=3, decode_keys=100, batch_sizes={1: 2, 40: 1})
    assert decode_bytes(made, counted) == 4 * (3 * dense + experts * (2 * 4 / 16 + 1) + 100 * keys)
    tied = named("SmolLM2-135M").small()
    made = Decoder(tied, drawn(tied, dtype=torch.float32), 64)
    whole = sum(each.numel() for _, each in made.weights.tensors())
    assert decode_bytes(made, Statistics(decode_steps=1)) == 4 * whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeated": 7}, "repeated must be at most requests 6"),
        ({"kernels": "mine"}, "kernels must be one of unified, vendor"),
        ({"prompt": 0}, "prompt must be at least 1"),
        ({"concurrencies": (1, 0)}, "concurrencies must be at least 1"),
    ],
)
def test_impossible_loads_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LOAD, **changes)  # type: ignore[arg-type]


def test_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "scripts" / "rollout_speed.py"
    spec = spec_from_file_location("rollout_speed", path)
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    sizes = ["--requests", "3", "--prompt", "5", "--response", "4", "--repeated", "2", "--bandwidth", "1e9"]
    words = ["--model", "Qwen3-MoE-small", *sizes, "--concurrency", "1", "--write", str(tmp_path / "found")]
    assert script.main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "found").read_text()) and document["tokens_per_second"] > 0
    for kernels, code in (("unified", 1), ("vendor", 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                speed, "difference", lambda one, other: {"unequal_tokens": 1, "unequal_logprobs": 0}
            )
            assert script.main([*words, "--kernels", kernels]) == code
