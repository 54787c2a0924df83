"""Chat templates: rendered as transformers renders them, in a process that the kernel ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from small_model import make_tokenizer, options
from transformers.utils.chat_template_utils import _compile_jinja_template

from grmoe import chat_worker
from grmoe.serve.chat import ChatTemplate
from grmoe.serve.errors import Invalid
from grmoe.serve.server import make_service

# It is slow, large or wrong if the first message says so. (Constants are computed when a template is compiled.)
CRAFTED = """{%- set do = messages[0].content -%}
{%- if do == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif -%}
{%- if do == 'power' %}{{ 9 ** (999999999 + messages | length) }}{% endif -%}
{%- if do == 'memory' %}{{ do * 99999999999 }}{% endif -%}
{%- if do == 'long' %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endif -%}
{%- if do == 'echo' %}{{ raise_exception('x' * 99999) }}{% endif -%}
<{{ do }}>"""
TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "{{ messages | tojson }}{% if tools %}x{% endif %}{% if documents is defined %}{{ documents }}{% endif %}",
    "{% for m in messages %}\n    {%- if loop.index > 2 %}{% break %}{% endif %}\n  {{ m.content }}  \n{% endfor %}",
    "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }} {{ x }}{% endgeneration %}"
    "{{ x }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ strftime_now('%Y') }}",
]
MESSAGES = [{"role": "system", "content": " <b>é\n"}, *({"role": "user", "content": c} for c in "abc")]


def rendered(template: ChatTemplate, *contents: str) -> list[str | Invalid]:
    """What each chat of one message gives, in one event loop, one after another."""

    async def ask() -> list[str | Invalid]:
        found: list[str | Invalid] = []
        for content in contents:
            try:
                found.append(await template.render([{"role": "user", "content": content}]))
            except Invalid as error:
                found.append(error)
        await template.close()
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize("template", TEMPLATES)
def test_rendered_as_transformers_does(template: str) -> None:
    tokenizer = make_tokenizer()
    for prompt in (True, False):
        expected = tokenizer.apply_chat_template(
            MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
        assert chat_worker.render(template, tokenizer.special_tokens_map, MESSAGES, prompt) == expected


def test_the_sandbox_is_that_of_transformers() -> None:
    """The same class, names and options. A newer transformers with more of them fails here."""
    theirs, ours = _compile_jinja_template("x").environment, chat_worker.environment()
    assert type(theirs) is type(ours)
    assert theirs.globals.keys() == ours.globals.keys()
    assert theirs.filters.keys() == ours.filters.keys()
    assert theirs.tests.keys() == ours.tests.keys()
    assert {tag for e in theirs.extensions.values() for tag in e.tags} == {
        tag for e in ours.extensions.values() for tag in e.tags
    }
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape", "undefined"):
        assert getattr(theirs, name) == getattr(ours, name)


def test_a_template_that_does_not_end_is_ended() -> None:
    """A loop, an operation of C code that cannot be interrupted, one that takes all memory. The next chat is right."""
    template = ChatTemplate(CRAFTED, {}, timeout=30.0, seconds=0.5)
    start = time.monotonic()
    loop, after, power, memory, long, echo, end = rendered(
        template, "loop", "fine", "power", "memory", "long", "echo", "fine"
    )
    assert time.monotonic() - start < 15
    assert after == end == "<fine>"
    for each in (loop, power):
        assert isinstance(each, Invalid)
        assert (each.status, each.param) == (400, "messages")
        assert "the chat template took more than 0.5 s" in each.message
    assert "MemoryError" in str(memory)
    assert "more than 4194304 characters" in str(long)
    assert "do not fit the chat template" in str(echo)
    assert all(len(str(each)) <= 300 for each in (memory, long, echo))


def test_other_chats_wait_no_longer_than_the_timeout() -> None:
    """And a request that is given up leaves no answer behind for the next one."""
    template = ChatTemplate(CRAFTED, {}, timeout=0.3)
    template.seconds = 60.0

    async def crowd() -> list[Any]:
        asked: list[Awaitable[str]] = [
            template.render([{"role": "user", "content": "loop"}]) for _ in range(4)
        ]
        start = time.monotonic()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert time.monotonic() - start < 5
        template.timeout = 30.0
        last = await template.render([{"role": "user", "content": "fine"}])
        await template.close()
        return [*found, last]

    *loops, last = asyncio.run(crowd())
    assert [(type(each), each.status) for each in loops] == [(Invalid, 504)] * 4
    assert last == "<fine>"


def test_closing_ends_a_template() -> None:
    template = ChatTemplate(CRAFTED, {}, timeout=60.0)

    async def close(wait: Callable[[float], Awaitable[None]]) -> Any:
        asked = asyncio.create_task(template.render([{"role": "user", "content": "loop"}]))
        while template.process is None:
            await wait(0.01)
        await template.close()
        return await asyncio.gather(asked, return_exceptions=True)

    [error] = asyncio.run(close(asyncio.sleep))
    assert isinstance(error, Invalid)
    assert error.status == 503


def test_the_limit_of_a_template_is_an_option(folder: Path) -> None:
    service = make_service(options(folder, template_timeout=0.25))
    assert service.template is not None
    assert (service.template.seconds, service.template.timeout) == (0.25, 60)
