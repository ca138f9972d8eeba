"""Verbs and options of proposers that think: language models and agents."""

from typing import Annotated

import typer

from kernelbraid.cli.application import StudyFolder, app

ModelName = Annotated[
    str | None,
    typer.Option("--model", help="llm: the model's name at its endpoint.", envvar="KERNELBRAID_MODEL"),
]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        help="llm: address of an OpenAI-compatible endpoint, such as http://localhost:8000/v1; default: "
        "the vendor's.",
        envvar="KERNELBRAID_BASE_URL",
        metavar="URL",
    ),
]
OtherModel = Annotated[str | None, typer.Option("--model", help="llm: go on with another model.")]
OtherUrl = Annotated[
    str | None, typer.Option("--base-url", help="llm: go on at another address.", metavar="URL")
]
Api = Annotated[
    str | None,
    typer.Option(
        help="llm: openai (chat completions) or anthropic (messages); default: by model and address."
    ),
]
KeyVariable = Annotated[
    str | None,
    typer.Option(
        help="llm: environment variable that holds the key; default: OPENAI_API_KEY or ANTHROPIC_API_KEY, "
        "with --base-url KERNELBRAID_API_KEY.",
        metavar="NAME",
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(help="llm: tokens of all calls together, read and written.", min=1)
]
MaxMoney = Annotated[float | None, typer.Option(help="llm: US dollars of all calls together.")]
PriceIn = Annotated[
    float | None,
    typer.Option(help="llm: US dollars for a million tokens read; default: the list price, if known."),
]
PriceOut = Annotated[float | None, typer.Option(help="llm: US dollars for a million tokens written.")]
Evidence = Annotated[
    str, typer.Option(help="llm: full, or none: the model sees the contract and one parent's source alone.")
]
ProposerCalls = Annotated[
    int | None, typer.Option(help="Times that the proposer is asked for candidates.", min=1)
]
ExecutorName = Annotated[
    str,
    typer.Option(
        "--executor",
        help="Where audits run: local, ray (a Ray cluster: RAY_ADDRESS, or one made here) or ray:ADDRESS.",
        metavar="WHERE",
    ),
]
AuditCommandTemplate = Annotated[
    str | None,
    typer.Option(
        "--audit-command",
        help="Audit by this shell command, such as 'ssh gpu kernelbraid audit run {job} -o {results}'; "
        "{minutes} is the time limit.",
        metavar="TEMPLATE",
    ),
]


@app.command()
def mcp(
    study: StudyFolder,
    http: Annotated[bool, typer.Option("--http", help="Serve http://HOST:PORT/mcp, not stdio.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen at; nobody has to log in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=1, max=65535)] = 8765,
    by: Annotated[str, typer.Option(help="Who submits and decides, where a call does not say.")] = "mcp",
    audit_command: AuditCommandTemplate = None,
    executor: ExecutorName = "local",
) -> None:
    """Let coding agents drive a study: an MCP server over stdio or HTTP."""
    from kernelbraid.cli.application import say
    from kernelbraid.integrations import mcp as integration
    from kernelbraid.search.audits import runner

    made = integration.server(study, by=by, files=not http, run_job=runner(audit_command, executor))
    if http:
        say(f"serving {study} at http://{host}:{port}/mcp; Ctrl-C ends")
        integration.serve_http(made, host, port)
    else:
        made.run()
