"""Records of rollouts: what they refuse, how they pack, that they survive JSON."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.rl.rollouts import SNAPSHOT, batch, completion

from kernelbraid.rl.records import Drawn, Finish, RolloutBatch, Sampling, pack


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0, or above 1e-05 and at most"),
        ({"temperature": 1e-6}, "temperature must be 0, or above 1e-05"),
        ({"temperature": float("nan")}, "temperature must be 0, or above"),
        ({"top_p": 0.0}, r"top_p must be above 0 and at most 1, got 0\.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive and finite"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be finite"),
        ({"logit_bias": ((3, 1.0), (2, 1.0))}, "logit_bias must name each token id once, ascending"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias must not add NaN"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"stop": ("",)}, "stop must not hold the empty string"),
    ],
)
def test_sampling_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**changes)


def test_sampling_says_what_it_does() -> None:
    assert not Sampling().processed
    assert Sampling(temperature=0).greedy
    assert Sampling(temperature=0.6).inverse_temperature == float(torch.tensor(1 / 0.6))
    for cuts in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert Sampling(**cuts).truncates and Sampling(**cuts).processed
    for changed in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"logit_bias": ((1, 2.0),)}):
        assert Sampling(**changed).changes_logits and not Sampling(**changed).truncates  # type: ignore[arg-type]
    assert not Sampling(logit_bias=((1, 0.0),)).processed


def test_sampling_survives_json() -> None:
    whole = Sampling(0.7, 0.9, 50, 0.05, 1.1, 0.2, 0.3, ((5, -1.5),), 64, ("\n\n",), (2, 7))
    assert Sampling.from_document(json.loads(json.dumps(whole.document()))) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": torch.tensor([], dtype=torch.int32)}, "prompt must hold at least one token"),
        ({"prompt": torch.tensor([1])}, "prompt must be int32"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int32)}, "tokens must be int32"),
        ({"logprobs": torch.zeros(3)}, r"logprobs must be float32 \[4\] on the CPU, got torch.float32 \[3\]"),
        ({"logprobs": torch.zeros(4, dtype=torch.float64)}, "logprobs must be float32"),
        ({"values": torch.zeros(4, dtype=torch.bfloat16)}, "values must be float32"),
        ({"drawn": (Drawn(1, 3),)}, "drawn must start at token 0"),
        ({"drawn": (Drawn(0, 3), Drawn(0, 4))}, "drawn must start at token 0 and ascend"),
        ({"drawn": (Drawn(0, 3), Drawn(9, 4))}, "ascend to at most 4"),
        ({"drawn": (Drawn(0, 2),)}, "drawn must start with the snapshot's version 3"),
        ({"prompt_index": -1}, "must not be negative"),
    ],
)
def test_completions_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        completion(**changes)


def test_versions_that_a_completion_saw() -> None:
    assert completion().versions == (3,)
    assert completion(drawn=(Drawn(0, 3), Drawn(2, 4))).versions == (3, 4)
    assert completion(drawn=(Drawn(0, 3), Drawn(4, 4))).versions == (3,), "no token under version 4"
    assert completion(prefix_version=2).versions == (2, 3)
    assert completion(prefix_version=3).versions == (3,)
    empty = torch.empty(0, dtype=torch.int32)
    assert completion(tokens=empty, logprobs=None, values=None, drawn=(Drawn(0, 3),)).versions == (3,)
    assert completion(finish=Finish.LENGTH).truncated and completion(finish=Finish.ABORTED).truncated
    assert not completion(finish=Finish.STOP_STRING).truncated


def test_batches_pack_and_group() -> None:
    found = batch()
    packed = found.packed()
    assert packed.cu_seqlens.tolist() == [0, 2, 5, 8, 12, 16, 21] and packed.max_seqlen == 5
    assert torch.equal(packed.tokens[5:8], found.completions[2].tokens)
    assert found.groups == (range(0, 2), range(2, 4), range(4, 6))
    assert found.group_offsets().tolist() == [0, 2, 4, 6]
    assert found.packed([5, 0]).cu_seqlens.tolist() == [0, 5, 7]
    assert found.counted().all() and len(found.counted()) == 21
    cut = RolloutBatch(0, (completion(0, 0, 2), completion(0, 1, 3, finish=Finish.LENGTH)))
    assert cut.counted(mask_truncated=True).tolist() == [True] * 2 + [False] * 3
    assert cut.counted().all()
    assert pack([]).cu_seqlens.tolist() == [0] and len(RolloutBatch(0, ())) == 0
    with pytest.raises(ValueError, match="prompt 0 has two completions of number 0"):
        RolloutBatch(0, (completion(), completion()))
    with pytest.raises(ValueError, match="completions of one prompt must be adjacent"):
        RolloutBatch(0, (completion(0, 0), completion(1, 0), completion(0, 1)))


@pytest.mark.parametrize("name", ["bits_id", "dtype", "device", "run"])
def test_snapshots_name_everything(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} of a snapshot must not be empty"):
        replace(SNAPSHOT, **{name: ""})
    with pytest.raises(ValueError, match="version must not be negative"):
        replace(SNAPSHOT, version=-1)
