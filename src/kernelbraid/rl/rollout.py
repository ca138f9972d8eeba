"""The rollout engine: draws completions of many requests at a time, and records what `reuse` needs.

    engine = Engine(decoder, EngineSettings(cache_tokens=65536), decode=tokenizer.decode)
    batch = engine.generate(group(prompt, Sampling(), prompt_index=0, samples=8))

A step plans (`schedule`), computes the new tokens of all requests in one call on the paged cache, draws the
next token of those that are complete (`drawing`), and ends what has ended. No bit of a completion depends on
the requests beside it, on limits, pages, preemptions or the order of arrival: every operator's contract says
so for its rows, and random numbers belong to (seed, sample_index, position).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from uuid import uuid4

import torch
from torch import Tensor

from kernelbraid.models.layer import Paged
from kernelbraid.models.model import Cache, Decoder, ModelWeights
from kernelbraid.rl.arithmetic import snapshot_of
from kernelbraid.rl.buckets import Buckets, page_table, scratch_pages, uses_graphs
from kernelbraid.rl.drawing import Row, draw
from kernelbraid.rl.records import Completion, Drawn, Finish, RolloutBatch, Snapshot
from kernelbraid.rl.requests import EngineSettings, Request, Statistics, group, prompt_seed
from kernelbraid.rl.reuse import Named
from kernelbraid.rl.schedule import Piece, Schedule
from kernelbraid.rl.schedule import Sequence as Underway
from kernelbraid.rl.stops import Decode, TextWatch

__all__ = ["Engine", "EngineSettings", "Request", "Statistics", "group"]

ValueHead = Callable[[Tensor], Tensor]
"""From hidden states [R, hidden], normed, to values [R] float32; a row's bits must be its own, as those of
the unified operators are."""


class Engine:
    """Draws completions from a decoder, whose weights it shares.

    Args:
        decoder: the policy; its tensors are used in place.
        settings: limits.
        run: name of the process that counts versions; a random one by default.
        version: of the weights as they are.
        weights: identity of the weights across processes, where there is one.
        decode: text of token ids, needed by requests with stop strings.
        value_head: gives the value of each token's state, the hidden state that the token is drawn from.

    Raises:
        ValueError: the settings do not fit the decoder.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: EngineSettings | None = None,
        *,
        run: str | None = None,
        version: int = 0,
        weights: str | None = None,
        decode: Decode | None = None,
        value_head: ValueHead | None = None,
    ) -> None:
        self.decoder, self.settings = decoder, settings or EngineSettings()
        self.decode, self.value_head = decode, value_head
        self.snapshot: Snapshot = snapshot_of(
            decoder, version=version, run=run or uuid4().hex, weights=weights
        )
        self.statistics = Statistics(pages=self.settings.pages)
        self._schedule = Schedule(self.settings, self.statistics)
        device = decoder.weights.norm.device
        graphs = uses_graphs(self.settings.graphs, device, decoder.operators.waits)
        most_rows = min(self.settings.largest_graph, -(-self.settings.max_sequences // 8) * 8)
        extra = scratch_pages(self.settings.page_size) if graphs else 0
        pages = self.settings.pages
        self._cache = Cache.empty(
            decoder.config, pages + extra, self.settings.page_size, decoder.weights.norm
        )
        self._buckets = (
            Buckets(
                decoder,
                self._cache,
                range(pages, pages + extra),
                largest=most_rows,
                most=self.longest,
            )
            if graphs
            else None
        )
        self._arrived = 0
        self._names: dict[tuple[int, int], Underway] = {}
        self._given_up: list[Underway] = []
        self._paused = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and `max_tokens`, that fits."""
        return min(self.settings.pages * self.settings.page_size, self.decoder.positions)

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.snapshot.version

    @property
    def unfinished(self) -> int:
        """Requests that wait or run, or were given up and not returned yet."""
        return len(self._names) + len(self._given_up)

    # ---- Asking ----

    def generate(self, requests: Sequence[Request], *, number: int = 0) -> RolloutBatch:
        """Draw completions of all requests.

        Args:
            requests: in any order; those of a prompt share pages.
            number: counts the rollouts of a run.

        Returns:
            The completions by prompt_index, then sample_index.

        Raises:
            ValueError: a request can never be served; nothing was drawn.
            RuntimeError: other requests, given to `submit`, are under way.
        """
        if self.unfinished > 0:
            raise RuntimeError(f"{self.unfinished} submitted requests are under way: step them to their end")
        self.submit(requests)
        found: list[Completion] = []
        while self.unfinished > 0:
            with self._changed:
                self._changed.wait_for(lambda: not self._paused or self._given_up)
            found += self.step()
        found.sort(key=lambda each: (each.prompt_index, each.sample_index))
        return RolloutBatch(number, tuple(found))

    def submit(self, requests: Sequence[Request]) -> None:
        """Let requests wait for the next steps: all of them, or none.

        Raises:
            ValueError: a request can never be served, or one of its name is under way.
        """
        with self._lock:
            names = set(self._names)
            for request in requests:
                self._check(request, names)
                names.add(request.name)
            for request in requests:
                seed = request.seed
                if seed is None:
                    seed = prompt_seed(self.settings.seed, request.prompt_index)
                stop, decode = request.sampling.stop, self.decode
                watch = TextWatch(decode, stop) if stop and decode is not None else None
                added = Underway(request, self._arrived, seed, request.prompt.tolist(), watch)
                self._arrived += 1
                self._names[request.name] = added
                self._schedule.add(added)

    def step(self) -> list[Completion]:
        """Compute one step and return the completions that ended; none while paused.

        Raises:
            Exception: whatever the computation raises; all requests are given up then.
        """
        with self._lock:
            given_up, self._given_up = self._given_up, []
            ended = [self._completion(each, Finish.ABORTED) for each in given_up]
            if self._paused:
                return ended
            pieces = self._schedule.plan(self.version)
            if not pieces:
                assert not self._schedule.waiting, "a request that fits is never admitted"
                return ended
            try:
                with torch.no_grad():
                    return ended + self._computed(pieces)
            except BaseException:
                self._give_up_all()
                self._given_up.clear()
                raise

    def pause(self) -> None:
        """Stop between two steps; `generate` waits. Callable from another thread."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self, names: Sequence[tuple[int, int]] | None = None) -> None:
        """Give requests up: the next step returns what was drawn of them, as aborted.

        Args:
            names: (prompt_index, sample_index) of each; all by default. Those that ended already are passed
                over.
        """
        with self._lock:
            for name in list(self._names) if names is None else names:
                sequence = self._names.pop(name, None)
                if sequence is not None:
                    self._schedule.remove(sequence)
                    self._given_up.append(sequence)
            self._changed.notify_all()

    def update_weights(
        self, new: ModelWeights | Mapping[str, Tensor], version: int, *, weights: str | None = None
    ) -> None:
        """Copy other weights over the decoder's, in place; requests under way go on and are marked as mixed.

        Args:
            new: all parameters; a mapping names them as `ModelWeights.tensors` does. The decoder's own
                tensors may be among them, where an optimizer changed them in place.
            version: of the new weights, above the present one.
            weights: their identity across processes.

        Raises:
            ValueError: a parameter is missing, unknown or of another shape, or the version does not rise;
                nothing was changed.
        """
        given = dict(new.tensors()) if isinstance(new, ModelWeights) else dict(new)
        own = dict(self.decoder.weights.tensors())
        if set(given) != set(own):
            raise ValueError(
                f"weights must name the decoder's parameters; differing: {set(given) ^ set(own)}"
            )
        for name, tensor in own.items():
            if given[name].shape != tensor.shape:
                wanted = f"{list(tensor.shape)}, got {list(given[name].shape)}"
                raise ValueError(f"{name} must have shape {wanted}")
        with self._lock:
            if version <= self.version:
                raise ValueError(f"version must be above {self.version}, got {version}")
            with torch.no_grad():
                for name, tensor in own.items():
                    if given[name] is not tensor:
                        tensor.copy_(given[name])
            self.snapshot = replace(self.snapshot, version=version, weights=weights)
            self._schedule.pages.forget()

    def forget_prefixes(self) -> None:
        """Share no page that was computed before now: prompts that come again are computed again."""
        with self._lock:
            self._schedule.pages.forget()

    def reset_statistics(self) -> Statistics:
        """Return what was counted and start anew."""
        with self._lock:
            found = self.statistics
            self.statistics = Statistics(pages=self.settings.pages)
            self._schedule.statistics = self.statistics
            return found

    def check(self) -> None:
        """Raise AssertionError unless pages, requests and counts agree: for tests."""
        self._schedule.check()
        assert set(map(id, self._names.values())) == set(
            map(id, [*self._schedule.running, *self._schedule.waiting])
        )

    # ---- One step ----

    def _computed(self, pieces: Sequence[Piece]) -> list[Completion]:
        start = time.perf_counter()
        hidden, scores = self._hidden(pieces)
        drawing = [piece.sequence for piece in pieces if piece.draws]
        ended = []
        if drawing:
            values = self._values(hidden)
            rows = [
                Row(each.request.sampling, each.seed, each.request.sample_index, each.ids, each.prompt_length)
                for each in drawing
            ]
            found = draw(scores, rows)
            for i, sequence in enumerate(drawing):
                finish = self._take(
                    sequence,
                    found.tokens[i],
                    found.logprobs[i],
                    found.processed[i],
                    values[i] if values else None,
                )
                if finish is not None:
                    del self._names[sequence.request.name]
                    self._schedule.remove(sequence)
                    ended.append(self._completion(sequence, finish))
        self._count(pieces, len(drawing), time.perf_counter() - start)
        return ended

    def _hidden(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """Hidden states and scores of the rows that draw, in the order of the pieces."""
        tables = [piece.sequence.pages for piece in pieces]
        ends = [piece.end for piece in pieces]
        ids = [token for piece in pieces for token in piece.sequence.ids[piece.start : piece.end]]
        if self._buckets is not None and all(piece.decodes for piece in pieces):
            hidden = self._buckets.run(ids, tables, ends)
            if hidden is not None:
                return hidden, self.decoder.logits(hidden)
        device = self.decoder.weights.norm.device
        counts = [piece.end - piece.start for piece in pieces]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        host = Paged(
            page_table(tables, len(tables), max(map(len, tables))),
            starts,
            torch.tensor(ends, dtype=torch.int32),
            max(counts),
            max(ends),
        )
        batch = host.to(device)
        self.decoder.plan(self._cache, batch, host)
        hidden = self.decoder.rollout(torch.tensor(ids, dtype=torch.int32, device=device), self._cache, batch)
        last = [int(starts[b + 1]) - 1 for b, piece in enumerate(pieces) if piece.draws]
        hidden = hidden[torch.tensor(last, dtype=torch.int64, device=device)]
        return hidden, self.decoder.logits(hidden) if last else hidden

    def _values(self, hidden: Tensor) -> list[float] | None:
        if self.value_head is None:
            return None
        found = self.value_head(hidden)
        if found.dtype != torch.float32 or found.shape != hidden.shape[:1]:
            given = f"{found.dtype} {list(found.shape)}"
            raise ValueError(f"value_head must give float32 [{len(hidden)}], got {given}")
        values: list[float] = found.tolist()
        return values

    def _take(
        self, sequence: Underway, token: int, logprob: float, processed: float, value: float | None
    ) -> Finish | None:
        """Add a token to a request; why it ends, or None."""
        if sequence.snapshot is None:
            sequence.snapshot = self.snapshot
            if sequence.cache_version != self.version:
                sequence.prefix_version = sequence.cache_version
        if not sequence.drawn or sequence.drawn[-1].version != self.version:
            sequence.drawn.append(Drawn(len(sequence.logprobs), self.version))
        sequence.ids.append(token)
        sequence.logprobs.append(logprob)
        sequence.processed.append(processed)
        if value is not None:
            sequence.values.append(value)
        sampling = sequence.request.sampling
        if token in sampling.stop_tokens or token in self.settings.end_tokens:
            return Finish.END
        if sequence.watch is not None and sequence.watch.add(token):
            return Finish.STOP_STRING
        return Finish.LENGTH if len(sequence.logprobs) == sampling.max_tokens else None

    def _completion(self, sequence: Underway, finish: Finish) -> Completion:
        request, record = sequence.request, self.settings.record
        self.statistics.completions += 1

        def kept(numbers: list[float], wanted: bool) -> Tensor | None:
            return torch.tensor(numbers, dtype=torch.float32) if wanted else None

        sampled = not request.sampling.greedy
        return Completion(
            prompt=request.prompt,
            tokens=torch.tensor(sequence.tokens, dtype=torch.int32),
            sampling=request.sampling,
            finish=finish,
            snapshot=sequence.snapshot or self.snapshot,
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            logprobs=kept(sequence.logprobs, sampled and Named.WHOLE in record),
            processed_logprobs=kept(
                sequence.processed, sampled and Named.PROCESSED in record and request.sampling.processed
            ),
            values=kept(sequence.values, self.value_head is not None),
            drawn=tuple(sequence.drawn) if len(sequence.drawn) > 1 else (),
            prefix_version=sequence.prefix_version,
        )

    # ---- Order ----

    def _check(self, request: Request, names: set[tuple[int, int]]) -> None:
        """Raise ValueError where a request can never be served."""
        where = f"prompt {request.prompt_index}, sample {request.sample_index}"
        sampling, vocab = request.sampling, self.decoder.config.vocab
        if request.name in names:
            raise ValueError(f"{where} is under way already")
        total = len(request.prompt) + sampling.max_tokens
        if total > self.longest:
            held, covered = self.settings.pages * self.settings.page_size, self.decoder.positions
            raise ValueError(
                f"{where}: prompt {len(request.prompt)} + max_tokens {sampling.max_tokens} = {total} tokens "
                f"never fit: the cache holds {held}, the rotary tables cover {covered} positions"
            )
        lowest, highest = int(request.prompt.min()), int(request.prompt.max())
        if lowest < 0 or highest >= vocab:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"{where}: token ids must lie between 0 and {vocab - 1}, got {wrong}")
        if sampling.logit_bias and sampling.logit_bias[-1][0] >= vocab:
            raise ValueError(f"{where}: logit_bias must name token ids below {vocab}")
        if sampling.stop and self.decode is None:
            raise ValueError(f"{where}: stop strings need an engine with `decode`, the tokenizer's")

    def _give_up_all(self) -> None:
        for sequence in list(self._names.values()):
            self._schedule.remove(sequence)
        self._names.clear()
        self._schedule.pages.forget()

    def _count(self, pieces: Sequence[Piece], drawn: int, seconds: float) -> None:
        counted = self.statistics
        counted.steps += 1
        counted.drawn_tokens += drawn
        prefill = sum(piece.end - piece.start for piece in pieces if not piece.decodes)
        if prefill:
            counted.prefill_tokens += prefill
            counted.prefill_seconds += seconds
        else:
            counted.decode_tokens += drawn
            counted.decode_seconds += seconds
            counted.decode_steps += 1
            counted.decode_keys += sum(piece.end for piece in pieces)
            counted.batch_sizes[len(pieces)] = counted.batch_sizes.get(len(pieces), 0) + 1
