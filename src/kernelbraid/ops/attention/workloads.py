"""Attention's workloads: grids that benchmarks and studies time, and heads that a verification covers."""

from kernelbraid.contract import Regime, Workload


def _workload(
    phase: Regime,
    heads: tuple[int, int, int],
    length: int | tuple[int, ...],
    *,
    query: int | tuple[int, ...] | None = None,
    batch: int | None = None,
    page: int = 16,
    weight: float = 1.0,
) -> Workload:
    """A workload of `batch` requests with `length` keys and `query` rows each (None: the phase's usual)."""
    if batch is None:
        batch = len(length) if isinstance(length, tuple) else 1
    axes: list[tuple[str, int | tuple[int, ...]]] = [("batch", batch), ("length", length)]
    if query is not None:
        axes.append(("query_length", query))
    axes += [("page_size", page), ("query_heads", heads[0]), ("kv_heads", heads[1]), ("head_dim", heads[2])]
    return Workload(phase, tuple(axes), weight)


def _spread(count: int, low: int, high: int) -> tuple[int, ...]:
    """`count` lengths from low to high, evenly spread, in an order that mixes short and long."""
    step = next(s for s in (7, 5, 3, 11, 13) if count % s)
    return tuple(low + (high - low) * (i * step % count) // max(count - 1, 1) for i in range(count))


SMOLLM2_135M = (9, 3, 64)
QWEN3_8B = (32, 8, 128)
SCOPES = ((2, 2, 128), (6, 2, 128), (5, 1, 64), (6, 1, 64), (7, 1, 128), (14, 2, 64), (8, 1, 64))
"""Query heads, KV heads, head_dim of other verified models: groups of 1, 3, 5, 6, 7 and 8 query heads."""


def _study_grid() -> tuple[Workload, ...]:
    """One GRPO step of SmolLM2-135M (30 layers, 9/3 heads, head_dim 64), weights in attention calls per step.

    16 prompts of about 200 tokens, 4 samples each, responses of about 300 tokens: 64 completions.
    - prefill: each prompt once, its samples share the pages: 8 prompts are there at the start, in 2 calls of
      4: 2 x 30 layers = 60 calls.
    - chunked prefill: the other 8 come in while 12 requests decode, in pieces of 128 rows, 2 a prompt on
      average: 16 x 30 = 480 calls, measured on the last piece of a long prompt.
    - decode: 64 completions at batch 16 are 4 waves of 300 steps: 4 x 300 x 30 = 36000 calls, a third each
      with young, mixed and grown contexts.
    - update: 64 completions in micro-batches of 4 packed sequences are 16 forward passes, and as many again
      for recomputation under gradient checkpointing: 32 x 30 = 960 calls. Their backward passes are not
      timed: gradients are checked in every audit, and have a grid of their own.
    """
    layers = 30
    prompt_pieces = (384, *_spread(12, 150, 450))
    return (
        _workload("prefill", SMOLLM2_135M, (160, 190, 210, 240), weight=2 * layers),
        _workload(
            "chunked_prefill", SMOLLM2_135M, prompt_pieces, query=(128,) + (1,) * 12, weight=16 * layers
        ),
        _workload("decode", SMOLLM2_135M, _spread(16, 100, 320), weight=400 * layers),
        _workload("decode", SMOLLM2_135M, _spread(16, 100, 600), weight=400 * layers),
        _workload("decode", SMOLLM2_135M, _spread(16, 300, 600), weight=400 * layers),
        _workload("update", SMOLLM2_135M, (250, 330, 410, 520), weight=32 * layers),
    )


def _published_grid() -> tuple[Workload, ...]:
    """The 32 cells with published times of a unified attention: 32/8 heads, head_dim 128, uniform lengths."""
    cells: tuple[tuple[Regime, tuple[int, ...]], ...] = (
        ("prefill", (1024, 4096, 8192, 16384)),
        ("decode", (128, 1024, 4096, 8192)),
    )
    return tuple(
        _workload(phase, QWEN3_8B, n, batch=b)
        for phase, lengths in cells
        for b in (1, 4, 8, 16)
        for n in lengths
    )


GRIDS = {
    "study": _study_grid(),
    "cpu-prefill": tuple(
        _workload(phase, heads, n)
        for phase in ("prefill", "update")
        for heads in (SMOLLM2_135M, QWEN3_8B)
        for n in (1024, 2048)
    ),
    "cpu-decode": (
        *(_workload("decode", SMOLLM2_135M, _spread(b, 100, 2000)) for b in (16, 32, 64)),
        *(_workload("decode", SMOLLM2_135M, _spread(b, 100, 600)) for b in (16, 64)),
        *(_workload("decode", QWEN3_8B, _spread(b, 100, 2000)) for b in (16, 32)),
    ),
    "cpu-backward": tuple(
        _workload("backward", heads, lengths)
        for heads in (SMOLLM2_135M, QWEN3_8B)
        for lengths in (512, (250, 330, 410, 520))
    ),
    "published": _published_grid(),
}


def _cuda_study_grid() -> tuple[Workload, ...]:
    """One GPU's GRPO step: heads of Qwen3-8B (36 layers, 32/8 heads, head_dim 128), attention calls a step.

    8 prompts of about 500 tokens, 8 samples each, responses of about 1000 tokens: 64 completions.
    - prefill: 8 prompts in 2 calls of 4: 2 x 36 layers = 72 calls.
    - chunked prefill: other prompts in pieces of 256 rows while 24 requests decode, 4 pieces: 4 x 36 = 144.
    - decode: 64 completions at batch 32 are 2 waves of 1000 steps: 2 x 1000 x 36 = 72000 calls, half each
      with young and with grown contexts.
    - update: micro-batches of 4 packed sequences are 16 forward passes, and as many again under gradient
      checkpointing, 32 x 36 = 1152 calls; their backward passes 16 x 36 = 576.
    """
    layers = 36
    packed = (1100, 1350, 1600, 1950)
    return (
        _workload("prefill", QWEN3_8B, (380, 450, 520, 640), weight=2 * layers),
        _workload(
            "chunked_prefill",
            QWEN3_8B,
            (512, *_spread(24, 500, 1500)),
            query=(256,) + (1,) * 24,
            weight=4 * layers,
        ),
        _workload("decode", QWEN3_8B, _spread(32, 400, 1100), weight=1000 * layers),
        _workload("decode", QWEN3_8B, _spread(32, 900, 2000), weight=1000 * layers),
        _workload("update", QWEN3_8B, packed, weight=32 * layers),
        _workload("backward", QWEN3_8B, packed, weight=16 * layers),
    )


def _cuda_packed_grid() -> tuple[Workload, ...]:
    """One sequence of 1K to 16K tokens, and 4 to 32 ragged ones."""
    ragged = ((4, 4096), (8, 4096), (16, 2048), (32, 3200))
    return (
        *(_workload("update", QWEN3_8B, n) for n in (1024, 2048, 4096, 8192, 16384)),
        *(_workload("update", QWEN3_8B, _spread(count, 200, longest)) for count, longest in ragged),
    )


def _cuda_backward_grid() -> tuple[Workload, ...]:
    sequences = ((1024, 1), (4096, 1), (8192, 1), (16384, 1), (1024, 16), (4096, 4))
    ragged = (_spread(16, 200, 2048), _spread(32, 200, 3200))
    return (
        *(_workload("backward", QWEN3_8B, n, batch=b) for n, b in sequences),
        *(_workload("backward", QWEN3_8B, n) for n in ragged),
        _workload("backward", (14, 2, 64), 4096),
    )


def _cuda_paged_grid() -> tuple[Workload, ...]:
    """Decode and prefill of the published cells, pages of 16 and 64."""
    decode = [(b, n) for b in (1, 4, 8, 16) for n in (128, 1024, 4096, 8192)]
    return (
        *(_workload("decode", QWEN3_8B, n, batch=b, page=page) for page in (16, 64) for b, n in decode),
        *(_workload("prefill", QWEN3_8B, n, page=page) for page in (16, 64) for n in (1024, 4096, 16384)),
    )


def _cuda_large_grid() -> tuple[Workload, ...]:
    """Batches to 1024 and contexts to 131072."""
    cells = ((32, 2048), (64, 2048), (128, 2048), (256, 1024), (512, 512), (1024, 256))
    long = ((1, 32768), (8, 32768), (1, 131072), (4, 131072))
    return tuple(_workload("decode", QWEN3_8B, n, batch=b) for b, n in cells + long)


def _cuda_heads_grid() -> tuple[Workload, ...]:
    """Every listed ratio of query to KV heads, both head sizes."""
    models: tuple[tuple[int, int, int], ...] = (SMOLLM2_135M, QWEN3_8B, *SCOPES)
    return tuple(
        workload
        for heads in models
        for workload in (
            _workload("update", heads, 2048),
            _workload("decode", heads, 2048, batch=16),
            _workload("backward", heads, 2048),
        )
    )


CUDA_GRIDS = {
    "study": _cuda_study_grid(),
    "published": _published_grid(),
    "packed": _cuda_packed_grid(),
    "paged": _cuda_paged_grid(),
    "decode-large": _cuda_large_grid(),
    "backward": _cuda_backward_grid(),
    "heads": _cuda_heads_grid(),
}
