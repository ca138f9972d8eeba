"""The verb that draws completions from a model."""

from pathlib import Path
from typing import Annotated

import typer

from kernelbraid.cli.application import Device, Json, app, emit, out, say


@app.command()
def rollout(
    model: Annotated[
        str, typer.Argument(help="A model's folder or GGUF file; or a model's name, for random weights.")
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="One prompt a line.", metavar="FILE")] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Length of a prompt of random tokens; may be repeated.", min=1)
    ] = None,
    samples: Annotated[int, typer.Option(help="Completions of each prompt.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Of a completion.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string to stop at; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Completions drawn at a time.", min=1)] = 16,
    step_tokens: Annotated[int, typer.Option(help="The most tokens of a step.", min=1)] = 512,
    cache_tokens: Annotated[int, typer.Option(help="Tokens that the cache holds.", min=1)] = 8192,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Draw completions and tell how fast, prefill and decode apart; compiling is not counted."""
    from kernelbraid.report import table
    from kernelbraid.rl.records import Sampling
    from kernelbraid.rl.requests import EngineSettings
    from kernelbraid.rl.speed import Asked, read_prompts, roll_out

    texts = [*(prompt or []), *(read_prompts(prompts) if prompts is not None else [])]
    settings = EngineSettings(
        cache_tokens=cache_tokens, max_sequences=concurrency, step_tokens=step_tokens, seed=seed
    )
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, stop=tuple(stop or ()))
    asked = Asked(model, tuple(texts), tuple(length or ()), samples, sampling, settings, device)
    document = roll_out(asked, say)
    if as_json:
        emit(document)
        return
    for each in document.pop("completions"):
        if each["text"] is not None:
            say(f"[{each['prompt']}.{each['sample']}, {each['finish']}] {each['text']}")
    table.facts(out(), "", {name: value for name, value in document.items() if name != "batch_sizes"})
