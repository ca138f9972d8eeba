"""Recorded workloads: counts of real calls, unchanged bits, and the studies that are made of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic")

from tests.rl.rollouts import completion

from kernelbraid import ops
from kernelbraid.models import relations
from kernelbraid.models.config import named
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Decoder
from kernelbraid.models.vendor import Vendor
from kernelbraid.rl.config import Config, parse_config
from kernelbraid.rl.policy import Policy
from kernelbraid.rl.recording import FORMAT, Calls, Recording, phase_of
from kernelbraid.rl.trainer import Trainer, train
from kernelbraid.search import recorded
from kernelbraid.search.recorded import read_recorded

LAYERS = 2
PROMPTS = (5, 1, 17)
DRAWN = 6


def decoder() -> Decoder:
    config = replace(named("SmolLM2-135M"), hidden=128, intermediate=96).small(layers=LAYERS, vocab=100)
    return Decoder(config, drawn(config, dtype=torch.float32), positions=64)


def prompts(made: Decoder) -> list[torch.Tensor]:
    return list(relations.sequences_of(made.config, PROMPTS, 4, "cpu"))


def watched(made: Decoder, calls: Calls) -> Decoder:
    return replace(made, operators=Recording(made.operators, calls))


def packed(made: Decoder) -> torch.Tensor:
    """Log-probabilities of two packed sequences, and what their backward pass gives the first projection."""
    ids = torch.arange(12, dtype=torch.int32)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    weight = made.weights.layers[0].qkv.requires_grad_(True)
    weight.grad = None
    scores = made.logprobs(made.hidden(ids, offsets, 7), ids.roll(-1))
    scores.sum().backward()
    assert weight.grad is not None
    return torch.cat([scores.detach(), weight.grad.flatten()])


def counted(calls: Calls, operator: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in calls.document()["operators"][operator]:
        found[each["phase"]] = found.get(each["phase"], 0) + each["calls"]
    return found


def a_run() -> Calls:
    calls = Calls()
    made = watched(decoder(), calls)
    relations.generate(made, prompts(made), DRAWN)
    packed(made)
    calls.steps = 1
    return calls


def test_calls_are_counted_by_regime() -> None:
    """The last drawn token is never read by the model: one decode step fewer than tokens."""
    calls = a_run()
    passes = {"prefill": 1, "decode": DRAWN - 1, "update": 1, "backward": 1}
    attended = {phase: count * LAYERS for phase, count in passes.items()}
    assert counted(calls, "attention") == attended
    assert counted(calls, "linear") == {phase: 4 * count for phase, count in attended.items()}


def test_shapes_are_those_of_the_calls() -> None:
    entries = a_run().document()["operators"]["attention"]
    by_phase = {each["phase"]: each["axes"] for each in entries}
    config = decoder().config
    heads = {"page_size": 16, "query_heads": config.query_heads, "kv_heads": config.kv_heads, "head_dim": 64}
    assert by_phase["prefill"] == {"batch": 3, "length": list(PROMPTS), **heads}
    assert by_phase["update"] == by_phase["backward"] == {"batch": 2, "length": [5, 7], **heads}
    assert len(by_phase["decode"]["length"]) == 3


@pytest.mark.parametrize(
    ("queries", "keys", "phase"),
    [
        ((1, 1), (9, 3), "decode"),
        ((4, 2), (4, 2), "prefill"),
        ((4, 1), (4, 9), "chunked_prefill"),
        ((4,), (8,), "chunked_prefill"),
        ((1, 0), (7, 0), "decode"),
    ],
)
def test_the_regime_of_a_paged_call(queries: tuple[int, ...], keys: tuple[int, ...], phase: str) -> None:
    assert phase_of(queries, keys) == phase


def test_recording_changes_no_bits() -> None:
    plain, seen = decoder(), watched(decoder(), Calls())
    one, other = packed(plain), packed(seen)
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    changed = packed(replace(decoder(), operators=Recording(Vendor(), Calls())))
    assert not torch.equal(one.view(torch.int32), changed.view(torch.int32))
    with torch.no_grad():
        first = relations.generate(plain, prompts(plain), DRAWN)
        second = relations.generate(seen, prompts(plain), DRAWN)
    for mine, its in zip(first.logprobs, second.logprobs, strict=True):
        assert torch.equal(mine.view(torch.int32), its.view(torch.int32))


def test_activation_checkpointing_counts_each_backward_pass_once() -> None:
    calls = Calls()
    packed(replace(watched(decoder(), calls), checkpoint=True))
    calls.steps = 1
    found = counted(calls, "attention")
    assert found == {"update": 2 * LAYERS, "backward": LAYERS}


def test_a_policy_counts_its_update() -> None:
    policy, calls = Policy(decoder()), Calls()
    policy.record(calls)
    batch = [completion(length=4), completion(1, length=3)]
    policy.evaluate(batch, 1.0).logprobs.sum().backward()
    calls.steps = 1
    assert counted(calls, "attention") == {"update": LAYERS, "backward": LAYERS}
    assert counted(calls, "linear") == {"update": 4 * LAYERS, "backward": 4 * LAYERS}


def test_calls_of_near_work_are_kept_together() -> None:
    calls = Calls()
    for length in range(1000, 1100):
        calls.add("attention", "decode", length, (("head_dim", 64),), (("length", (length,)),))
    calls.steps = 1
    entries = calls.document()["operators"]["attention"]
    assert sum(each["calls"] for each in entries) == 100
    assert [each["axes"]["length"] for each in entries] == [[1000]]


def test_nothing_recorded_is_no_file(tmp_path: Path) -> None:
    for calls in (Calls(), a_run()):
        calls.steps = 0
        with pytest.raises(ValueError, match="at least one whole step"):
            calls.write(tmp_path / "w.json")
    assert not list(tmp_path.iterdir())


def test_a_study_is_made_of_a_run(tmp_path: Path) -> None:
    from kernelbraid.search.study import Study

    calls = a_run()
    calls.steps = 2
    calls.write(tmp_path / "w.json")
    for name in ("attention", "linear"):
        found = read_recorded(tmp_path / "w.json", ops.get(name))
        with Study.create(tmp_path / name, name, workloads=found.workloads, dtype=found.dtype) as study:
            assert study.workloads == found.workloads
            held = sum(each["calls"] for each in calls.document()["operators"][name])
            assert sum(each.weight for each in found.workloads) == pytest.approx(held / 2)
            for each in found.workloads:
                study.operator.cost(each)


def entry(length: int, calls: int, phase: str = "decode") -> dict[str, object]:
    axes = {"batch": 1, "length": [length], "page_size": 16, "query_heads": 9, "kv_heads": 3, "head_dim": 64}
    return {"phase": phase, "axes": axes, "calls": calls}


def document(*entries: dict[str, object], **changed: object) -> dict[str, object]:
    made: dict[str, object] = {"format": FORMAT, "device": "cpu", "dtype": "float32", "steps": 2}
    return {**made, "operators": {"attention": list(entries)}, **changed}


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_parts_cost_about_the_same_and_keep_all_calls(tmp_path: Path) -> None:
    file = written(tmp_path / "w.json", document(*(entry(100 * n, 30) for n in range(1, 10))))
    found = read_recorded(file, ops.get("attention"))
    assert [each.shape["length"] for each in found.workloads] == [(300,), (600,), (800,)]
    assert sum(each.weight for each in found.workloads) == 9 * 30 / 2
    costs = [each.weight * ops.get("attention").cost(each).bytes for each in found.workloads]
    assert max(costs) < 2 * min(costs)
    one = read_recorded(file, ops.get("attention"), each=1)
    assert [each.weight for each in one.workloads] == [135] and one.left_out == 0


def test_calls_that_weigh_nothing_are_left_out_and_told(tmp_path: Path) -> None:
    file = written(tmp_path / "w.json", document(entry(4000, 10000), entry(1, 1, "prefill")))
    found = read_recorded(file, ops.get("attention"))
    assert [each.phase for each in found.workloads] == ["decode"]
    assert 0 < found.left_out < recorded.LEAST and found.shapes == 2


def test_workloads_have_different_names(tmp_path: Path) -> None:
    """Names show the shortest and longest length alone: those in between do not tell workloads apart."""
    lengths = [[100, 900, 150], [100, 900, 500], [100, 900, 850]]
    entries = [entry(1, 4) for _ in lengths]
    for each, length in zip(entries, lengths, strict=True):
        each["axes"] = {**entry(1, 4)["axes"], "batch": 3, "length": length}  # type: ignore[dict-item]
    found = read_recorded(written(tmp_path / "w.json", document(*entries)), ops.get("attention"))
    assert [each.weight for each in found.workloads] == [6]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format": "other"}, "its format is 'other'"),
        ([1], "its format is None"),
        (document(), "holds no calls of attention"),
        (document(entry(5, 1), steps=0), "steps must be at least 1"),
        (document(entry(5, 1), dtype="float8"), "recorded in float8"),
        (document(entry(5, 1), device="cuda"), "was recorded on cuda, the search is for cpu"),
        (document(entry(5, 1, "dreaming")), "entry 0 is no workload: phase must be one of"),
        (document(entry(5, 0)), "entry 0 is no workload: weight and limit must be positive"),
        (document({"phase": "decode", "axes": {"batch": 1}, "calls": 1}), "entry 0 is no workload"),
        (document({"phase": "decode"}), "entry 0 is no workload"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recorded(written(tmp_path / "w.json", content), ops.get("attention"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the workloads .*nowhere.json"):
        read_recorded(tmp_path / "nowhere.json", ops.get("attention"))
    (tmp_path / "text").write_text("no JSON")
    with pytest.raises(ValueError, match="not a file of workloads"):
        read_recorded(tmp_path / "text", ops.get("attention"))


def test_reader_and_writer_name_one_format() -> None:
    assert recorded.FORMAT == FORMAT


def a_config(folder: Path) -> Config:
    (folder / "prompts.jsonl").write_text('{"prompt": "count: "}\n{"prompt": "x"}\n')
    (folder / "digits.py").write_text(
        "def reward(completion, record):\n    return sum(each.isdigit() for each in completion)\n"
    )
    made = {
        "algorithm": "grpo",
        "rollouts": 2,
        "model": {"random": {"layers": LAYERS, "hidden": 32, "intermediate": 48}},
        "task": {"kind": "jsonl", "path": "prompts.jsonl", "reward": "digits.py:reward", "template": "plain"},
        "sampling": {"max_tokens": 6},
        "rollout": {"prompts": 2, "group_size": 2, "cache_tokens": 600},
        "update": {"learning_rate": 0.01, "minibatches": 2},
        "checkpoints": {"folder": "checkpoints"},
    }
    return parse_config(made)


def test_a_training_run_writes_its_workloads(tmp_path: Path) -> None:
    """Two minibatches a rollout and a spot check are passes; the weights are those of any other run."""
    folders = [tmp_path / name for name in ("plain", "recorded")]
    for folder in folders:
        folder.mkdir()
    plain = train(a_config(folders[0]), folder=folders[0])
    file = folders[1] / "w.json"
    seen = train(a_config(folders[1]), folder=folders[1], workloads=file)
    assert plain["weights"] == seen["weights"] and seen["logprob_mismatch_max"] == 0
    assert json.loads(file.read_text())["steps"] == 2
    weights: dict[str, float] = {}
    for each in read_recorded(file, ops.get("attention")).workloads:
        weights[each.phase] = weights.get(each.phase, 0.0) + each.weight
    assert weights["backward"] == 2 * LAYERS and weights["update"] == 3 * LAYERS
    assert weights["prefill"] == LAYERS and LAYERS <= weights["decode"] <= 5 * LAYERS


def test_recording_begins_before_the_first_rollout(tmp_path: Path) -> None:
    with Trainer(a_config(tmp_path), tmp_path) as trainer:
        trainer.step()
        with pytest.raises(RuntimeError, match="before the first rollout"):
            trainer.record()
        assert trainer.calls is None


def test_a_place_that_cannot_be_written_is_refused_before_work(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none" / "w.json"):
        with pytest.raises(ValueError, match="must be a file in a folder that exists"):
            train(a_config(tmp_path), folder=tmp_path, workloads=place)
    assert not (tmp_path / "checkpoints").exists()
