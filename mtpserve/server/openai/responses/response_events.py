"""The events of a response's stream, numbered, from its items: while it is written, and of a stored one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from msgspec import UNSET, UnsetType, structs

from mtpserve.server.openai.responses import response_objects as objects

Events = Iterator[objects.ResponseEvent]


class EventWriter:
    """OpenAI's events. Items open and close one after the other. `stream_id` is in all events."""

    def __init__(self, stream_id: str | UnsetType = UNSET) -> None:
        self._stream_id = stream_id
        self._numbers = count()

    def event(self, kind: str, **more: Any) -> objects.ResponseEvent:
        return objects.ResponseEvent(
            f"response.{kind}", next(self._numbers), stream_id=self._stream_id, **more
        )

    def opening_events(self, response: objects.ResponseObject) -> Events:
        empty = structs.replace(response, status="in_progress", completed_at=None, output=[], usage=None)
        empty = structs.replace(empty, error=None, incomplete_details=None)
        yield self.event("created", response=empty)
        yield self.event("in_progress", response=empty)

    def item_opened(self, index: int, item: objects.AnyItem) -> Events:
        yield self.event("output_item.added", output_index=index, item=opening_item(item))
        if not isinstance(item, objects.CallItem):
            part = structs.replace(item.content[0], text="")
            yield self.event("content_part.added", **location(index, item), part=part)

    def text_added(self, index: int, item: objects.AnyItem, text: str) -> Events:
        more: dict[str, Any] = {"logprobs": []} if isinstance(item, objects.MessageItem) else {}
        yield self.event(f"{kind_of(item)}.delta", **location(index, item), delta=text, **more)

    def item_closed(self, index: int, item: objects.AnyItem) -> Events:
        where, done = location(index, item), f"{kind_of(item)}.done"
        if isinstance(item, objects.CallItem):
            yield self.event(done, **where, name=item.name, arguments=item.arguments)
        else:
            part = item.content[0]
            more: dict[str, Any] = {"logprobs": []} if isinstance(item, objects.MessageItem) else {}
            yield self.event(done, **where, text=part.text, **more)
            yield self.event("content_part.done", **where, part=part)
        yield self.event("output_item.done", output_index=index, item=item)

    def closing_event(self, response: objects.ResponseObject) -> objects.ResponseEvent:
        """The API has no event of its own for a response that was cancelled."""
        status = response.status
        return self.event(status if status in ("completed", "failed") else "incomplete", response=response)


def kind_of(item: objects.AnyItem) -> str:
    match item:
        case objects.MessageItem():
            return "output_text"
        case objects.ReasoningItem():
            return "reasoning_text"
    return "function_call_arguments"


def location(index: int, item: objects.AnyItem) -> dict[str, Any]:
    where = {"item_id": item.id, "output_index": index}
    return where if isinstance(item, objects.CallItem) else where | {"content_index": 0}


def opening_item(item: objects.AnyItem) -> objects.AnyItem:
    """Returns the item before it has any text."""
    if isinstance(item, objects.CallItem):
        return structs.replace(item, status="in_progress", arguments="")
    if isinstance(item, objects.ReasoningItem):
        item = structs.replace(item, encrypted_content=UNSET)
    return structs.replace(item, status="in_progress", content=[])


def text_of_item(item: objects.AnyItem) -> str:
    return item.arguments if isinstance(item, objects.CallItem) else item.content[0].text


def replayed(response: objects.ResponseObject) -> Events:
    """Yields the events of a response that is written, with each item's text in one piece."""
    writer = EventWriter()
    yield from writer.opening_events(response)
    for index, item in enumerate(response.output):
        yield from writer.item_opened(index, item)
        if text := text_of_item(item):
            yield from writer.text_added(index, item, text)
        yield from writer.item_closed(index, item)
    yield writer.closing_event(response)
