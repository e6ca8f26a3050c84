"""What the tests of tool calls share: tools, one output for each format, and a short way to say what was found in a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtpserve.text.parsers.events import Arguments, CallBegin, CallEnd, Content, Event, Layout, Reasoning
from mtpserve.text.parsers.output import OutputParser
from mtpserve.text.parsers.reasoning import Opening
from mtpserve.text.parsers.registry import REASONINGS, TOOL_CALLS
from mtpserve.text.parsers.tools import Tool

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "wind": {"type": "boolean"}},
        "required": ["city"],
    },
)
SAVE = Tool(
    "save",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["text", "tags"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    },
)
NOW = Tool("now", {"type": "object", "properties": {}})
TOOLS = (WEATHER, SAVE, NOW)


@dataclass
class Found:
    """The events of an output, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments
    raw: str = ""  # all of the output, as the events account for it
    ended: int = 0


def put_together(events: Sequence[Event]) -> Found:
    found = Found()
    for event in events:
        match event:
            case Content(text):
                found.content += text
                found.raw += text
            case Reasoning(text):
                found.reasoning += text
                found.raw += text
            case Layout(text):
                found.raw += text
            case CallBegin(index, id, name):
                assert index == len(found.calls) == found.ended and id
                found.calls.append((name, ""))
            case Arguments(index, text):
                assert index == len(found.calls) - 1 == found.ended and text
                name, before = found.calls[index]
                found.calls[index] = name, before + text
            case CallEnd(index, raw):
                assert index == found.ended and raw
                found.ended += 1
                found.raw += raw
    assert found.ended == len(found.calls)
    return found


def parser(format: str | None, reasoning: str | None = None, **more: Any) -> OutputParser:
    calls = TOOL_CALLS.get(format)(TOOLS) if format else None
    return OutputParser(REASONINGS.get(reasoning) if reasoning else None, calls=calls, **more)


def parse(pieces: Sequence[str], format: str | None, reasoning: str | None = None, opening: Opening = Opening.MAYBE) -> Found:
    reading = parser(format, reasoning, opening=opening)
    return put_together([*(event for piece in pieces for event in reading.feed(piece)), *reading.finish()])


def longcat(call: str) -> str:
    """A call in another format whose tags are named as LongCat-Flash names them."""
    return re.sub(r"(</?)(?=tool_call|arg_)", r"\1longcat_", call)
