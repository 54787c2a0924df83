"""A model behind HTTP: `grmoe serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli.shell import shell
from grmoe.serve.options import Options, parse_range


def serve(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of an exported model, or RUN/dial/model.")
    ],
    name: Annotated[
        str | None,
        typer.Option(help="The model's id in requests and answers.", show_default="the folder's name"),
    ] = Options.name,
    alpha: Annotated[
        float | None,
        typer.Option(min=0, help="α for requests that name none.", show_default="as saved with the model"),
    ] = Options.alpha,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Experts per token for requests that name neither a budget nor an α.",
            show_default="as saved with the model",
        ),
    ] = Options.budget,
    alpha_range: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Values of α that a request may ask for.")
    ] = "{:g}:{:g}".format(*Options.alpha_range),
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every network of this machine.")
    ] = Options.host,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = Options.port,
    dtype: Annotated[
        str, typer.Option(help="auto (as saved), fp32 or bf16; routers stay in fp32.")
    ] = Options.dtype,
    together: Annotated[
        bool | None,
        typer.Option(
            "--together/--alone",
            help="Compute requests in one batch, or each by itself in turns.",
            show_default="together in fp32, where near ties are computed again alone",
        ),
    ] = Options.together,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs/--no-graphs",
            help="Decode by CUDA graphs, for speed on a GPU. Implies --together, and near ties are not computed again.",
        ),
    ] = Options.graphs,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Answers computed at the same time.")
    ] = Options.concurrency,
    queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; the next one gets a 429.")
    ] = Options.queue,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "--max-tokens",
            min=1,
            help="Most tokens per answer; requests ask for up to this many with max_tokens.",
            show_default="the context",
        ),
    ] = Options.max_new_tokens,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens per prompt.", show_default="the context")
    ] = Options.max_prompt,
    max_choices: Annotated[
        int, typer.Option(min=1, help="Answers per request: its prompts times n.")
    ] = Options.max_choices,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes per request.")] = Options.max_body,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds per request, time in the queue included.")
    ] = Options.timeout,
    template_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that the chat template may take for one chat.")
    ] = Options.template_timeout,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have after SIGTERM.")
    ] = Options.grace,
    connections: Annotated[
        int, typer.Option(min=1, help="Open connections; one more closes the one that is silent longest.")
    ] = Options.connections,
    header_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds that a client may take to send the headers of a request."),
    ] = Options.header_timeout,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another host name that requests may use, such as that of a proxy; * allows all. Repeatable.",
            show_default="the address and localhost",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Web pages that may use the server, such as http://localhost:3000; * allows all. Repeatable.",
            show_default="no web page",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="GRMOE_API_KEY",
            show_envvar=True,
            help="Key that every request must carry. Use the environment variable: `ps` shows arguments.",
        ),
    ] = Options.api_key,
) -> None:
    """Serve a model over HTTP in OpenAI's protocol, with a budget or α in the request.

    POST /v1/completions and /v1/chat/completions, whole or streamed, with n, logprobs and several prompts; GET
    /v1/models, /health, /ready, /metrics. Each request may set "budget", in experts per token, or "alpha", so clients
    with different budgets share one set of weights. Every answer equals what generate gives for that request alone at
    that setting. Code in the model's folder is never run.

    Example: [bold]grmoe serve my-model --name my-org/my-model --alpha 1.5 --alpha-range 0.5:5[/]

    Then: [bold]curl localhost:8000/v1/completions -H 'content-type: application/json'
    -d '{"prompt": "def main(", "max_tokens": 32, "temperature": 0, "alpha": 2}'[/]
    """
    with shell("lm", "serve"):
        from grmoe.serve import serve as run

        options = Options(
            folder=folder, name=name, host=host, port=port, alpha=alpha, budget=budget,
            alpha_range=parse_range(alpha_range), dtype=dtype, together=together, graphs=graphs,
            concurrency=concurrency, queue=queue, max_new_tokens=max_new_tokens, max_prompt=max_prompt,
            max_choices=max_choices, max_body=max_body, timeout=timeout, template_timeout=template_timeout, grace=grace,
            connections=connections, header_timeout=header_timeout, allowed_hosts=tuple(allow_host or ()),
            allowed_origins=tuple(allow_origin or ()), api_key=api_key or None,
        )  # fmt: skip
        run(options)
