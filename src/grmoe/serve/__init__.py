"""`grmoe serve`: an OpenAI-compatible server with α or a budget in the request, and the plugin for vLLM.

The server itself is imported when it is first used: it needs the extra "serve", `Options` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grmoe.serve.options import Options

if TYPE_CHECKING:
    from grmoe.serve.server import make_service, serve

__all__ = ["Options", "make_service", "serve"]


def __getattr__(name: str) -> Any:
    if name not in ("make_service", "serve"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grmoe.serve import server

    return getattr(server, name)
