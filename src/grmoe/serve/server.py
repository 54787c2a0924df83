"""Loads a model, listens on a port, and answers until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import sys
import time
from dataclasses import replace
from shlex import quote
from types import FrameType
from typing import Any, cast

import torch
import uvicorn

from grmoe.checks import require
from grmoe.runs.folder import CONFIG, dialled_model
from grmoe.runs.missing import not_a_model
from grmoe.runs.open import open_model
from grmoe.serve.app import build, log, show_alphas
from grmoe.serve.batching import BatchGenerator, why_not_batch
from grmoe.serve.chat import ChatTemplate
from grmoe.serve.connections import Config, Connection
from grmoe.serve.engine import Engine
from grmoe.serve.graphs import SHORTEST, GraphGenerator
from grmoe.serve.options import Options
from grmoe.serve.service import Service

_LAST_WORDS = 1.0  # seconds in which clients can read why their request ended
_OTHER_FILES = 256  # beside connections: the model's, sockets, pipes
DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


def serve(options: Options) -> None:
    """Answer requests until SIGTERM or SIGINT. The port is taken before the model is loaded."""
    with bind(options.host, options.port) as sock:
        run(make_service(options), sock)


def make_service(options: Options) -> Service:
    """Load the model and put it behind an engine, which is not started yet."""
    folder = options.folder
    if (folder / CONFIG).is_file():
        written = dialled_model(folder)
        export = f"export it first: grmoe export {quote(str(folder))} --out MODEL && grmoe serve MODEL"
        serve = f"serve the model that was dialled: grmoe serve {quote(str(written))}"
        raise ValueError(f"{folder} is a run; {serve if written else export}")
    require((folder / "config.json").is_file(), not_a_model(folder))
    # Only safetensors: a pickled file can run code.
    require(
        any(folder.glob("*.safetensors")),
        f"{folder} must be a folder of `grmoe export`: it holds no model.safetensors",
    )
    loaded = open_model(folder, alpha=options.alpha, dtype=DTYPES[options.dtype], budget=options.budget)
    alone = why_not_batch(loaded.model)
    require(not (options.together and alone), f"{alone}: leave out --together")
    require(not (options.graphs and alone), f"{alone}: leave out --graphs")
    together = loaded.model.dtype == torch.float32 if options.together is None else options.together
    generator = (
        GraphGenerator(loaded.model, options.concurrency)
        if options.graphs
        else BatchGenerator(loaded.model, together and not alone)
    )
    engine = Engine(generator, concurrency=options.concurrency, queue=options.queue)
    loaded.tokenizer("warm")  # builds the tokenizer's lazy state before threads share it
    return Service(
        name=options.name or folder.resolve().name,
        engine=engine,
        tokenizer=loaded.tokenizer,
        options=options,
        template=_chat_template(loaded.tokenizer, options),
    )


def _chat_template(tokenizer: Any, options: Options) -> ChatTemplate | None:
    if not tokenizer.chat_template:
        return None
    # A tokenizer can have several templates; this is the one that transformers takes.
    template, variables = tokenizer.get_chat_template(), tokenizer.special_tokens_map
    return ChatTemplate(template, variables, options.timeout, options.template_timeout)


def bind(host: str, port: int) -> socket.socket:
    """Take the address. Connections are refused until the server listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    sock.set_inheritable(True)
    return sock


class Server(uvicorn.Server):
    """On a signal it takes no new requests, finishes the running ones within the grace, and ends with status 0."""

    def __init__(self, service: Service) -> None:
        super().__init__(Config(build(service), service.options))
        self.service = service
        service.connections = lambda: len(self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.engine.close("the server is shutting down")
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        for line in _describe(self.service, *sockets[0].getsockname()[:2]):  # now, because now it listens
            log.info(line)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        hurry = asyncio.create_task(self._end_what_is_left())
        await super().shutdown(sockets)
        hurry.cancel()
        if self.service.template is not None:
            await self.service.template.close()
        await asyncio.to_thread(self.service.engine.stop)

    async def _end_what_is_left(self) -> None:
        """When the grace is over: requests end with an error message, then connections that still stand are cut."""
        await asyncio.sleep(self.service.options.grace)
        if self.service.template is not None:
            await self.service.template.close()
        await asyncio.to_thread(self.service.engine.stop)
        await asyncio.sleep(_LAST_WORDS)
        for connection in list(self.server_state.connections):
            cast(Connection, connection).drop()


def run(service: Service, sock: socket.socket) -> None:
    """Start the engine and answer until SIGTERM or SIGINT."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    _capture(service.engine.generator)
    # uvicorn raises a signal again after it has handled it. Nothing is left to do then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    connections = _fit_connections(service.options.connections)
    service.options = replace(service.options, connections=connections)
    service.engine.start()
    Server(service).run(sockets=[sock])
    log.info("stopped")


def _capture(generator: BatchGenerator) -> None:
    """Capture the graphs that every answer begins with. The first requests then need not wait for them."""
    if isinstance(generator, GraphGenerator) and generator.captures:
        log.info(f"capturing CUDA graphs for answers over up to {SHORTEST} positions")
        start = time.monotonic()
        count = generator.capture([SHORTEST])
        log.info(f"captured {count} CUDA graphs in {time.monotonic() - start:.1f} s")


def _fit_connections(wanted: int) -> int:
    """Each connection is an open file. Raise the process's limit to what is needed; return what is possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else max(hard, soft)
    connections = max(1, min(wanted, most - _OTHER_FILES))
    if resource.RLIM_INFINITY != soft < connections + _OTHER_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, connections + _OTHER_FILES), hard))
    if connections < wanted:
        log.info(f"at most {connections} connections, not {wanted}: this process may open {most} files")
    return connections


def _describe(service: Service, host: str, port: int) -> list[str]:
    """What the log says at the start."""
    options, generator = service.options, service.engine.generator
    low, high = options.alpha_range
    how = "in batches, {} at a time" if generator.together else "one by one, {} in turn"
    config = service.config
    budgets = ""
    if config.budget_range is not None:
        now = "as trained" if config.budget is None else f"{config.budget:g}"
        budgets = " budget {} (requests: {:g} to {:g}),".format(now, *config.budget_range)
    lines = [
        f"{service.name} on http://{host}:{port}/v1: alpha {show_alphas(n.alpha for n in config.numbers)}"
        f" (requests: {low:g} to {high:g}),{budgets} {generator.model.dtype}, "
        f"computed {how.format(options.concurrency)}, up to {options.queue} waiting"
    ]
    if options.api_key is None and not host.startswith("127.") and host != "::1":
        lines.append("no key is set: everyone who reaches this address is answered; set GRMOE_API_KEY")
    if generator.together and not generator.repeat_ties:
        lines.append("batches round differently: answers may differ from those of single requests")
    return lines
