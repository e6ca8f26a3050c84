"""What a response is made from: the conversation for the model, and its items as
/v1/responses/{id}/input_items lists them.

Both are all that came before and the request's own input, instructions left out: they are not inherited.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.chat.conversation import ChatMessage, TextPart, json_text
from mtpserve.server.http.errors import SHORT, NotStored
from mtpserve.server.openai.responses import response_objects as objects
from mtpserve.server.openai.responses.response_input import InputItem, known_items, messages_of
from mtpserve.server.openai.responses.store import ResponseStore, Stored

Order = Literal["asc", "desc"]
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


@dataclass(frozen=True, slots=True)
class ResponseInput:
    conversation: list[ChatMessage]
    items: list[objects.ListedItem]


def response_input(
    before: Stored | None, new_input: str | list[InputItem], stores: Sequence[ResponseStore]
) -> ResponseInput:
    """`before`: the response that this one goes on from. `stores` have the items that the input refers to.
    Raises InvalidRequest."""

    def find(id: str, place: str) -> objects.ListedItem:
        for store in stores:
            if (item := store.item(id)) is not None:
                return as_input_item(item)
        raise NotStored(
            f"{place}: Item with id {SHORT.repr(id)} not found. Items are not kept if `store` is false, and "
            "old ones give way to new ones: send the item itself",
            "input",
        )

    new_items = known_items(new_input, find)
    history = [] if before is None else [*before.items, *map(as_input_item, before.object.output)]
    conversation = [*([] if before is None else before.conversation), *messages_of(new_items)]
    check_calls(conversation)
    return ResponseInput(conversation, [*history, *listed(new_items, {item.id for item in history})])


def check_calls(conversation: Iterable[ChatMessage]) -> None:
    """Raises InvalidRequest for a result whose call is nowhere before it."""
    ids: set[str | None] = set()
    for message in conversation:
        ids.update(call.id for call in message.tool_calls or [])
        if message.role == "tool" and message.tool_call_id not in ids:
            id = SHORT.repr(message.tool_call_id)[1:-1]
            raise InvalidRequest(
                f"input: No tool call found for function call output with call_id {id}.", "input"
            )


def listed(items: Iterable[InputItem], taken: set[str]) -> Iterator[objects.ListedItem]:
    """Yields the items under the ids that the client gave them, if no item before has the same id."""
    for item in items:
        id = item.id if item.id and item.id not in taken else f"{PREFIXES[item.type]}_{uuid.uuid4().hex}"
        taken.add(id)
        yield listed_item(item, id)


def listed_item(item: InputItem, id: str) -> objects.ListedItem:
    match item.type:
        case "reasoning":
            return objects.ReasoningItem(
                id, "completed", [], [objects.ReasoningText(text) for text in texts(item.content)]
            )
        case "function_call":
            around = UNSET if item.namespace is None else item.namespace
            name, arguments = item.name or "", json_text(item.arguments or "{}")
            return objects.CallItem(
                id=id,
                status="completed",
                call_id=item.call_id or "",
                namespace=around,
                name=name,
                arguments=arguments,
            )
        case "function_call_output":
            output = item.output
            if not isinstance(output, str):
                output = [objects.InputText(text) for text in texts(output)]
            return objects.CallOutputItem(id, "completed", item.call_id or "", output)
    part = objects.OutputText if item.role == "assistant" else objects.InputText
    return objects.ListedMessage(
        id, "completed", item.role or "user", [part(text) for text in texts(item.content)]
    )


def texts(content: str | Iterable[TextPart] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part.in_words() for part in content or []]


def as_input_item(item: objects.AnyItem | objects.ListedItem) -> objects.ListedItem:
    """An item of an answer, as the input of the next one."""
    if isinstance(item, objects.MessageItem):
        return objects.ListedMessage(item.id, item.status, item.role, [*item.content])
    return item


def page(
    items: list[objects.ListedItem], order: Order, limit: int, after: str | None, before: str | None
) -> objects.ItemList:
    """The next `limit` items of the list in its order, or the last ones in front of `before`."""
    ordered = items if order == "asc" else items[::-1]
    places = {item.id: index for index, item in enumerate(ordered)}
    for field, id in (("after", after), ("before", before)):
        if id is not None and id not in places:
            raise InvalidRequest(f"{field}: the response has no input item {id[:50]!r}", field)
    rest = ordered[0 if after is None else places[after] + 1 : None if before is None else places[before]]
    selected = rest[-limit:] if before is not None and after is None else rest[:limit]
    first, last = (selected[0].id, selected[-1].id) if selected else (None, None)
    return objects.ItemList("list", selected, first, last, len(rest) > limit)
