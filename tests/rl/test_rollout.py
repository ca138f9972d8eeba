"""The engine: a completion is its request's alone, has the bits of the update, and says what it came from."""

import random
import threading
from dataclasses import replace

import pytest
import torch
from tests.rl.engines import bits, contents, decoder, engine, remade, requests, text_of, updated

from kernelbraid.models.model import Decoder
from kernelbraid.models.operators import UNIFIED
from kernelbraid.models.vendor import Vendor
from kernelbraid.rl import drawing
from kernelbraid.rl.paging import Pages
from kernelbraid.rl.recording import Calls, Recording
from kernelbraid.rl.records import Drawn, Finish, Sampling
from kernelbraid.rl.requests import EngineSettings, Request, group
from kernelbraid.rl.reuse import Mode, Named, Objective, Reason, decide
from kernelbraid.rl.rollout import Engine

SETTINGS = {
    "alone": {"max_sequences": 1},
    "three": {"max_sequences": 3, "step_tokens": 16},
    "sixteen": {"max_sequences": 16},
    "small_chunks": {"max_sequences": 5, "step_tokens": 5},
    "pages_of_1": {"page_size": 1, "cache_tokens": 2048},
    "pages_of_7": {"page_size": 7, "step_tokens": 70},
    "pages_of_256": {"page_size": 256},
    "nothing_shared": {"share_prefixes": False},
    "little_cache": {"cache_tokens": 64, "page_size": 4},
    "little_cache_of_single_tokens": {"cache_tokens": 60, "page_size": 1, "share_prefixes": False},
    "padded": {"graphs": True, "page_size": 3},
    "padded_in_part": {"graphs": True, "largest_graph": 8},
}


@pytest.fixture(scope="module")
def reference() -> dict[tuple[int, int], dict[str, object]]:
    return contents(engine(max_sequences=1, share_prefixes=False).generate(requests()))


@pytest.mark.parametrize("name", SETTINGS)
def test_limits_change_no_bit(name: str, reference: dict) -> None:
    made = engine(**SETTINGS[name])
    assert contents(made.generate(requests())) == reference
    made.check()
    counted = made.statistics
    assert (counted.preemptions > 0) == name.startswith("little")
    assert (counted.prefix_hits > 0) == ("share_prefixes" not in SETTINGS[name] and name != "pages_of_256")


@pytest.mark.parametrize("seed", range(4))
def test_order_of_arrival_changes_no_bit(seed: int, reference: dict) -> None:
    asked, rng = requests(), random.Random(seed)
    rng.shuffle(asked)
    made, found = engine(max_sequences=4, cache_tokens=160, page_size=8), []
    while asked or made.unfinished:
        arriving = [asked.pop() for _ in range(min(len(asked), rng.randint(0, 3)))]
        made.submit(arriving)
        found += made.step()
        made.check()
    assert {(each.prompt_index, each.sample_index): bits(each) for each in found} == reference


def test_an_abort_changes_nothing_else(reference: dict) -> None:
    made, found = engine(max_sequences=7), []
    made.submit(requests())
    for _ in range(3):
        found += made.step()
    made.abort([(0, 0), (2, 1), (4, 2), (99, 0)])
    made.check()
    while made.unfinished:
        found += made.step()
        made.check()
    ended = {(each.prompt_index, each.sample_index): each for each in found}
    assert set(ended) == set(reference)
    aborted = {name for name, each in ended.items() if each.finish == Finish.ABORTED}
    assert {(0, 0), (2, 1)} <= aborted <= {(0, 0), (2, 1), (4, 2)}
    for name, each in ended.items():
        if name not in aborted:
            assert bits(each) == reference[name]
        else:
            tokens = reference[name]["tokens"]
            assert each.tokens.tolist() == tokens[: len(each.tokens)]
    assert len(ended[0, 0].tokens) == len(ended[0, 0].logprobs) == 3
    assert made.statistics.completions == len(reference)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen3-8B", "Qwen2.5-1.5B", "Qwen3-MoE-small"])
def test_what_is_recorded_is_the_updates(name: str) -> None:
    made = decoder(name)
    batch = engine(made, max_sequences=6, cache_tokens=256, step_tokens=24).generate(requests())
    compared = 0
    for each, wanted in zip(batch.completions, updated(made, batch.completions), strict=True):
        assert bits(each) == wanted
        compared += len(each.tokens)
    assert compared > 100
    decision = decide(
        replace(batch, completions=batch.completions[:3]),
        Objective(values=True),
        engine(made).snapshot,
        Mode.REQUIRE,
    )
    assert decision.reuse


