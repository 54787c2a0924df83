"""A model behind HTTP: `grmoe serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from grmoe.terminal import fail, need


def serve(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of `grmoe export`.")],
    alpha: Annotated[
        float | None,
        typer.Option(
            min=0, help="The dial where a request names none.", show_default="as saved with the model"
        ),
    ] = None,
    alpha_range: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="What a request may ask for.")
    ] = "0.5:5",
    host: Annotated[
        str, typer.Option(help="Address; 0.0.0.0 is every network of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    dtype: Annotated[str, typer.Option(help="auto (as saved), fp32 or bf16; routers are fp32.")] = "auto",
    together: Annotated[
        bool | None,
        typer.Option(
            "--together/--alone",
            help="Compute answers in one batch, or each by itself in turns.",
            show_default="together in fp32, where near ties are computed again alone",
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers in the making at a time.")] = 16,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get a 429.")] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an answer.", show_default="the context")
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt.", show_default="the context")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 1 << 20,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds a request may take, queue and all.")
    ] = 120,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running answers after SIGTERM.")] = 10,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="GRMOE_API_KEY",
            show_envvar=True,
            help="Asked of every request; better in the environment, for `ps` shows arguments.",
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP in OpenAI's protocol, with alpha in the request.

    POST /v1/completions and /v1/chat/completions, whole or streamed; GET /v1/models, /health, /ready, /metrics. Each
    request may set "alpha": clients with different budgets share one set of weights, and every answer is the one that
    generate gives for it alone at that alpha. Code in the model's folder is never run.

    Example: [bold]grmoe serve my-model --alpha 1.5 --alpha-range 0.5:5[/]

    Then: [bold]curl localhost:8000/v1/completions -H 'content-type: application/json'
    -d '{"prompt": "def main(", "max_tokens": 32, "temperature": 0, "alpha": 2}'[/]
    """
    need("transformers", "safetensors", extra="lm")
    need("uvicorn", "starlette", "pydantic", extra="serve")
    import torch
    from transformers.utils import logging

    from grmoe.serve.command import Options, bind, make_service
    from grmoe.serve.command import serve as run
    from grmoe.serve.settings import parse_range

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    dtypes = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype not in dtypes:
        fail(f"dtype must be auto, fp32 or bf16, got {escape(dtype)}")
    try:
        options = Options(
            folder=folder,
            alpha=alpha,
            alpha_range=parse_range(alpha_range),
            dtype=dtypes[dtype],
            together=together,
            prompt_tokens=max_prompt,
            max_tokens=max_tokens,
            body_bytes=max_body,
            concurrency=concurrency,
            queue=queue,
            timeout=timeout,
            grace=grace,
            api_key=api_key or None,
        )
        with bind(host, port) as sock:
            run(make_service(options), sock)
    except ValueError as error:
        fail(escape(str(error)))
