"""The relations across operators: whole layers and models computed token by token, in pieces, and packed.

Unlike an audit of one operator these run the implementations in use, in this process: they are the last proof
that nothing between the operators breaks what each of them keeps.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelbraid.models.config import ModelConfig
from kernelbraid.models.layer import Paged
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Cache, Decoder
from kernelbraid.ops.logprob.api import logprob_of_logits
from kernelbraid.ops.sample.api import sample

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True, slots=True)
class Finding:
    """One relation across operators, checked."""

    relation: str
    comparisons: int
    unequal: int
    first: str = ""
    """Where the first unequal element is."""

    @property
    def held(self) -> bool:
        return self.comparisons > 0 and self.unequal == 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a rollout gave for the tokens of each request, in order."""

    hidden: tuple[Tensor, ...]
    logprobs: tuple[Tensor, ...]


class Pages:
    """Page tables of some requests in one cache, in a shuffled order of pages."""

    def __init__(self, lengths: Sequence[int], page_size: int, seed: int, device: torch.device) -> None:
        needed = [-(-n // page_size) for n in lengths]
        order = list(range(sum(needed)))
        random.Random(seed).shuffle(order)
        self.count = max(1, len(order))
        table = torch.zeros(len(lengths), max([1, *needed]), dtype=torch.int32)
        for b, n in enumerate(needed):
            table[b, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
        self.table = table.to(device)


def roll_out(
    model: Decoder,
    sequences: Sequence[Tensor],
    pieces: Sequence[Sequence[int]],
    *,
    page_size: int = 16,
    seed: int = 1,
) -> Rollout:
    """Compute sequences through the paged cache, request b in `pieces[b]`, all requests beside one another.

    Args:
        model: the decoder.
        sequences: token ids of each request.
        pieces: for each request, the numbers of its tokens in the calls that it takes part in.
        page_size: tokens of a page.
        seed: of the order of pages.

    Returns:
        Hidden states of every token, and the log-probability that each gives to the token after it.
    """
    device = model.weights.norm.device
    lengths = [len(ids) for ids in sequences]
    pages = Pages(lengths, page_size, seed, device)
    cache = Cache.empty(model.config, pages.count, page_size, model.weights.norm)
    done = [0] * len(sequences)
    hidden: list[list[Tensor]] = [[] for _ in sequences]
    logprobs: list[list[Tensor]] = [[] for _ in sequences]
    for t in range(max(len(each) for each in pieces)):
        new = [each[t] if t < len(each) else 0 for each in pieces]
        ids = torch.cat([ids[d : d + n] for ids, d, n in zip(sequences, done, new, strict=True)])
        after = torch.cat([_following(ids, d, n) for ids, d, n in zip(sequences, done, new, strict=True)])
        done = [d + n for d, n in zip(done, new, strict=True)]
        batch = Paged(
            pages.table,
            torch.tensor([0, *_sums(new)], dtype=torch.int32, device=device),
            torch.tensor(done, dtype=torch.int32, device=device),
            max(new),
            max(done),
        )
        found = model.rollout(ids, cache, batch)
        scores = model.logprobs(found, after)
        for b, (rows, values) in enumerate(
            zip(torch.split(found, new), torch.split(scores, new), strict=True)
        ):
            hidden[b].append(rows)
            logprobs[b].append(values)
    return Rollout(tuple(map(torch.cat, hidden)), tuple(map(torch.cat, logprobs)))


def _following(ids: Tensor, start: int, count: int) -> Tensor:
    """The token after each of `count` ones; the first one after the last."""
    return torch.cat([ids[start + 1 : start + 1 + count], ids[:1]])[:count]


def _sums(counts: Sequence[int]) -> Iterator[int]:
    total = 0
    for count in counts:
        total += count
        yield total


def update(model: Decoder, sequences: Sequence[Tensor]) -> Rollout:
    """The same by the packed forward of the policy update."""
    lengths = [len(ids) for ids in sequences]
    cu = torch.tensor([0, *_sums(lengths)], dtype=torch.int32, device=model.weights.norm.device)
    ids = torch.cat(list(sequences))
    hidden = model.hidden(ids, cu, max(lengths))
    after = torch.cat([_following(each, 0, len(each)) for each in sequences])
    scores = model.logprobs(hidden, after)
    return Rollout(tuple(torch.split(hidden, lengths)), tuple(torch.split(scores, lengths)))


@dataclass(frozen=True, slots=True)
class Generated:
    """Completions with the log-probabilities that were recorded as their tokens were drawn."""

    sequences: tuple[Tensor, ...]
    """Prompt and completion of each request, token ids."""
    logprobs: tuple[Tensor, ...]
    """Of the completion's tokens."""


def generate(
    model: Decoder,
    prompts: Sequence[Tensor],
    tokens: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    page_size: int = 16,
) -> Generated:
    """Draw `tokens` tokens after each prompt, all requests in one batch of the paged cache.

    Token t of request b comes from the random numbers of (seed, b, its position), whoever is beside it.
    """
    device = model.weights.norm.device
    lengths = [len(prompt) for prompt in prompts]
    pages = Pages([n + tokens for n in lengths], page_size, seed + 1, device)
    cache = Cache.empty(model.config, pages.count, page_size, model.weights.norm)
    requests = torch.arange(len(prompts), dtype=torch.int32, device=device)
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *_sums(lengths)], dtype=torch.int32, device=device)
    ids, longest = torch.cat(list(prompts)), max(lengths)
    hidden = model.rollout(ids, cache, Paged(pages.table, starts, held, longest, longest))
    hidden = hidden[(starts[1:] - 1).long()]
    drawn_tokens, recorded = [], []
    singles = torch.arange(len(prompts) + 1, dtype=torch.int32, device=device)
    for t in range(tokens):
        logits = model.logits(hidden)
        chosen = sample(logits, seeds=seed, samples=requests, positions=held, temperature=temperature)
        scores = logprob_of_logits(logits, chosen, temperature=temperature)
        assert isinstance(scores, Tensor)
        drawn_tokens.append(chosen)
        recorded.append(scores)
        if t + 1 < tokens:
            held = held + 1
            hidden = model.rollout(chosen, cache, Paged(pages.table, singles, held, 1, longest + t + 1))
    completions, scores = torch.stack(drawn_tokens, 1), torch.stack(recorded, 1)
    sequences = [torch.cat([prompt, row]) for prompt, row in zip(prompts, completions, strict=True)]
    return Generated(tuple(sequences), tuple(scores))


def check_generation(
    model: Decoder, prompts: Sequence[Tensor], tokens: int, *, seed: int = 0, temperature: float = 1.0
) -> Finding:
    """Compare recorded log-probabilities of a rollout with those of the update's packed forward, as bits."""
    with torch.no_grad():
        rollout = generate(model, prompts, tokens, seed=seed, temperature=temperature)
        lengths = [len(ids) - 1 for ids in rollout.sequences]
        cu = torch.tensor([0, *_sums(lengths)], dtype=torch.int32, device=model.weights.norm.device)
        hidden = model.hidden(torch.cat([ids[:-1] for ids in rollout.sequences]), cu, max(lengths))
        after = torch.cat([ids[1:] for ids in rollout.sequences])
        scores = torch.split(model.logprobs(hidden, after, temperature), lengths)
    updated = tuple(each[-tokens:] for each in scores)
    none = tuple(each[:0] for each in scores)
    relation = f"recorded_logprobs_equal_update ({tokens} tokens a request)"
    return compare(relation, Rollout(none, rollout.logprobs), Rollout(none, updated))


def compare(relation: str, one: Rollout, other: Rollout) -> Finding:
    """Compare all bits of two rollouts."""
    comparisons = unequal = 0
    first = ""
    for name in ("hidden", "logprobs"):
        for b, (left, right) in enumerate(zip(getattr(one, name), getattr(other, name), strict=True)):
            different = left.view(BITS[left.dtype]) != right.view(BITS[right.dtype])
            comparisons += different.numel()
            count = int(different.sum())
            if count and not unequal:
                place = torch.nonzero(different)[0].tolist()
                first = f"{name} of request {b}, index {place}"
            unequal += count
    return Finding(relation, comparisons, unequal, first)


def sequences_of(config: ModelConfig, lengths: Sequence[int], seed: int, device: str) -> list[Tensor]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, config.vocab, (n,), generator=generator).to(device, torch.int32) for n in lengths
    ]


