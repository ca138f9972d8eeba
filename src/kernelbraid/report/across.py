"""The relations across operators, layer by layer and in whole models, as documents and tables."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from kernelbraid.report.grid import Grid
from kernelbraid.report.table import line

KINDS = ("layer", "model")
"""Words in the place of an operator's name: one layer of models, or whole models."""

TOKENS = 256
"""Drawn after each prompt of a whole model."""

PROMPTS = (37, 5, 100, 64)


def across(
    words: Sequence[str], device: str, weights: Path | None, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Check `layer`, of the named models or of all, or `model NAME`, in real shapes.

    Args:
        words: `layer` or `model`, then names of models.
        device: `cpu` or `cuda`.
        weights: a model's file or folder, for `model`; random weights otherwise.
        progress: told what is being checked.

    Raises:
        ValueError: an unknown model, or none for `model`.
    """
    import torch

    from kernelbraid.models import config, load, relations
    from kernelbraid.models.model import Decoder

    kind, *names = words
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if kind == "model" and not names and weights is None:
        raise ValueError(f"name a model or give --weights; models are {', '.join(config.NAMED)}")
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()

    def keep(model: str, findings: Iterable[relations.Finding]) -> None:
        for found in findings:
            rows.append({"model": model, **asdict(found), "held": found.held})
            progress(f"{model}: {found.relation}, {found.comparisons:,} compared, {found.unequal:,} unequal")

    if kind == "layer":
        for name in names or config.NAMED:
            keep(name, relations.check_layer(config.named(name), dtype=dtype, device=device))
    elif weights is not None:
        model = load.load(weights, dtype=dtype, device=device, positions=2048)
        keep(names[0] if names else weights.name, _whole(model))
    else:
        for name in names:
            sizes = config.named(name)
            keep(name, _whole(Decoder(sizes, load.drawn(sizes, dtype=dtype, device=device), 2048)))
    return {
        "kind": kind,
        "device": device,
        "relations": rows,
        "held": all(row["held"] for row in rows),
        "comparisons": sum(row["comparisons"] for row in rows),
        "unequal": sum(row["unequal"] for row in rows),
        "seconds": time.perf_counter() - start,
    }


def _whole(model: Any) -> Iterable[Any]:
    from kernelbraid.models import relations

    yield from relations.check_model(model)
    device = str(model.weights.norm.device)
    prompts = relations.sequences_of(model.config, PROMPTS, seed=3, device=device)
    yield relations.check_generation(model, prompts, TOKENS)


def show(console: Console, document: dict[str, Any]) -> None:
    """One line a relation of a model."""
    grid = Grid(f"across operators, {document['kind']}, {document['device']}",
                ("model", "relation", "comparisons", "unequal", "held"))  # fmt: skip
    for row in document["relations"]:
        cells = [row[name] for name in ("model", "relation", "comparisons", "unequal")]
        grid.add(*cells, "yes" if row["held"] else "NO")
    grid.show(console)
    for row in document["relations"]:
        if row["unequal"]:
            line(console, f"{row['model']}, {row['relation']}: first in {row['first']}")
    counts = f"{document['comparisons']:,} comparisons, {document['unequal']:,} unequal"
    line(console, f"{counts}, {document['seconds']:.1f} s")
