"""A conversation's messages as clients send them, and as chat templates take them. Text only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.http.errors import Unsupported
from mtpserve.server.schema.base import Strict
from mtpserve.server.schema.fields import either, refuse_constant
from mtpserve.server.schema.shapes import NULL, Schema, described

ROLES = ("system", "developer", "user", "assistant", "tool")
CONTENT = "a string or a list of parts like {'type': 'text', 'text': ...}"
# What other servers make something of; they are refused unless they are empty.
KNOWN = frozenset({"audio", "function_call", "partial", "prefix"})

INVALID_JSON = "INVALID_JSON"  # Anthropic's word, from its documentation of fine-grained tool streaming
DETAILS = ("name", "tool_name", "title", "filename", "query", "url")  # short fields that say what a part was
MAX_DETAIL = 200
NESTED = "messages: the arguments of a tool call are nested too deeply"
NO_CALLS: Schema = {"enum": [None, []]}
NOTHING: list[Any] = [None, False, 0, "", [], {}]
TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
TEXT_CONTENT: Schema = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": TEXT_PART}]}


class TextPart(Strict):
    """A part of a message. Parts of other kinds have other fields, which are kept for `in_words`."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None

    def plain_text(self) -> str | None:
        """Returns the text of a part that is text in another form: a refusal, a document in plain text, a
        result of a search. None for parts without text."""
        fields = vars(self) | (self.model_extra or {})
        source = fields.get("source")
        match self.type, source:
            case "refusal", _:
                text = fields.get("refusal")
            case "document", {"type": "text", "data": text}:
                pass
            case "document", {"type": "content", "content": content}:
                text = nested_text(content)
            case "search_result", _:
                text = nested_text(fields.get("content"))
            case _:
                return None
        head = " ".join(value for value in (fields.get("title"), source) if isinstance(value, str))
        lines = (head, text) if self.type != "refusal" else (text,)
        return "\n".join(line for line in lines if line) if isinstance(text, str) else None

    def in_words(self) -> str:
        """Returns what stands for the part in a history: its text, or a note of what the model cannot see."""
        text = self.plain_text() if self.text is None else self.text
        return note(self.type, vars(self) | (self.model_extra or {})) if text is None else text


def nested_text(content: Any) -> str | None:
    """Returns the texts of a list of parts; a string as it is; None if anything is no text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    fields = [vars(part) if isinstance(part, TextPart) else part for part in content]
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in fields
    ]
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def note(kind: str, fields: dict[str, Any]) -> str:
    """Returns a text for what the model cannot see, with the words in its fields that say what it was."""
    action = fields.get("action")
    around = fields | action if isinstance(action, dict) else fields
    said = [value[:MAX_DETAIL] for name in DETAILS if isinstance(value := around.get(name), str)]
    return f"[{' '.join([kind[:50].removeprefix('input_'), *said])}: this model cannot see it]"


def text_of_parts(
    content: str | Sequence[TextPart] | None,
    place: str,
    param: str,
    kinds: Sequence[str] = ("text",),
    *,
    history: bool = False,
) -> str:
    """Returns the parts' texts as lines. `place` is theirs in the body.

    `history`: a tool or a model wrote them, so that nobody asked this model to see them; a note stands for
    those without text. Raises Unsupported for them otherwise.
    """
    if isinstance(content, str) or content is None:
        return content or ""
    texts = []
    for part in content:
        text = part.text if part.type in kinds else part.plain_text()
        if text is None and (part.type in kinds or not history):
            raise Unsupported(
                f"{place}: content of type {part.type[:50]!r} is not supported; only text is", param
            )
        texts.append(part.in_words() if text is None else text)
    return "\n".join(texts)


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

    @model_validator(mode="before")
    @classmethod
    def custom_call(cls, call: Any) -> Any:
        """Takes a call of a tool without a schema, of which there are none here, as one with its text."""
        match call:
            case {"type": "custom", "custom": {"name": name, "input": text}}:
                return {"id": call.get("id"), "function": {"name": name, "arguments": {"input": text}}}
        return call


class ChatMessage(BaseModel):
    """Other keys than these are left out, since clients send back whole messages that they were given. Those
    that would change the answer elsewhere (audio, function_call, partial, prefix) are refused where they are
    set."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=described)
    shapes: ClassVar[dict[str, Schema]] = {"role": {"enum": list(ROLES)}}
    rules: ClassVar[tuple[Schema, ...]] = (
        {"properties": {name: {"enum": NOTHING} for name in sorted(KNOWN)}},
        {
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}, "tool_call_id": NULL}},
                {
                    "properties": {
                        "role": {"enum": [*ROLES[:3]]},
                        "content": TEXT_CONTENT,
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

    def for_template(self, place: str = "messages", *, after_tool: bool = False) -> dict[str, Any]:
        """`place` is the message's place in the body. `after_tool`: it follows a tool's result. Raises
        InvalidRequest."""
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
            "content": self.text(place, history=after_tool),
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

    def text(self, place: str = "messages", *, history: bool = False) -> str:
        """Returns the content as text. Raises Unsupported for what is none in messages of a user, unless they
        are `history`: see text_of_parts."""
        if not self.content and isinstance(refusal := (self.model_extra or {}).get("refusal"), str):
            return refusal  # OpenAI's field, in place of the assistant's content
        history = history or self.role in ("assistant", "tool")
        return text_of_parts(self.content, place, "messages", history=history)


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
    return value if isinstance(value, dict) and is_text(value) else {INVALID_JSON: json_text(written)}


def is_text(value: Any) -> bool:
    """True if the value can be written: models also write half of a surrogate pair, and too many brackets."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def json_text(written: Any) -> str:
    """Returns a call's arguments as a text. Raises InvalidRequest."""
    try:
        return written if isinstance(written, str) else json.dumps(written, ensure_ascii=not is_text(written))
    except RecursionError as error:
        raise InvalidRequest(NESTED, "messages") from error


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    if not messages:
        raise InvalidRequest("messages is empty", "messages")
    # OpenAI's chat API has no images in results: clients send them in a user's message behind the result.
    # pydantic-ai puts a system message between.
    after_tool, filled = False, []
    for index, message in enumerate(messages):
        filled.append(message.for_template(f"messages[{index}]", after_tool=after_tool))
        after_tool = message.role == "tool" or (after_tool and message.role in ("system", "developer"))
    return filled


def in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for templates that take one system message, in front, and turns: later system messages become
    the user's, and what one side says in several messages without an answer between becomes one."""
    front = next(
        (index for index, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    rest = [
        message | {"role": "user"} if message["role"] == "system" else message for message in messages[front:]
    ]
    joined_turns: list[dict[str, Any]] = []
    for role, following in groupby([*messages[:front], *rest], lambda message: message["role"]):
        run = list(following)
        joined_turns += run if role == "tool" or len(run) == 1 else [joined_turn(run)]
    return joined_turns


def joined_turn(run: Sequence[dict[str, Any]]) -> dict[str, Any]:
    turn = run[0] | {"content": "\n\n".join(message["content"] for message in run if message["content"])}
    if calls := [call for message in run for call in message.get("tool_calls", [])]:
        turn["tool_calls"] = calls
    if thoughts := [message["reasoning_content"] for message in run if message.get("reasoning_content")]:
        turn["reasoning_content"] = "\n\n".join(thoughts)
    return turn


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