def cut(rows: int, rng: random.Random) -> list[int]:
    """A random partition of a prompt, single tokens at its end."""
    single = min(rows, rng.randint(1, 12))
    left = rows - single
    pieces: list[int] = []
    while left:
        pieces.append(rng.randint(1, left) if len(pieces) < 5 else left)
        left -= pieces[-1]
    return [*pieces, *[1] * single]


def check_model(
    model: Decoder, lengths: Sequence[int] = (65, 1, 17, 200, 33), *, seed: int = 0
) -> Iterator[Finding]:
    """Check a model, or a layer as a model of one: yields a finding a relation."""
    device = str(model.weights.norm.device)
    rng = random.Random(seed)
    sequences = sequences_of(model.config, lengths, seed, device)
    with torch.no_grad():
        packed = update(model, sequences)
        yield compare("update_equals_prefill", packed, roll_out(model, sequences, [[n] for n in lengths]))
        chunked = roll_out(
            model, sequences, [cut(n, rng) for n in lengths], page_size=rng.choice((1, 7, 64)), seed=seed + 2
        )
        yield compare("update_equals_chunked_prefill_and_decode", packed, chunked)
        steps = roll_out(model, sequences, [[1] * n for n in lengths], page_size=5, seed=seed + 3)
        yield compare("update_equals_decode", packed, steps)
        alone = [update(model, [each]) for each in sequences]
        parts = Rollout(tuple(each.hidden[0] for each in alone), tuple(each.logprobs[0] for each in alone))
        yield compare("packed_equals_alone", packed, parts)


def check_layer(config: ModelConfig, *, dtype: torch.dtype, device: str, seed: int = 0) -> Iterator[Finding]:
    """Check one layer of a model's shapes with random weights, embedding and head included."""
    small = config.small(layers=1)
    weights = drawn(small, dtype=dtype, device=device, seed=seed)
    yield from check_model(Decoder(small, weights, positions=512), seed=seed)
