"""What a client may ask for, checked field by field. Names and meanings are OpenAI's, except `alpha` and `budget`.

A check stops at the first error, so that a body of a megabyte costs milliseconds however wrong it is.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from grmoe.serve.errors import Invalid, cut, shorten
from grmoe.serve.sampling import Sampling

# Fields of OpenAI's that we do not support. At these values they change nothing; any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "top_logprobs": (0,), "suffix": ("",), "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},), "service_tier": ("auto", "default"), "store": (False,),
    "parallel_tool_calls": (True, False),
}  # fmt: skip

MAX_MESSAGES = 1024
"""Messages per chat, and parts of text per message."""
MAX_STOPS, MAX_STOP = 16, 200
"""Stop strings, and characters of each."""
MAX_LOGPROBS, MAX_TOP_LOGPROBS = 5, 20
"""Alternatives per token in completions and in chats, as OpenAI has them."""


def _refuse(message: str) -> PydanticCustomError:
    """An error that says all: the value is not added to it."""
    return PydanticCustomError("said", "{message}", {"message": message})


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _know_fields(cls, values: Any) -> Any:
        """Refuse the first unknown field. Pydantic's own check would collect all of them."""
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    raise PydanticCustomError("unknown", "{field}: unknown field", {"field": cut(name, 64)})
        return values


class StreamOptions(_Strict):
    include_usage: bool = False


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    name: Annotated[str, Field(max_length=64)] | None = None

    def plain(self) -> dict[str, str]:
        """The form chat templates take."""
        content = self.content
        return {
            "role": self.role,
            "content": content if isinstance(content, str) else "".join(part.text for part in content),
        }


Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several, each a string or token ids."""
    if isinstance(value, str) or _token_ids(value):
        return [value]
    if not isinstance(value, list) or not value:
        raise _refuse(f"must be a string, token ids, or a list of those, got {shorten(value)}")
    for i, prompt in enumerate(value):
        if not (isinstance(prompt, str) or _token_ids(prompt)):
            raise _refuse(f"item {i} must be a string or token ids, got {shorten(prompt)}")
    return value


def _token_ids(value: Any) -> bool:
    """A list of integers; True is none."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _stops(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise _refuse(f"must be a string or a list of at most {MAX_STOPS}, got {shorten(value)}")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP for stop in stops):
        raise _refuse(f"must hold strings of 1 to {MAX_STOP} characters, got {shorten(value)}")
    return stops


class Request(_Strict):
    """Fields of both completions and chat."""

    model: str | None = None
    alpha: float | None = None
    budget: float | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], PlainValidator(_stops)] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """vLLM's name: send token ids beside the text."""
    user: str | None = None

    def samplings(self) -> list[Sampling]:
        """One per answer to a prompt, with OpenAI's defaults: temperature 1, top_p 1, a random seed.

        Answer k has the seed plus k, so the first one is the answer of a request with n = 1.
        """
        seed = secrets.randbits(62) if self.seed is None else self.seed
        temperature = 1.0 if self.temperature is None else self.temperature
        if 0 < temperature < 1e-3:
            raise Invalid(f"temperature must be 0 or at least 0.001, got {temperature:g}", "temperature")
        top_p = 1.0 if self.top_p is None else self.top_p
        return [Sampling(temperature, top_p, seed + k) for k in range(self.n or 1)]

    def new_tokens(self) -> int | None:
        """Most tokens of an answer, by either name; None if the request has neither."""
        asked = [name for name in ("max_tokens", "max_completion_tokens") if getattr(self, name) is not None]
        if len({getattr(self, name) for name in asked}) > 1:
            raise Invalid(
                f"max_tokens and max_completion_tokens are the same limit, got {shorten(self.max_tokens)} and"
                f" {shorten(self.max_completion_tokens)}; give one",
                "max_completion_tokens",
            )
        return getattr(self, asked[0]) if asked else None

    @property
    def alternatives(self) -> int | None:
        """Most probable tokens to report at each position; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Request):
    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def alternatives(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise Invalid(f"top_logprobs needs logprobs: true, got {self.top_logprobs}", "top_logprobs")
        return None


Kind = TypeVar("Kind", bound=Request)


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """The request in a body. Raises `Invalid`."""
    try:
        values = from_json(body)
    except ValueError as error:
        raise Invalid(f"the body must be JSON: {error}") from error
    if not isinstance(values, dict):
        raise Invalid(f"the body must be a JSON object, got {shorten(values)}")
    for name, neutral in NEUTRAL.items():
        if name in values and name not in kind.model_fields:
            value = values.pop(name)
            # 0 is not False: one of the wrong type was meant otherwise.
            if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
                raise Invalid(f"{name} is not supported, got {shorten(value)}", name)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _first(error) from error


def _first(error: ValidationError) -> Invalid:
    """The first of the errors, with the field's name and the value. Of a union, the form that fitted furthest."""
    errors = error.errors(include_url=False)
    same = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same, key=lambda e: len(e["loc"]))
    where = [str(part) for part in first["loc"]]
    if first["type"] == "unknown":
        name = first["ctx"]["field"]
        return Invalid(".".join([*where, first["msg"]]), where[0] if where else name)
    got = "" if first["type"] in ("missing", "said") else f", got {shorten(first['input'])}"
    separator = " " if first["type"] == "said" else ": "
    return Invalid(f"{'.'.join(where)}{separator}{first['msg']}{got}", where[0])
