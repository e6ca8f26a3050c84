"""The items of an input, as the ones that this server knows, and their way to a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.chat import forms
from mtpserve.server.chat.conversation import (
    MAX_MESSAGES,
    CalledFunction,
    ChatMessage,
    MessageToolCall,
    TextParts,
    note,
    text_of_parts,
)
from mtpserve.server.schema.base import Label, Strict
from mtpserve.server.schema.fields import either
from mtpserve.server.schema.shapes import Schema

CONTENT = "a string or a list of parts like {'type': 'input_text', 'text': ...}"
TEXTS = ("input_text", "output_text", "text")
THOUGHTS = ("reasoning_text", "text")
CALL = ("call_id", "name")
# In front of the `encrypted_content` that this server wrote: other servers' is encrypted for them alone.
SEAL = "mtpserve:"
KINDS = ("message", "reasoning", "function_call", "function_call_output")
PARTS: TypeAdapter[str | TextParts] = TypeAdapter(str | TextParts)


def parts(kinds: tuple[str, ...], *others: Schema) -> Schema:
    """What a text may be given as."""
    part = {
        "type": "object",
        "properties": {"type": {"enum": list(kinds)}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [part, *others]}}]}


def message(role: Schema, content: Schema) -> Schema:
    return {
        "properties": {"type": {"const": "message"}, "role": role, "content": content},
        "required": ["role", "content"],
    }


REFERENCE: Schema = {  # without a type: OpenAI's shortest form
    "required": ["id"],
    "properties": {"id": forms.STRING},
    "not": {"anyOf": [{"required": [name]} for name in ("type", "role", "content")]},
}


class InputItem(Strict):
    """A message, the reasoning in front of the assistant's next one, a call that the assistant made, or what
    came of it. Items of other kinds, from other servers' answers, keep their fields for `as_known`."""

    model_config = ConfigDict(extra="allow")
    rules: ClassVar[tuple[Schema, ...]] = (
        {
            "anyOf": [
                message({"const": "assistant"}, parts(TEXTS, forms.other_part(*TEXTS))),
                message({"enum": ["user", "system", "developer"]}, parts(TEXTS)),
                forms.kind(
                    "reasoning", {"content": forms.or_null(parts(THOUGHTS, forms.other_part(*THOUGHTS)))}
                ),
                forms.kind("function_call", dict.fromkeys(CALL, forms.STRING), CALL),
                forms.kind(
                    "function_call_output",
                    {"call_id": forms.STRING, "output": parts(TEXTS, forms.other_part(*TEXTS))},
                    ("call_id", "output"),
                ),
                REFERENCE,
                forms.other_part(*KINDS),
            ]
        },
    )

    type: str = "message"
    id: Label | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Annotated[str | TextParts | None, either(CONTENT)] = None
    call_id: Label | None = None
    name: str | None = None  # of any length: the model wrote it
    namespace: Label | None = None
    arguments: Any = None
    output: Any = None

    @property
    def is_reference(self) -> bool:
        """True if it stands for a stored item, whose `id` it has."""
        untyped = self.id is not None and not self.model_fields_set & {"type", "role", "content"}
        return untyped or self.type == "item_reference"


ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
Find = Callable[[str, str], Any]  # an item's id and its place in the body → the stored item; raises NotStored
Input = Annotated[
    str | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES)],
    either(f"a string or a list of at most {MAX_MESSAGES} items"),
]


def known_items(new_input: str | Sequence[InputItem], find: Find) -> list[InputItem]:
    """Returns the input as items of KINDS. Raises InvalidRequest, NotStored."""
    if isinstance(new_input, str):
        return [InputItem(role="user", content=new_input)]
    items: list[InputItem] = []
    for index, item in enumerate(new_input):
        place = f"input[{index}]"
        if item.is_reference:
            items.append(InputItem.model_validate(msgspec.to_builtins(find(item.id or "", place))))
        elif item.type == "compaction" and (text := unsealed(item)) is not None:
            items += compacted(text, place)
        else:
            items.append(as_known(item, place))
    return items


def unsealed(item: InputItem) -> str | None:
    """Returns the text of `encrypted_content` that this server wrote; None if it did not."""
    sealed = (item.model_extra or {}).get("encrypted_content")
    return sealed.removeprefix(SEAL) if isinstance(sealed, str) and sealed.startswith(SEAL) else None


