"""The verb that rolls out: its document, its errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kernelbraid.cli import app


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
