"""One decoder layer in every phase of a training step, unified operators beside the vendor's.

A step of group sampling: prompts are prefilled once each, their completions decoded together, then the update
computes log-probabilities (the recompute that reuse saves), and forward and backward of the loss, in packed
micro-batches. What one layer takes is measured in each phase at the phase's own shapes, and weighted by its
calls in a step. Embedding, head and sampling are not part of a layer.

Reuse alone gains at most T / (T - recompute) over a step of T on the vendor's kernels: the ceiling. Unified
kernels reach it if their other phases are as fast as the vendor's.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelbraid.models import evidence
from kernelbraid.models.config import ModelConfig
from kernelbraid.models.layer import (
    LayerWeights,
    Packed,
    Paged,
    RopeTables,
    attend_packed,
    attend_paged,
    layer,
    packed_positions,
    paged_positions,
)
from kernelbraid.models.load import drawn
from kernelbraid.models.operators import UNIFIED, Operators
from kernelbraid.models.vendor import vendor
from kernelbraid.ops.rope.tables import rope_tables

PHASES = ("prefill", "decode", "recompute", "forward", "backward")
"""The update's forward and backward are those of one optimizer pass over the step's completions."""
PAGE_SIZE = 64
ROUNDS = 5
"""Times that each arm is measured, the arms taking turns; the median counts."""
LEAST_SECONDS = 0.05
"""Of one measurement, as many calls as that takes."""
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Step:
    """Sizes of a training step.

    Raises:
        ValueError: a number is not positive, or a micro-batch does not hold one completion.
    """

    prompt: int = 512
    """Tokens of a prompt."""
    response: int = 2048
    """Tokens of a completion."""
    group: int = 8
    """Completions of a prompt."""
    prompts: int = 8
    micro_tokens: int = 16384
    """Tokens of a packed micro-batch of the update."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.micro_tokens < self.length:
            raise ValueError(
                f"micro_tokens must be at least prompt + response = {self.length}, got {self.micro_tokens}"
            )

    @property
    def length(self) -> int:
        return self.prompt + self.response

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def packed(self) -> int:
        """Completions of a micro-batch."""
        return min(self.completions, self.micro_tokens // self.length)

    @property
    def calls(self) -> Mapping[str, float]:
        """Calls of a layer in a step, by phase."""
        update = self.completions / self.packed
        return {"prefill": 1.0, "decode": float(self.response)} | dict.fromkeys(PHASES[2:], update)


def profile(
    config: ModelConfig,
    step: Step,
    *,
    device: str = "cpu",
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure one layer of a model, with random weights, in every phase.

    Args:
        config: of the model.
        step: sizes of the training step.
        device: `cpu` (float32) or `cuda` (bfloat16; calls that wait for nothing are captured in a graph).
        rounds: measurements of each arm, taking turns; at least 1.
        progress: told what is being measured.

    Returns:
        JSON-able: `step`, `phases` (calls, milliseconds a call by arm, ratio), `seconds` of a step in all
        layers by arm, `recompute_share` of the vendor's, `ceiling` of reuse alone, `speedup` of unified
        kernels with reuse over the vendor's with recompute, `to_ceiling`, their quotient.

    Raises:
        ValueError: the device is not there, or `rounds` is below 1.
        torch.OutOfMemoryError: a phase does not fit: fewer prompts, or smaller micro-batches.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device")
    arms: dict[str, Operators] = {"unified": UNIFIED, "vendor": vendor(device)}
    bench = _Bench(config, step, device)
    phases: dict[str, dict[str, Any]] = {}
    for name in PHASES:
        progress(f"one layer: {name}")
        works = {arm: bench.work(name, operators) for arm, operators in arms.items()}
        graph = {arm: name == "decode" and not operators.waits for arm, operators in arms.items()}
        ms = _measured(works, graph, device, rounds)
        phases[name] = {"calls": step.calls[name], "ms": ms, "ratio": ms["vendor"] / ms["unified"]}
        del works
        gc.collect()
    about = {"device": _device_name(device), "step": asdict(step), "vendor": arms["vendor"].arithmetic}
    return _summary(config, step, phases) | about


def kept(found: Mapping[str, Any], folder: Path, device: str) -> Path:
    """Write a profile as a row of `<folder>/<architecture>/profile.bench.json`; returns the file.

    It replaces a row of the same model and step; others of the same sources, device and versions stay.

    Args:
        found: what `profile` returned, with the model's name under `model`.
        folder: where committed evidence lives.
        device: that it was measured on.
    """
    document = evidence.stamp("profile", device)
    key = (found["model"], found["step"])
    rows = [row for row in evidence.kept(document, folder) if (row["model"], row["step"]) != key]
    document["rows"] = [*rows, dict(found)]
    return evidence.write(document, folder)


def _summary(config: ModelConfig, step: Step, phases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the phases amount to."""

    def seconds(arm: str, names: Sequence[str]) -> float:
        return float(config.layers * sum(phases[n]["calls"] * phases[n]["ms"][arm] for n in names) / 1e3)

    whole = seconds("vendor", PHASES)
    recompute = seconds("vendor", ("recompute",))
    reused = [name for name in PHASES if name != "recompute"]
    ceiling = whole / (whole - recompute)
    speedup = whole / seconds("unified", reused)
    return {
        "layers": config.layers,
        "phases": {name: dict(found) for name, found in phases.items()},
        "seconds": {"vendor+recompute": whole, "unified+reuse": seconds("unified", reused)},
        "recompute_share": recompute / whole,
        "ceiling": ceiling,
        "speedup": speedup,
        "to_ceiling": speedup / ceiling,
    }


class _Bench:
    """Inputs of every phase, drawn once: both arms compute on the same ones."""

    def __init__(self, config: ModelConfig, step: Step, device: str) -> None:
        self.config, self.step, self.device = config, step, device
        self.dtype = DTYPES[device]
        small = config.small(layers=1, vocab=64)
        self.weights: LayerWeights = drawn(small, dtype=self.dtype, device=device).layers[0]
        tables = rope_tables(config.head_dim, step.length, config.rope_theta, scaling=config.rope_scaling)
        self.tables = RopeTables(*(table.to(device) for table in tables))
        self.generator = torch.Generator(device).manual_seed(0)

    def work(self, phase: str, operators: Operators) -> Work:
        """One call of the layer in a phase."""
        if phase == "prefill":
            return self._paged(operators, self.step.prompts, self.step.prompt, self.step.prompt)
        if phase == "decode":
            middle = self.step.prompt + max(1, self.step.response // 2)
            return self._paged(operators, self.step.completions, 1, middle)
        return self._packed(operators, phase)

    def _paged(self, operators: Operators, requests: int, rows: int, keys: int) -> Work:
        """New rows of requests that have so many keys with them, in a paged cache in shuffled order."""
        columns = -(-keys // PAGE_SIZE)
        pages = requests * columns
        order = torch.randperm(pages, generator=self.generator, device=self.device)
        host = Paged(
            page_table=order.to("cpu", torch.int32).view(requests, columns),
            cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32) * rows,
            seqlens_k=torch.full((requests,), keys, dtype=torch.int32),
            max_seqlen_q=rows,
            max_seqlen_k=keys,
        )
        batch = host.to(self.device)
        shape = (pages, PAGE_SIZE, self.config.kv_heads, self.config.head_dim)
        caches = self._normal(*shape), self._normal(*shape)
        x, residual = (self._normal(requests * rows, self.config.hidden) for _ in range(2))
        positions = paged_positions(batch, requests * rows)
        operators.plan(self.config.query_heads, caches[0], batch, host, fixed=True)
        attend = attend_paged(self.config, self.weights, self.tables, *caches, batch, positions, operators)

        def work() -> object:
            with torch.no_grad():
                return layer(self.config, self.weights, x, residual, attend, operators)

        return work

    def _packed(self, operators: Operators, phase: str) -> Work:
        """A micro-batch of the update: without gradients, recording them, or only their backward pass."""
        tokens = self.step.packed * self.step.length
        ends = torch.arange(self.step.packed + 1, dtype=torch.int32, device=self.device) * self.step.length
        batch = Packed(packed_positions(ends, tokens), ends, self.step.length)
        x, residual, dout = (self._normal(tokens, self.config.hidden) for _ in range(3))
        weights, recording = self.weights, phase != "recompute"
        if recording:
            weights = LayerWeights(**{n: t.detach().clone() for n, t in self.weights.tensors().items()})
        leaves = [x, residual, *weights.tensors().values()]
        if recording:
            for leaf in leaves:
                leaf.requires_grad_()
        attend = attend_packed(self.config, weights, self.tables, batch, operators)

        def forward() -> tuple[Tensor, Tensor]:
            with torch.set_grad_enabled(recording):
                return layer(self.config, weights, x, residual, attend, operators)

        if phase != "backward":
            return forward
        out = forward()
        return lambda: torch.autograd.grad(out, leaves, (dout, dout), retain_graph=True)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)


def _measured(
    works: Mapping[str, Work], graph: Mapping[str, bool], device: str, rounds: int
) -> dict[str, float]:
    """Milliseconds of one call of each arm: the median of rounds in which the arms take turns."""
    runs = {arm: _graphed(work) if device == "cuda" and graph[arm] else work for arm, work in works.items()}
    clock = _device_seconds if device == "cuda" else _host_seconds
    calls: dict[str, int] = {}
    for arm, run in runs.items():
        run()  # compiles
        calls[arm] = max(1, round(LEAST_SECONDS / max(clock(run, 1), 1e-6)))
    found: dict[str, list[float]] = {arm: [] for arm in runs}
    for _ in range(rounds):
        for arm, run in runs.items():
            found[arm].append(clock(run, calls[arm]) / calls[arm])
    return {arm: 1e3 * statistics.median(seconds) for arm, seconds in found.items()}


def _graphed(work: Work) -> Work:
    """The same call as a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _host_seconds(run: Work, calls: int) -> float:
    with _without_collection():
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start


def _device_seconds(run: Work, calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection in what is measured."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _device_name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    from kernelbraid.ops.installed import cpu_model

    return cpu_model()