def test_completions_come_by_prompt_and_sample() -> None:
    batch = engine().generate(requests()[::-1], number=4)
    names = [(each.prompt_index, each.sample_index) for each in batch.completions]
    assert batch.number == 4 and names == [(p, s) for p in range(5) for s in range(3)]
    kinds = {each.finish for each in batch.completions}
    assert Finish.LENGTH in kinds and Finish.STOP_STRING in kinds


# ---- Broken engines are seen ----


def test_a_sampler_of_the_whole_batch_is_seen(monkeypatch: pytest.MonkeyPatch, reference: dict) -> None:
    def sample(scores: torch.Tensor, **_: object) -> torch.Tensor:
        draw = torch.Generator().manual_seed(len(scores))
        return torch.multinomial(torch.softmax(scores, -1), 1, generator=draw)[:, 0].int()

    monkeypatch.setattr(drawing, "sample", sample)
    together = contents(engine(max_sequences=16).generate(requests()))
    assert together != contents(engine(max_sequences=3).generate(requests()))


def test_positions_of_the_batch_as_random_numbers_are_seen(
    monkeypatch: pytest.MonkeyPatch, reference: dict
) -> None:
    right = drawing.sample

    def sample(scores: torch.Tensor, *, seeds: torch.Tensor, **rest: object) -> torch.Tensor:
        return right(scores, seeds=torch.arange(len(scores)), **rest)

    monkeypatch.setattr(drawing, "sample", sample)
    assert contents(engine(max_sequences=16).generate(requests())) != reference


def test_a_wrong_page_is_seen(monkeypatch: pytest.MonkeyPatch, reference: dict) -> None:
    right = Pages.share
    monkeypatch.setattr(Pages, "share", lambda self, keys: right(self, keys)[::-1])
    assert contents(engine(page_size=4).generate(requests())) != reference


