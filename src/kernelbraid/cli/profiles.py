"""The verb that measures one layer of a model in every phase of a training step."""

from pathlib import Path
from typing import Annotated

import typer

from kernelbraid.cli.application import Device, Json, app, emit, out, say


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="Name of a model; its weights are random.")],
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 512,
    response: Annotated[int, typer.Option(help="Tokens of a completion.", min=1)] = 2048,
    group: Annotated[int, typer.Option(help="Completions of a prompt.", min=1)] = 8,
    prompts: Annotated[int, typer.Option(help="Prompts of a step.", min=1)] = 8,
    micro_tokens: Annotated[int, typer.Option(help="Tokens of a packed micro-batch.", min=1)] = 16384,
    write: Annotated[
        Path | None,
        typer.Option(help="Also write FOLDER/<architecture>/profile.bench.json.", metavar="FOLDER"),
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure one layer in prefill, decode, recompute, forward and backward beside torch's kernels."""
    from kernelbraid.models.config import named
    from kernelbraid.models.profile import Step, kept
    from kernelbraid.models.profile import profile as measure
    from kernelbraid.report import table

    step = Step(prompt, response, group, prompts, micro_tokens)
    document = {"model": model, **measure(named(model), step, device=device, progress=say)}
    if write is not None:
        say(f"wrote {kept(document, write, device)}")
    if as_json:
        emit(document)
    else:
        table.profile(out(), document)
