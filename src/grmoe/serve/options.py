"""The options of `grmoe serve`. Imports nothing heavy, because the command line takes its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DTYPES = ("auto", "fp32", "bf16")
MAX_NAME = 200
"""Characters of a model's name."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is served, and what a request may ask for."""

    folder: Path
    """Folder of an exported model."""
    name: str | None = None
    """The model's id in requests and answers. None: the name of its folder."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 is every network of this machine."""
    port: int = 8000
    """Port to listen on. 0 takes a free one."""
    alpha: float | None = None
    """α for requests that name none. None: as saved with the model."""
    budget: float | None = None
    """Experts per token for requests that name neither a budget nor an α. None: as saved with the model."""
    alpha_range: tuple[float, float] = (0.5, 5.0)
    """Smallest and largest α that a request may ask for."""
    dtype: str = "auto"
    """"auto" (as saved), "fp32" or "bf16". Routers always compute in fp32."""
    together: bool | None = None
    """Compute requests in one batch. None: in fp32 only, because there near ties can be computed again alone."""
    graphs: bool = False
    """Decode by CUDA graphs: many more tokens per second on a GPU. Implies `together`, and near ties are not computed
    again. The cache of all answers is reserved at the start."""
    concurrency: int = 16
    """Answers computed at the same time."""
    queue: int = 64
    """Requests that may wait. The next one gets status 429."""
    max_new_tokens: int | None = None
    """Tokens per answer, the prompt not counted. None: as many as the model's context holds."""
    max_prompt: int | None = None
    """Tokens per prompt. None: as many as the model's context holds."""
    max_choices: int = 128
    """Answers per request: prompts times `n`."""
    max_body: int = 1 << 20
    """Bytes per request."""
    timeout: float = 120.0
    """Seconds per request, from its last byte to the last byte of the answer, time in the queue included."""
    template_timeout: float = 5.0
    """Seconds that the chat template may take for one chat. Usual templates take a thousandth of a second."""
    grace: float = 10.0
    """Seconds that running requests have after SIGTERM."""
    connections: int = 1024
    """Open connections. One more closes the connection that has been silent longest."""
    header_timeout: float = 10.0
    """Seconds that a client may take to send the headers of a request."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests may use beside the address and localhost. "*" allows every name."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use this server, such as https://example.org. "*" allows every page."""
    api_key: str | None = None
    """Key that every request must carry. None: no key is asked for."""

    def __post_init__(self) -> None:
        low, high = self.alpha_range
        from grmoe.checks import LARGEST_ALPHA  # late: it imports torch, and `--help` reads this class

        if not 0 <= low <= high <= LARGEST_ALPHA:
            raise ValueError(
                f"alpha-range must be LOW:HIGH, such as 0.5:5, from 0 to {LARGEST_ALPHA:g}, got {low:g}:{high:g}"
            )
        if self.graphs and self.together is False:
            raise ValueError("graphs compute requests in one batch: leave out --alone")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.alpha is not None and self.budget is not None:
            raise ValueError("give alpha or budget, not both: a budget sets α too")
        if self.alpha is not None and not low <= self.alpha <= high:
            raise ValueError(f"alpha must be within --alpha-range {low:g}:{high:g}, got {self.alpha:g}")
        if self.name is not None and not (self.name.isprintable() and 0 < len(self.name.strip()) <= MAX_NAME):
            raise ValueError(f"name must have 1 to {MAX_NAME} printable characters, got {self.name!r:.80}")
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and ("://" not in origin or origin.endswith("/")):
                example = "such as http://localhost:3000"
                raise ValueError(f"allow-origin must be scheme, host and port, {example}, got {origin!r:.80}")

    def check_alpha(self, alpha: float) -> None:
        low, high = self.alpha_range
        if not low <= alpha <= high:
            raise ValueError(f"alpha must be between {low:g} and {high:g}, got {alpha:g}")


def parse_range(text: str) -> tuple[float, float]:
    """`0.5:5` as (0.5, 5.0)."""
    try:
        low, high = map(float, text.split(":"))
    except ValueError as error:
        raise ValueError(f"alpha-range must be LOW:HIGH, such as 0.5:5, got {text!r}") from error
    return low, high
