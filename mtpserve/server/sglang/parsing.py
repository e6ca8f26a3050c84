"""SGLang's helpers for clients of /generate: a model's text taken apart into calls, or into reasoning and the
rest."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from starlette.responses import Response

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.chat import forms
from mtpserve.server.chat.formats import Formats
from mtpserve.server.chat.service import MAX_BYTES_PER_TOKEN, Served, Service
from mtpserve.server.chat.tools import call_format, parse_tools
from mtpserve.server.http.errors import ContextLengthExceeded
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.schema.base import Strict
from mtpserve.server.schema.shapes import SERVER, Schema
from mtpserve.text.parsers.events import Arguments, CallBegin, Content, Event, Reasoning
from mtpserve.text.parsers.output import OutputParser
from mtpserve.text.parsers.reasoning import Opening
from mtpserve.text.parsers.registry import REASONINGS, TOOL_CALLS
from mtpserve.text.requests import check_text

TEXT: Schema = {SERVER: "text"}


class ParseFunctionCall(Strict):
    """`tool_call_parser`: by default the server's own."""

    shapes: ClassVar[dict[str, Schema]] = {
        "text": TEXT,
        "tools": forms.TOOLS,
        "tool_call_parser": {"enum": TOOL_CALLS.names()},
    }

    text: str
    tools: list[Any]
    tool_call_parser: str | None = None


class SeparateReasoning(Strict):
    """`reasoning_parser`: by default the server's own."""

    shapes: ClassVar[dict[str, Schema]] = {"text": TEXT, "reasoning_parser": {"enum": REASONINGS.names()}}

    text: str
    reasoning_parser: str | None = None


class ParsedCall(Rendered):
    tool_index: int  # -1: none of the tools
    name: str
    parameters: str


class ParsedCalls(Rendered):
    normal_text: str
    calls: list[ParsedCall]


class SeparatedReasoning(Rendered):
    reasoning_text: str
    text: str


async def parse_function_call(service: Served, body: ParseFunctionCall) -> Response:
    """Find the tool calls in a model's output. Answers the calls, and the text without them."""
    name = require_name(
        service.formats.tool_calls if body.tool_call_parser is None else body.tool_call_parser,
        TOOL_CALLS.names(),
        "tool_call_parser",
    )
    formats = Formats(name, None)
    use = parse_tools(body.tools, None, None, formats)
    events = await taken_apart(service, body.text, OutputParser(calls=call_format(use, formats)))
    indices = dict(zip([tool.name for tool in use.tools], use.indices, strict=True))
    calls: list[ParsedCall] = []
    for event in events:
        match event:
            case CallBegin(_, _, name):
                calls.append(ParsedCall(indices.get(name, -1), name, ""))
            case Arguments(_, text):
                calls[-1].parameters += text
    return JSON(ParsedCalls("".join(event.text for event in events if isinstance(event, Content)), calls))


async def separate_reasoning(service: Served, body: SeparateReasoning) -> Response:
    """Split a model's output into reasoning and answer."""
    name = require_name(
        service.formats.reasoning if body.reasoning_parser is None else body.reasoning_parser,
        REASONINGS.names(),
        "reasoning_parser",
    )
    thinking = REASONINGS.get(name)
    events = await taken_apart(
        service, body.text, OutputParser(thinking, Opening.INSIDE if thinking.always else Opening.MAYBE)
    )
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return JSON(
        SeparatedReasoning(reasoning, "".join(event.text for event in events if isinstance(event, Content)))
    )


def require_name(name: str | None, names: list[str], field: str) -> str:
    if name not in names:
        raise InvalidRequest(
            f"{field} must be one of {', '.join(names)}, got "
            f"{'nothing' if name is None else repr(name[:50])}",
            field,
        )
    return name


async def taken_apart(service: Service, text: str, parser: OutputParser) -> list[Event]:
    if len(text) > MAX_BYTES_PER_TOKEN * service.client.card.context_length:
        raise ContextLengthExceeded(
            f"text has {len(text)} characters, more than an answer of this model can have", "text"
        )
    check_text(text, "text")
    return await asyncio.to_thread(lambda: [*parser.feed(text), *parser.finish()])
