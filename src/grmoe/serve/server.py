"""Loads a model, listens on a port, and answers until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType

import torch
import uvicorn

from grmoe.checks import require
from grmoe.runs.folder import CONFIG
from grmoe.runs.open import open_model
from grmoe.serve.app import Service, build, log, show_alphas
from grmoe.serve.batching import BatchGenerator, why_not_batch
from grmoe.serve.engine import Engine
from grmoe.serve.options import Options

DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


def serve(options: Options) -> None:
    """Answer requests until SIGTERM or SIGINT. The port is taken before the model is loaded."""
    with bind(options.host, options.port) as sock:
        run(make_service(options), sock)


def make_service(options: Options) -> Service:
    """Load the model and put it behind an engine, which is not started yet."""
    folder = options.folder
    require(
        not (folder / CONFIG).is_file(),
        f"{folder} is a run; export it first: grmoe export {folder} --out MODEL && grmoe serve MODEL",
    )
    # Only safetensors: a pickled file can run code.
    require(
        any(folder.glob("*.safetensors")),
        f"{folder} must be a folder of `grmoe export`: it holds no model.safetensors",
    )
    loaded = open_model(folder, alpha=options.alpha, dtype=DTYPES[options.dtype], budget=options.budget)
    alone = why_not_batch(loaded.model)
    require(not (options.together and alone), f"{alone}: leave out --together")
    together = loaded.model.dtype == torch.float32 if options.together is None else options.together
    generator = BatchGenerator(loaded.model, together and not alone)
    engine = Engine(generator, concurrency=options.concurrency, queue=options.queue)
    loaded.tokenizer("warm")  # builds the tokenizer's lazy state before threads share it
    return Service(name=folder.resolve().name, engine=engine, tokenizer=loaded.tokenizer, options=options)


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

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.engine.close("the server is shutting down")
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        for line in _describe(self.service, *sockets[0].getsockname()[:2]):  # now, because now it listens
            log.info(line)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Requests that are not done by then end with an error message, not with a cut connection.
        loop, engine = asyncio.get_running_loop(), self.service.engine
        timer = loop.call_later(self.service.options.grace, lambda: loop.run_in_executor(None, engine.stop))
        await super().shutdown(sockets)
        timer.cancel()
        await asyncio.to_thread(engine.stop)


def run(service: Service, sock: socket.socket) -> None:
    """Start the engine and answer until SIGTERM or SIGINT."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    config = uvicorn.Config(
        build(service),
        log_level="warning",
        access_log=False,
        lifespan="off",
        limit_concurrency=service.options.connections,
        timeout_keep_alive=30,
        server_header=False,
    )
    # uvicorn raises a signal again after it has handled it. Nothing is left to do then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    service.engine.start()
    Server(config, service).run(sockets=[sock])
    log.info("stopped")


def _describe(service: Service, host: str, port: int) -> list[str]:
    """What the log says at the start."""
    options, generator = service.options, service.engine.generator
    low, high = options.alpha_range
    how = "in batches" if generator.together else "one by one"
    config = service.config
    budgets = ""
    if config.budget_range is not None:
        now = "as trained" if config.budget is None else f"{config.budget:g}"
        budgets = " budget {} (requests: {:g} to {:g}),".format(now, *config.budget_range)
    lines = [
        f"{service.name} on http://{host}:{port}/v1: alpha {show_alphas(n.alpha for n in config.numbers)}"
        f" (requests: {low:g} to {high:g}),{budgets} {generator.model.dtype}, computed {how},"
        f" {options.concurrency} at a time, up to {options.queue} waiting"
    ]
    if options.api_key is None and not host.startswith("127.") and host != "::1":
        lines.append("no key is set: everyone who reaches this address is answered; set GRMOE_API_KEY")
    if generator.together and not generator.repeat_ties:
        lines.append("16-bit batches round differently: answers may differ from those of single requests")
    return lines
