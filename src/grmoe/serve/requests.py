"""What a client may ask for, checked field by field. Names and meanings are OpenAI's, except `alpha` and `budget`."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grmoe.serve.sampling import Sampling

# Fields of OpenAI's that we do not support. At these values they change nothing; any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,), "suffix": ("",),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],),
    "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "service_tier": ("auto", "default"),
    "store": (False,), "parallel_tool_calls": (True, False),
}  # fmt: skip


class Invalid(Exception):
    """A bad request: HTTP status, message, and the field at fault."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart]
    name: Annotated[str, Field(max_length=64)] | None = None

    def plain(self) -> dict[str, str]:
        """The form chat templates take."""
        content = self.content
        return {
            "role": self.role,
            "content": content if isinstance(content, str) else "".join(part.text for part in content),
        }


class Request(_Strict):
    """Fields of both completions and chat."""

    model: str | None = None
    alpha: float | None = None
    budget: float | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[str, Field(max_length=200)] | list[Annotated[str, Field(max_length=200)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """vLLM's name: send token ids beside the text."""
    user: str | None = None

    def sampling(self) -> Sampling:
        """With OpenAI's defaults: temperature 1, top_p 1, a random seed."""
        seed = secrets.randbits(62) if self.seed is None else self.seed
        temperature = 1.0 if self.temperature is None else self.temperature
        if 0 < temperature < 1e-3:
            raise Invalid(f"temperature must be 0 or at least 0.001, got {temperature:g}", "temperature")
        return Sampling(temperature, 1.0 if self.top_p is None else self.top_p, seed)

    def stops(self) -> list[str]:
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(found) > 4 or "" in found:
            raise Invalid(f"stop must be at most 4 strings, none of them empty, got {found!r:.80}", "stop")
        return found

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Request):
    prompt: str | list[int]


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


Kind = TypeVar("Kind", bound=Request)


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """The request in a body. Raises `Invalid`."""
    try:
        values = json.loads(body)
        json.dumps(values, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON, but not text
    except (ValueError, RecursionError) as error:
        raise Invalid(f"the body must be JSON: {error}") from error
    if not isinstance(values, dict):
        raise Invalid(f"the body must be a JSON object, got {values!r:.60}")
    for name, neutral in NEUTRAL.items():
        if name in values and name not in kind.model_fields:
            value = values.pop(name)
            if value is not None and value not in neutral:
                raise Invalid(f"{name} is not supported, got {value!r:.60}", name)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
        got = "" if first["type"] == "missing" else f", got {first['input']!r:.60}"
        raise Invalid(f"{field}: {message}{got}", str(first["loc"][0]) if first["loc"] else None) from error
