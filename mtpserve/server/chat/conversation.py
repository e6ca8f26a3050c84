"""A conversation's messages as clients send them, and as chat templates take them. Text only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.http.errors import Unsupported
from mtpserve.server.schema.base import Strict
from mtpserve.server.schema.fields import either, refuse_constant
from mtpserve.server.schema.shapes import NULL, Schema, described

ROLES = ("system", "developer", "user", "assistant", "tool")
CONTENT = "a string or a list of parts like {'type': 'text', 'text': ...}"
# What other servers make something of; they are refused unless they are empty.
KNOWN = frozenset({"audio", "function_call", "partial", "prefix"})

INVALID_JSON = (
    "INVALID_JSON"  # Anthropic's word, in its documentation of tools whose input is streamed as written
)
NESTED = "messages: the arguments of a tool call are nested too deeply"
NO_CALLS: Schema = {"enum": [None, []]}
NOTHING: list[Any] = [None, False, 0, "", [], {}]
TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


class TextPart(Strict):
    type: str
    text: str | None = None


TextParts = Annotated[list[TextPart], Field(fail_fast=True)]


class CalledFunction(Strict):
    """`arguments`: a text, which should be a JSON object, or the object itself. Models write other things
    too, and clients send them back."""

    name: str
    arguments: Any = "{}"


class MessageToolCall(Strict):
    """A call that the model made before. `index` and the like, which clients keep from streams, say nothing
    here."""

    shapes: ClassVar[dict[str, Schema]] = {"type": {"enum": ["function"]}}

    id: str | None = None
    type: str = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """Other keys than these are left out, since clients send back whole messages that they were given. Those
    that would change the answer elsewhere (audio, function_call, partial, prefix) are refused where they are
    set."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=described)
    shapes: ClassVar[dict[str, Schema]] = {"role": {"enum": list(ROLES)}, "content": {"items": TEXT_PART}}
    rules: ClassVar[tuple[Schema, ...]] = (
        {"properties": {name: {"enum": NOTHING} for name in sorted(KNOWN)}},
        {
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}, "tool_call_id": NULL}},
                {
                    "properties": {
                        "role": {"enum": [*ROLES[:3]]},
                        "tool_call_id": NULL,
                        "tool_calls": NO_CALLS,
                    }
                },
                {
                    "properties": {
                        "role": {"const": "tool"},
                        "tool_call_id": {"type": "string"},
                        "tool_calls": NO_CALLS,
                    },
                    "required": ["tool_call_id"],
                },
            ]
        },
    )

    role: str
    content: Annotated[str | TextParts | None, either(CONTENT)] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @property
    def characters(self) -> int:
        """About as many as it takes in memory."""
        calls = sum(
            len(call.function.name) + len(str(call.function.arguments)) for call in self.tool_calls or []
        )
        return len(self.text()) + len(self.reasoning_content or "") + calls

    def for_template(self, place: str = "messages") -> dict[str, Any]:
        """`place` is the message's place in the body. Raises InvalidRequest."""
        if self.role not in ROLES:
            raise InvalidRequest(
                f"{place}: role {self.role[:50]!r} is not supported; {', '.join(ROLES[:-1])} and "
                f"{ROLES[-1]} are",
                "messages",
            )
        for name, value in (self.model_extra or {}).items():
            if value and name in KNOWN:
                raise Unsupported(f"{place}: {name} is not supported: leave it out", "messages")
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text(place),
        }
        if (reasoning := self.reasoning_content or self.reasoning) is not None:
            message["reasoning_content"] = reasoning
        if self.name is not None:
            message["name"] = self.name
        self._add_calls(message, place)
        return message

    def _add_calls(self, message: dict[str, Any], place: str) -> None:
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(
                f"{place}.tool_calls: only messages of the assistant have them", f"{place}.tool_calls"
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequest(
                f"{place}.tool_call_id: field required in messages of a tool", f"{place}.tool_call_id"
            )
        if self.tool_call_id is not None and self.role != "tool":
            raise InvalidRequest(
                f"{place}.tool_call_id: only messages of a tool have it", f"{place}.tool_call_id"
            )
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                call_for_template(call, f"{place}.tool_calls[{index}]")
                for index, call in enumerate(self.tool_calls)
            ]

    def text(self, place: str = "messages") -> str:
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"{place}: content of type {part.type[:50]!r} is not supported; only text is", "messages"
                )
        return "\n".join(part.text or "" for part in self.content)


MAX_MESSAGES = 1 << 14  # more would block the event loop while they are validated
Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]


def call_for_template(call: MessageToolCall, place: str) -> dict[str, Any]:
    """Returns the call for a template, with the arguments as an object. Raises InvalidRequest for other kinds
    of calls."""
    if call.type != "function":
        raise InvalidRequest(
            f"{place}.type {call.type[:50]!r} is not supported; function is", f"{place}.type"
        )
    entry: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
    }
    return entry if call.id is None else {"id": call.id, **entry}


def arguments_of(written: Any) -> dict[str, Any]:
    """Returns a call's arguments as an object, whatever the model wrote: what is no object is INVALID_JSON's
    text, so that the model sees its mistake. A refusal would end the conversation for good."""
    value = written
    if isinstance(written, str):
        try:  # control characters in strings are models' commonest mistake, and unambiguous
            value = json.loads(written or "{}", parse_constant=refuse_constant, strict=False)
        except (ValueError, RecursionError):
            return {INVALID_JSON: written}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {INVALID_JSON: json_text(written)}


def json_text(written: Any) -> str:
    """Returns a call's arguments as a text. Raises InvalidRequest."""
    try:
        return written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest(NESTED, "messages") from error


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    if not messages:
        raise InvalidRequest("messages is empty", "messages")
    return [message.for_template(f"messages[{index}]") for index, message in enumerate(messages)]


def in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for templates that take one system message, in front: later ones become the user's, and what
    the user says in several messages without an answer between, as coding agents do, becomes one."""
    front = next(
        (index for index, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    rest = [
        message | {"role": "user"} if message["role"] == "system" else message for message in messages[front:]
    ]
    joined_turns: list[dict[str, Any]] = []
    for role, following in groupby([*messages[:front], *rest], lambda message: message["role"]):
        run = list(following)
        joined = len(run) > 1 and role in ("system", "user")
        joined_turns += (
            [run[0] | {"content": "\n\n".join(message["content"] for message in run)}] if joined else run
        )
    return joined_turns


def size_of(messages: Sequence[dict[str, Any]]) -> int:
    """Returns the characters of all long texts: contents, reasoning and arguments. Raises InvalidRequest."""
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", [])]
    try:
        written = sum(len(json.dumps(arguments)) for arguments in calls)
    except RecursionError as error:
        raise InvalidRequest(NESTED, "messages") from error
    return written + sum(
        len(message["content"]) + len(message.get("reasoning_content", "")) for message in messages
    )