def compacted(text: str, place: str) -> list[InputItem]:
    """Returns the items of a compaction. Raises InvalidRequest."""
    try:
        items = ITEMS.validate_json(text)
    except ValidationError as error:
        where = f"{place}.encrypted_content"
        raise InvalidRequest(f"{where} is not as this server wrote it", "input") from error
    return [as_known(item, place) for item in items]


def as_known(item: InputItem, place: str) -> InputItem:
    """Calls of tools of other kinds and their results become a function's; what else other servers' answers
    consist of is a note to the model. Raises InvalidRequest."""
    fields = item.model_extra or {}
    if item.type == "function_call_output":
        return item.model_copy(update={"output": written(item, place)})
    if item.type == "reasoning" and not item.content:
        return item.model_copy(update={"content": unsealed(item)})
    if item.type in KINDS:
        return item
    if item.call_id is not None and item.type.endswith("_call"):
        action = {name: value for name, value in fields.items() if name != "status"}
        return InputItem(
            type="function_call",
            id=item.id,
            call_id=item.call_id,
            name=item.name or item.type.removesuffix("_call"),
            arguments=action if item.arguments is None else item.arguments,
        )
    if item.call_id is not None and item.type.endswith("_call_output"):
        return InputItem(
            type="function_call_output", id=item.id, call_id=item.call_id, output=written(item, place)
        )
    return InputItem(role="assistant", id=item.id, content=note(item.type, fields | {"name": item.name}))


def written(item: InputItem, place: str) -> str | TextParts:
    """Returns what came of a call as a function's output. Raises InvalidRequest."""
    try:
        return PARTS.validate_python(item.output)
    except ValidationError as error:
        if item.type == "function_call_output":
            raise InvalidRequest(f"{place}.output must be {CONTENT}", "input") from error
    text = json.dumps(item.output, ensure_ascii=False)  # a shell's output has fields
    return note(item.type, {}) if "data:" in text else text


def messages_of(items: Sequence[InputItem]) -> list[ChatMessage]:
    """`items`: of KINDS. Raises InvalidRequest."""
    messages: list[ChatMessage] = []
    reasoning = ""
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if item.type == "reasoning":
            reasoning += text_of_parts(item.content, place, "input", THOUGHTS, history=True)
            continue
        after_tool = bool(messages) and messages[-1].role == "tool"
        message = message_of(item, place, history=after_tool)
        if item.type == "function_call" and messages and messages[-1].role == "assistant" and not reasoning:
            last = messages[-1]  # the calls of one answer are one message's
            messages[-1] = last.model_copy(
                update={"tool_calls": [*(last.tool_calls or []), *(message.tool_calls or [])]}
            )
            continue
        if message.role == "assistant" and reasoning:
            message = message.model_copy(update={"reasoning_content": reasoning})
        elif reasoning:  # an answer that ended before it said anything
            messages.append(ChatMessage(role="assistant", content="", reasoning_content=reasoning))
        messages.append(message)
        reasoning = ""
    return messages


def message_of(item: InputItem, place: str, *, history: bool = False) -> ChatMessage:
    """`history`: see text_of_parts. Raises InvalidRequest."""
    match item.type:
        case "function_call":
            if item.call_id is None or item.name is None:
                raise InvalidRequest(f"{place}: a function_call needs call_id and name", "input")
            name = item.name if item.namespace is None else f"{item.namespace}.{item.name}"
            call = MessageToolCall(
                id=item.call_id, function=CalledFunction(name=name, arguments=item.arguments)
            )
            return ChatMessage(role="assistant", content="", tool_calls=[call])
        case "function_call_output":
            if item.call_id is None:
                raise InvalidRequest(f"{place}: a function_call_output needs call_id and output", "input")
            text = text_of_parts(item.output, place, "input", TEXTS, history=True)
            return ChatMessage(role="tool", content=text, tool_call_id=item.call_id)
    if item.role is None or item.content is None:
        raise InvalidRequest(f"{place}: a message needs role and content", "input")
    history = history or item.role == "assistant"
    text = text_of_parts(item.content, place, "input", TEXTS, history=history)
    return ChatMessage(role=item.role, content=text)