def test_keys_of_old_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `forget` a prompt after an update reads keys of the weights before."""
    asked = requests(1)[:1]
    fresh = contents(engine(_copy(seed=1)).generate(asked))

    def after_update() -> dict:
        made = engine(_copy(seed=0))
        made.generate(asked)
        made.update_weights(_copy(seed=1).weights, 1)
        return contents(made.generate(asked))

    assert after_update() == fresh
    monkeypatch.setattr(Pages, "forget", lambda self: None)
    assert after_update() != fresh


def test_another_arithmetic_of_the_recorded_logprob_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def log_softmax(scores: torch.Tensor, targets: torch.Tensor, *, temperature: float) -> torch.Tensor:
        return torch.log_softmax(scores / temperature, -1).gather(1, targets[:, None].long())[:, 0]

    monkeypatch.setattr(drawing, "logprob_of_logits", log_softmax)
    batch = engine().generate(requests(1)[:1])
    assert bits(batch.completions[0]) != updated(decoder(), batch.completions)[0]


def test_other_operators_have_other_bits_ids() -> None:
    made = decoder()
    own = engine(made).snapshot.bits_id
    vendor = engine(replace(made, operators=Vendor())).snapshot.bits_id
    assert vendor != own == engine(replace(made, operators=Recording(UNIFIED, Calls()))).snapshot.bits_id
    assert vendor == engine(replace(made, operators=Recording(Vendor(), Calls()))).snapshot.bits_id
    assert own != engine(decoder("Qwen3-8B")).snapshot.bits_id


# ---- Seeds ----


def test_seeds_belong_to_requests() -> None:
    prompt, sampling = [5, 9, 2], Sampling(max_tokens=12, temperature=1.5)

    def tokens(own: int | None, sample: int = 0, prompt_index: int = 0, seed: int = 0) -> list[int]:
        asked = Request(torch.tensor(prompt, dtype=torch.int32), sampling, prompt_index, sample, own)
        return engine(seed=seed).generate([asked]).completions[0].tokens.tolist()

    assert tokens(11) == tokens(11, prompt_index=8, seed=3)
    different = [tokens(11), tokens(12), tokens(11, sample=1), tokens(-1), tokens(None), tokens(None, seed=1)]
    different.append(tokens(None, prompt_index=1))
    assert len(set(map(tuple, different))) == len(different)


# ---- Ends ----


def _drawn_alone() -> list[int]:
    [found] = engine().generate(group([4, 8], Sampling(max_tokens=12), prompt_index=0, samples=1)).completions
    return found.tokens.tolist()


def test_stop_tokens_end_and_stay() -> None:
    tokens = _drawn_alone()
    stop = tokens[5]
    first = tokens.index(stop)
    for sampling, more in (
        (Sampling(max_tokens=12, stop_tokens=(stop,)), {}),
        (Sampling(max_tokens=12), {"end_tokens": (stop,)}),
    ):
        [found] = engine(**more).generate(group([4, 8], sampling, prompt_index=0, samples=1)).completions
        assert found.tokens.tolist() == tokens[: first + 1] and found.finish == Finish.END


def test_stop_strings_span_tokens() -> None:
    tokens = _drawn_alone()
    string = text_of(tokens)[1:11]  # from the second letter of the first token into the fourth
    sampling = Sampling(max_tokens=12, stop=("nowhere", string))
    [found] = engine().generate(group([4, 8], sampling, prompt_index=0, samples=1)).completions
    assert found.finish == Finish.STOP_STRING and found.tokens.tolist() == tokens[:4]
    assert len(found.logprobs) == 4 and not found.truncated


def test_a_stop_string_needs_text() -> None:
    made = Engine(decoder())
    with pytest.raises(ValueError, match="stop strings need an engine with `decode`"):
        made.generate(group([1], Sampling(max_tokens=3, stop=("x",)), prompt_index=0, samples=1))


# ---- Versions ----


def _copy(seed: int = 0) -> Decoder:
    return remade(decoder().config, seed)


def test_an_update_on_the_way_marks_completions() -> None:
    made = engine(_copy(), max_sequences=2, step_tokens=16, page_size=4)
    made.submit(group(range(40), Sampling(max_tokens=8), prompt_index=0, samples=1))
    made.submit(group(range(50, 52), Sampling(max_tokens=8), prompt_index=1, samples=1))
    for _ in range(
        4
    ):  # chunks of 16, 15 or 16, then the rest: the second prompt has joined at the third step
        made.step()
    made.submit(group(range(60, 100), Sampling(max_tokens=5), prompt_index=2, samples=1))
    made.update_weights(_copy(seed=1).weights, 5)
    found = []
    while made.unfinished:
        found += made.step()
    by = {each.prompt_index: each for each in found}
    assert by[0].snapshot.version == 0 and by[0].versions == (0, 5)
    assert by[0].drawn == (Drawn(0, 0), Drawn(2, 5))
    assert by[2].snapshot.version == 5 and by[2].versions == (5,) and not by[2].drawn
    assert by[2].prefix_version is None


def test_an_update_between_chunks_marks_the_prefix() -> None:
    made = engine(_copy(), max_sequences=1, step_tokens=16, page_size=4)
    made.submit(group(range(40), Sampling(max_tokens=4), prompt_index=0, samples=2))
    made.step()
    made.update_weights(_copy(seed=1).weights, 1)
    found = []
    while made.unfinished:
        found += made.step()
        made.check()
    first, second = sorted(found, key=lambda each: each.sample_index)
    assert first.prefix_version == 0 and first.snapshot.version == 1 and first.versions == (0, 1)
    assert second.prefix_version is None and second.versions == (1,)
    fresh = engine(_copy(seed=1)).generate(
        group(range(40), Sampling(max_tokens=4), prompt_index=0, samples=2)
    )
    assert bits(second) == bits(fresh.completions[1])
    assert bits(first) != bits(fresh.completions[0])
    finding = decide(fresh, Objective(), replace(made.snapshot, run="r", version=0))
    assert finding.reuse


def test_mixed_completions_are_not_reused() -> None:
    made = engine(_copy())
    made.submit(group([1, 2], Sampling(max_tokens=6), prompt_index=0, samples=1))
    made.step()
    made.update_weights(_copy(seed=1).weights, 1)
    found = []
    while made.unfinished:
        found += made.step()
    batch = replace(engine().generate([]), completions=tuple(found))
    assert Reason.MIXED_VERSIONS in decide(batch, Objective(), made.snapshot).reasons


def test_weights_changed_in_place_need_only_their_version() -> None:
    made = _copy()
    running = engine(made)
    before = contents(running.generate(requests(1)))
    with torch.no_grad():
        made.weights.norm.mul_(1.5)
    running.update_weights(made.weights, 1, weights="abc")
    assert running.snapshot.version == 1 and running.snapshot.weights == "abc"
    assert contents(running.generate(requests(1))) != before


def test_wrong_weights_are_refused_and_nothing_changes() -> None:
    made = engine(_copy())
    own = {name: each.clone() for name, each in made.decoder.weights.tensors()}
    with pytest.raises(ValueError, match="version must be above 0, got 0"):
        made.update_weights(_copy(seed=1).weights, 0)
    with pytest.raises(ValueError, match=r"must name the decoder's parameters; differing: {'norm'}"):
        made.update_weights({name: each for name, each in own.items() if name != "norm"}, 1)
    with pytest.raises(ValueError, match=r"norm must have shape \[64\], got \[65\]"):
        made.update_weights({**own, "norm": torch.ones(65)}, 1)
    assert all(torch.equal(own[name], each) for name, each in made.decoder.weights.tensors())
    assert made.version == 0


# ---- Limits and failures ----


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            ([1] * 60, Sampling(max_tokens=10)),
            r"60 \+ max_tokens 10 = 70 tokens never fit: the cache holds 64",
        ),
        (([1, 180], Sampling(max_tokens=1)), "token ids must lie between 0 and 179, got 180"),
        (([-1], Sampling(max_tokens=1)), "between 0 and 179, got -1"),
        (([1], Sampling(max_tokens=1, logit_bias=((180, 1.0),))), "logit_bias must name token ids below 180"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(asked: tuple, message: str) -> None:
    made = engine(cache_tokens=64)
    good = group([1, 2], Sampling(max_tokens=2), prompt_index=0, samples=1)
    with pytest.raises(ValueError, match=message):
        made.generate([*good, *group(*asked, prompt_index=1, samples=1)])
    assert made.unfinished == 0
    with pytest.raises(ValueError, match="prompt 0, sample 0 is under way already"):
        made.generate(good * 2)
    assert len(made.generate(good)) == 1


def test_the_longest_request_fits() -> None:
    made = engine(cache_tokens=64, page_size=8)
    [found] = made.generate(group([1] * 60, Sampling(max_tokens=4), prompt_index=0, samples=1)).completions
    assert len(found.tokens) == 4 and made.statistics.most_pages == 8


def test_settings_out_of_range_are_refused() -> None:
    for settings, message in (
        ({"page_size": 257}, "page_size must lie between 1 and 256, got 257"),
        ({"step_tokens": 3}, "step_tokens must be at least max_sequences 64, got 3"),
        ({"cache_tokens": 0}, "cache_tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineSettings(**settings)
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        group([], Sampling(), prompt_index=0, samples=1)
    with pytest.raises(ValueError, match="seed must be an int64"):
        group([1], Sampling(), prompt_index=0, samples=1, seed=2**63)


def test_a_failure_gives_everything_up(monkeypatch: pytest.MonkeyPatch, reference: dict) -> None:
    made = engine(max_sequences=4)

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        if made.statistics.drawn_tokens > 9:
            raise OSError("no memory")
        return hidden[:, 0].float()

    right, made.value_head = made.value_head, broken
    with pytest.raises(OSError, match="no memory"):
        made.generate(requests())
    made.check()
    assert made.unfinished == 0 and made._schedule.pages.held == 0
    made.value_head = right
    assert contents(made.generate(requests())) == reference


def test_a_value_head_of_another_shape_is_refused() -> None:
    made = Engine(decoder(), value_head=lambda hidden: hidden)
    with pytest.raises(ValueError, match=r"value_head must give float32 \[1\], got torch.float32 \[1, 64\]"):
        made.generate(group([1], Sampling(max_tokens=1), prompt_index=0, samples=1))


def test_only_what_is_asked_for_is_recorded() -> None:
    made = Engine(decoder(), EngineSettings(record=(Named.PROCESSED,)), decode=text_of)
    by = {each.prompt_index: each for each in made.generate(requests(1)).completions}
    assert by[0].logprobs is None and by[0].processed_logprobs is None and by[0].values is None
    assert by[1].logprobs is None and by[1].processed_logprobs is not None
    assert by[3].logprobs is None and by[3].processed_logprobs is None  # greedy


def test_pause_and_abort_from_another_thread() -> None:
    made = engine()
    made.pause()
    found = []
    thread = threading.Thread(target=lambda: found.append(made.generate(requests(1))))
    made.submit([])
    thread.start()
    while not made.unfinished:  # until the other thread has asked
        pass
    assert made.step() == [] and made.statistics.steps == 0
    made.abort([(1, 0)])
    made.resume()
    thread.join()
    kinds = {each.prompt_index: each.finish for each in found[0].completions}
    assert kinds[1] == Finish.ABORTED and kinds[0] == Finish.LENGTH


def test_statistics_count_every_token() -> None:
    made = engine(page_size=4)
    batch = made.generate(requests())
    counted = made.reset_statistics()
    assert counted.drawn_tokens == sum(len(each.tokens) for each in batch.completions)
    assert counted.prefill_tokens + counted.prefix_hits == sum(len(each.prompt) for each in batch.completions)
    assert sum(counted.batch_sizes.values()) < counted.steps
    document = counted.document()
    assert document["decode_tokens_per_second"] > 0 and document["prefill_tokens_per_second"] > 0
    assert made.statistics.steps == 0 and made.statistics.document()["decode_tokens_per_second"] is None
