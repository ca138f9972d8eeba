"""What a run asks of attention and linear: regimes, shapes and how often, for a search to optimize for.

A decoder's operators are wrapped, which changes no bits, and each call is counted. Calls of nearly the same
work, within a factor of 2 ** 0.25, are counted together under the shape of the first: a file stays short
however long the run. `kernelbraid search --workloads FILE` reads it.
"""

import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernelbraid
from kernelbraid.models.operators import Operators

FORMAT = "kernelbraid-workloads/1"
STEPS_OF_A_DOUBLING = 4
USUAL_PAGE = 16
"""Tokens of a page in the shapes of packed calls, which have no pages, until one is seen."""

Axes = tuple[tuple[str, int | tuple[int, ...]], ...]


class Calls:
    """Counts of calls, by operator, phase and shape.

    Attributes:
        steps: reinforcement-learning steps that the counts are of; whoever runs them counts them here.
        device, dtype: of the calls; empty until there was one.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.device = self.dtype = ""
        self._counts: Counter[tuple[str, str, Axes]] = Counter()
        self._like: dict[tuple[object, ...], Axes] = {}

    def add(self, operator: str, phase: str, work: int, fixed: Axes, ragged: Axes) -> None:
        """Count one call.

        Args:
            operator: its name.
            phase: the regime that it was called in.
            work: what its time grows with, such as tokens.
            fixed: axes that calls counted together share.
            ragged: the others.
        """
        if work < 1:
            return
        near = round(math.log2(work) * STEPS_OF_A_DOUBLING)
        axes = self._like.setdefault((operator, phase, fixed, near), ragged + fixed)
        self._counts[operator, phase, axes] += 1

    def document(self) -> dict[str, Any]:
        """As the file holds it: each operator's shapes, the most frequent first.

        Raises:
            ValueError: no step was counted.
        """
        if self.steps < 1 or not self._counts:
            raise ValueError("nothing was recorded: workloads need at least one whole step")
        operators: dict[str, list[dict[str, Any]]] = {}
        for (operator, phase, axes), count in self._counts.most_common():
            shape = {name: list(value) if isinstance(value, tuple) else value for name, value in axes}
            operators.setdefault(operator, []).append({"phase": phase, "axes": shape, "calls": count})
        return {
            "format": FORMAT,
            "kernelbraid": kernelbraid.__version__,
            "device": self.device,
            "dtype": self.dtype,
            "steps": self.steps,
            "operators": operators,
        }

    def write(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            ValueError: no step was counted.
            RuntimeError: the file cannot be written.
        """
        place, text = Path(path), json.dumps(self.document(), indent=1) + "\n"
        temporary = place.with_name(f".partial-{secrets.token_hex(6)}-{place.name}")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(place)
        except OSError as error:
            raise RuntimeError(f"cannot write {place}: {error.strerror or error}") from error
        finally:
            temporary.unlink(missing_ok=True)


class Recording(Operators):
    """Operators that count what is asked of them; numbers and gradients are those of the wrapped ones.

    On a GPU reading lengths waits for the device, and calls inside a CUDA graph would be counted when it is
    captured, not when it is replayed: record with graphs off.

    Args:
        inner: what computes.
        calls: what counts.
    """

    def __init__(self, inner: Operators, calls: Calls) -> None:
        self.inner, self.calls = inner, calls
        self.arithmetic, self.waits = inner.arithmetic, True
        self._phase: str | None = None
        self._page = USUAL_PAGE
        self._waiting: list[Callable[[], None]] = []
        for name in dir(inner):
            if not name.startswith("_") and name not in vars(Recording) and callable(getattr(inner, name)):
                setattr(self, name, getattr(inner, name))

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """A pass begins: its phase is that of its first attention."""
        self._phase, self._waiting = None, []
        return self.inner.embedding(ids, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self.inner.linear(x, weight, bias)
        tokens, (features, inputs) = x.shape[0], weight.shape
        fixed: Axes = (("in_features", inputs), ("out_features", features), ("bias", int(bias is not None)))

        def count(phase: str | None = None) -> None:
            now = phase or self._phase
            assert now is not None
            self.calls.add("linear", now, tokens, fixed, (("tokens", tokens),))

        if self._phase is None:
            self._waiting.append(count)
        else:
            count()
        return _at_backward(out, lambda: count("backward"))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        out = self.inner.attention(q, k, v, cu_seqlens, max_seqlen)
        lengths = _differences(_host(cu_seqlens))

        def count(phase: str) -> None:
            self._attended(phase, lengths, lengths, q, k.shape[1])

        self._begin("update")
        count("update")
        return _at_backward(out, lambda: count("backward"))

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> Tensor:
        queries, keys = _differences(_host(cu_seqlens_q)), _host(seqlens_k)
        self._page = k_cache.shape[1]
        phase = phase_of(queries, keys)
        self._begin(phase)
        self._attended(phase, queries, keys, q, k_cache.shape[2])
        return self.inner.paged_attention(
            *(q, k_cache, v_cache),
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    def _begin(self, phase: str) -> None:
        """The pass is of this phase: what waited for it is counted."""
        self._phase = phase
        for count in self._waiting:
            count()
        self._waiting = []

    def _attended(
        self, phase: str, queries: Sequence[int], keys: Sequence[int], q: Tensor, kv_heads: int
    ) -> None:
        """Requests without new tokens, such as those that pad a batch, are left out."""
        held = [(new, all_) for new, all_ in zip(queries, keys, strict=True) if new > 0]
        self.calls.device, self.calls.dtype = q.device.type, str(q.dtype).removeprefix("torch.")
        ragged: Axes = (("batch", len(held)), ("length", tuple(all_ for _, all_ in held)))
        if phase == "chunked_prefill":
            ragged += (("query_length", tuple(new for new, _ in held)),)
        fixed: Axes = (
            ("page_size", self._page),
            ("query_heads", q.shape[1]),
            ("kv_heads", kv_heads),
            ("head_dim", q.shape[2]),
        )
        self.calls.add("attention", phase, sum(new * all_ for new, all_ in held), fixed, ragged)


def check_place(path: str | Path) -> None:
    """Raise ValueError where a file cannot be written to, before a run that would end with it."""
    place = Path(path)
    if place.is_dir() or not place.absolute().parent.is_dir():
        raise ValueError(f"workloads: {place} must be a file in a folder that exists")


def phase_of(queries: Sequence[int], keys: Sequence[int]) -> str:
    """The regime of a call on the paged cache.

    Args:
        queries: new tokens of each request.
        keys: all tokens of each request, the new ones included.

    Returns:
        `decode` where each request has one new token, `prefill` where each one's tokens are all new, else
        `chunked_prefill`.
    """
    held = [(new, all_) for new, all_ in zip(queries, keys, strict=True) if new > 0]
    if all(new == 1 for new, _ in held):
        return "decode"
    return "prefill" if all(new == all_ for new, all_ in held) else "chunked_prefill"


def _host(numbers: Tensor) -> list[int]:
    if numbers.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("workloads cannot be recorded inside a CUDA graph: turn graphs off for that run")
    return [int(each) for each in numbers.tolist()]


def _differences(offsets: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(offsets)]


def _at_backward(out: Tensor, count: Callable[[], None]) -> Tensor:
    """Count when the gradient of a result arrives; passes that are thrown away get none."""
    if out.requires_grad and torch.is_grad_enabled():

        def arrived(gradient: Tensor) -> None:
            count()

        out.register_hook(arrived)  # type: ignore[no-untyped-call]
    return out
