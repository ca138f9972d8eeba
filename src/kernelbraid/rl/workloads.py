"""What a real run calls: regimes and shapes of attention and linear layers, with their frequencies.

The file it writes is what `kernelbraid search --workloads FILE` optimizes for. Shapes of one regime that are
near one another are one workload, that of the group's most typical call; its weight is the group's calls
per rollout.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kernelbraid.models.operators import Operators

FORMAT = 1
MOST = 12
"""Workloads of an operator and regime that are kept, the most frequent ones; their weights add up to all."""
LOAD = ("batch", "tokens")
"""Axes that follow the load; the others are the model's."""

Axes = tuple[tuple[str, int | tuple[int, ...]], ...]


class Recorder:
    """Counts the calls of a run."""

    def __init__(self) -> None:
        self.calls: dict[str, Counter[tuple[str, Axes]]] = {"attention": Counter(), "linear": Counter()}
        self.rollouts = 0

    def count(self, operator: str, phase: str, axes: Axes) -> None:
        self.calls[operator][phase, axes] += 1

    def document(self, dtype: str, device: str) -> dict[str, Any]:
        """The file's content.

        Args:
            dtype: of the model.
            device: `cpu` or `cuda`.
        """
        rollouts = max(1, self.rollouts)
        return {
            "format": FORMAT,
            "rollouts": self.rollouts,
            "dtype": dtype,
            "device": device,
            "operators": {
                name: [
                    {"phase": phase, "axes": dict(axes), "weight": count / rollouts}
                    for (phase, axes), count in typical(calls).items()
                ]
                for name, calls in self.calls.items()
            },
        }

    def write(self, path: Path, dtype: str, device: str) -> None:
        """Write the file, whole or not at all."""
        new = path.with_name(f".new-{path.name}")
        new.write_text(json.dumps(self.document(dtype, device), indent=1) + "\n", encoding="utf-8")
        os.replace(new, path)


def typical(calls: Mapping[tuple[str, Axes], int]) -> dict[tuple[str, Axes], int]:
    """Few shapes that stand for many.

    Calls of a regime whose sizes have the same powers of two are one group, and the one in the middle of
    their sizes stands for it. Of more than `MOST` groups the most frequent ones are kept, and share the calls
    of the others by their own.

    Args:
        calls: how often each regime and shape was called.

    Returns:
        Calls of those that stand for the others; all calls of a regime are accounted for.
    """
    groups: dict[tuple[str, object], list[tuple[Axes, int]]] = {}
    for (phase, axes), count in calls.items():
        key = (phase, tuple((name, _bucket(name, value)) for name, value in axes))
        groups.setdefault(key, []).append((axes, count))
    found: dict[str, list[tuple[Axes, int]]] = {}
    for (phase, _), members in groups.items():
        found.setdefault(phase, []).append((_middle(members), sum(count for _, count in members)))
    kept: dict[tuple[str, Axes], int] = {}
    for phase, each in sorted(found.items()):
        each.sort(key=lambda pair: (-pair[1], pair[0]))
        total, most = sum(count for _, count in each), each[:MOST]
        held = sum(count for _, count in most)
        for axes, count in most:
            kept[phase, axes] = max(1, round(count * total / held))
    return kept


def _bucket(name: str, value: int | tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return (len(value).bit_length(), sum(value).bit_length())
    return (value.bit_length() if name in LOAD else value,)


def _size(axes: Axes) -> int:
    return sum(sum(value) if isinstance(value, tuple) else value for _, value in axes)


def _middle(members: list[tuple[Axes, int]]) -> Axes:
    """The shape that half of the calls are smaller than."""
    ordered = sorted(members, key=lambda pair: (_size(pair[0]), pair[0]))
    left = sum(count for _, count in ordered) / 2
    for axes, count in ordered:
        left -= count
        if left <= 0:
            return axes
    return ordered[-1][0]


class Recording(Operators):
    """Operators that count what passes through them. Lengths are read on the host: a GPU waits for each call.

    Args:
        inner: what computes.
        recorder: what counts.
    """

    def __init__(self, inner: Operators, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder
        self._phase: str | None = None
        self._before: list[Axes] = []
        for name in vars(Operators):
            if not name.startswith("_") and name not in vars(Recording):
                setattr(self, name, getattr(inner, name))

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        self._phase = None  # a forward begins: its attention says what it is
        return self._inner.embedding(ids, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes = (("in_features", weight.shape[1]), ("out_features", weight.shape[0]))
        axes: Axes = (("tokens", x.shape[0]), *sizes, ("bias", int(bias is not None)))
        if self._phase is None:
            self._before.append(axes)
        else:
            self._recorder.count("linear", self._phase, axes)
        out = self._inner.linear(x, weight, bias)
        if out.requires_grad:
            _on_gradient(out, lambda: self._recorder.count("linear", "backward", axes))
        return out

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        lengths = tuple(cu_seqlens.diff().tolist())
        axes: Axes = (("batch", len(lengths)), ("length", lengths), ("page_size", 16), *_heads(q, k))
        self._begin("update")
        self._recorder.count("attention", "update", axes)
        out = self._inner.attention(q, k, v, cu_seqlens, max_seqlen)
        if out.requires_grad:
            _on_gradient(out, lambda: self._recorder.count("attention", "backward", axes))
        return out

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
        new, held = tuple(cu_seqlens_q.diff().tolist()), tuple(seqlens_k.tolist())
        phase = "chunked_prefill"
        if all(n == 1 for n in new):
            phase = "decode"
        elif new == held:
            phase = "prefill"
        query: Axes = (("query_length", new),) if phase == "chunked_prefill" else ()
        page = k_cache.shape[1]
        heads = (("query_heads", q.shape[1]), ("kv_heads", k_cache.shape[2]), ("head_dim", q.shape[2]))
        self._begin(phase)
        self._recorder.count(
            "attention",
            phase,
            (("batch", len(held)), ("length", held), *query, ("page_size", page), *heads),
        )
        return self._inner.paged_attention(
            *(q, k_cache, v_cache),
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    def _begin(self, phase: str) -> None:
        self._phase = phase
        for axes in self._before:
            self._recorder.count("linear", phase, axes)
        self._before.clear()


def _heads(q: Tensor, k: Tensor) -> Axes:
    return (("query_heads", q.shape[1]), ("kv_heads", k.shape[1]), ("head_dim", q.shape[2]))


def _on_gradient(out: Tensor, call: Callable[[], None]) -> None:
    """Call a function each time that the gradient of a tensor is computed."""

    def hook(_: Tensor) -> None:
        call()

    out.register_hook(hook)  # type: ignore[no-untyped-call]
