"""A server in a thread of this process, with real connections."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from grmoe.serve.server import Server, bind
from grmoe.serve.service import Service


@contextmanager
def running(service: Service) -> Iterator[httpx.Client]:
    sock = bind("127.0.0.1", 0)
    server = Server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    service.engine.start()
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=30) as client:
            until(lambda: server.started)
            yield client
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def until(condition: Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def slow_down(service: Service, seconds: float) -> None:
    """Every step of the engine takes at least so long."""
    step = service.engine.generator.step

    def slow(sequences: Any) -> None:
        time.sleep(seconds)
        step(sequences)

    service.engine.generator.step = slow  # type: ignore[method-assign]


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a stream holds; it must end with [DONE]."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        lines = [line[6:] for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
