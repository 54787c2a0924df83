"""Everything behind `grmoe serve`: the model, the socket, the server, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from grmoe import checks
from grmoe.runs.folder import CONFIG
from grmoe.runs.open import open_model
from grmoe.serve.app import Service, build, log, model_name
from grmoe.serve.compute import Compute, can_batch
from grmoe.serve.engine import Engine
from grmoe.serve.settings import Dial, Limits


@dataclass(frozen=True)
class Options:
    """What `grmoe serve` was told; None leaves the choice to the model."""

    folder: Path
    alpha: float | None
    alpha_range: tuple[float, float]
    dtype: torch.dtype | None
    together: bool | None
    prompt_tokens: int | None
    max_tokens: int | None
    body_bytes: int
    concurrency: int
    queue: int
    timeout: float
    grace: float
    api_key: str | None


def make_service(options: Options) -> Service:
    """Load the model and put it behind an engine, not started yet."""
    folder, (low, high) = options.folder, options.alpha_range
    checks.require(
        not (folder / CONFIG).is_file(),
        f"{folder} is a run; export it first: grmoe export {folder} --out MODEL && grmoe serve MODEL",
    )
    # Weights as tensors only: a pickled file is a program.
    checks.require(
        any(folder.glob("*.safetensors")),
        f"{folder} must be a folder of `grmoe export`: it holds no model.safetensors",
    )
    opened = open_model(folder, dtype=options.dtype)
    config = opened.model.config
    dial = Dial(tuple(config.alphas), low, high)
    if options.alpha is not None:
        checks.require(
            low <= options.alpha <= high,
            f"alpha must lie within --alpha-range, {low:g} to {high:g}, got {options.alpha:g}",
        )
        dial = Dial(dial.of(options.alpha), low, high)
    context = config.max_position_embeddings
    limits = Limits(
        prompt_tokens=min(options.prompt_tokens or context - 1, context - 1),
        max_tokens=min(options.max_tokens or context - 1, context - 1),
        body_bytes=options.body_bytes,
        concurrency=options.concurrency,
        queue=options.queue,
        timeout=options.timeout,
        grace=options.grace,
    )
    exact = opened.model.dtype == torch.float32
    together = exact if options.together is None else options.together
    if options.together and not can_batch(opened.model):
        raise ValueError(f"router {config.router!r} looks across sequences: leave --together out")
    compute = Compute(opened.model, together and can_batch(opened.model))
    engine = Engine(compute, opened.tokenizer, concurrency=limits.concurrency, queue=limits.queue)
    opened.tokenizer("warm")  # settles the tokenizer's state before threads share it
    return Service(model_name(folder), engine, opened.tokenizer, limits, dial, options.api_key)


def bind(host: str, port: int) -> socket.socket:
    """The address, taken before the model is loaded; connections are refused until the server listens."""
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
    """Told to stop, it takes nothing new, finishes what runs within the grace, and ends with status 0."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.engine.close("the server is shutting down")
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Answers that are not done by then end with an error of their own, not with a cut connection.
        loop, engine = asyncio.get_running_loop(), self.service.engine
        timer = loop.call_later(self.service.limits.grace, lambda: loop.run_in_executor(None, engine.stop))
        await super().shutdown(sockets)
        timer.cancel()
        await asyncio.to_thread(engine.stop)


def serve(service: Service, sock: socket.socket) -> None:
    """Answer until SIGTERM or SIGINT."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    config = uvicorn.Config(
        build(service),
        log_level="warning",
        access_log=False,
        lifespan="off",
        limit_concurrency=service.limits.connections,
        timeout_keep_alive=30,
        server_header=False,
    )
    # uvicorn raises a signal again when it is done with it; here it has been dealt with.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    service.engine.start()
    compute, limits = service.engine.compute, service.limits
    host, port = sock.getsockname()[:2]
    how = "in batches" if compute.together else "one by one"
    alpha = ",".join(f"{a:g}" for a in dict.fromkeys(service.dial.default))
    log.info(
        f"{service.name} on http://{host}:{port}/v1: alpha {alpha}"
        f" ({service.dial.low:g} to {service.dial.high:g} in a request), {compute.model.dtype}, computed {how},"
        f" {limits.concurrency} at a time, {limits.queue} waiting"
    )
    if service.api_key is None and not host.startswith("127.") and host != "::1":
        log.info("everybody who reaches this address is answered; set GRMOE_API_KEY to ask for a key")
    if compute.together and not compute.guarded:
        log.info(
            "in 16 bits a batch rounds otherwise than one request does: answers may differ from offline ones"
        )
    Server(config, service).run(sockets=[sock])
    log.info("stopped")
