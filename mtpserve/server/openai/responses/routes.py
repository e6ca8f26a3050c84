"""/v1/responses: OpenAI's newer API, with the conversations that it may go on from."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from time import perf_counter, time
from typing import Annotated

import msgspec
from fastapi import Query
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.errors import MTPServeError
from mtpserve.server.chat.dialogue import render_prompt, tool_use_of
from mtpserve.server.chat.service import Served
from mtpserve.server.http.errors import NotStored, renamed
from mtpserve.server.http.rendering import JSON
from mtpserve.server.http.sse import NamedEventStream, unless_gone
from mtpserve.server.openai.responses.items import Order, page, response_input
from mtpserve.server.openai.responses.response_answer import events
from mtpserve.server.openai.responses.response_body import (
    RENAMED,
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from mtpserve.server.openai.responses.response_events import replayed
from mtpserve.server.openai.responses.response_input import SEAL
from mtpserve.server.openai.responses.response_objects import (
    CompactionItem,
    CompactionObject,
    DeletedResponse,
    InputDetails,
    InputTokens,
    OutputDetails,
    ResponseEvent,
    ResponseUsage,
)
from mtpserve.server.openai.responses.start import before_of, create_response
from mtpserve.server.openai.responses.store import ResponseStore

MAX_PAGE = 100
POLL = 0.05  # seconds between two looks at a response that is being written


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


async def create(request: Request, service: Served, body: ResponsesRequest) -> Response:
    """Answer an input, by OpenAI's Responses API. The response is kept for a while unless `store` is
    false."""
    arrival = perf_counter()
    stores = [store_of(request)]
    before, id = before_of(body, stores), f"resp_{uuid.uuid4().hex}"
    keepers = [] if body.store is False else stores
    answer = await create_response(service, body, id, before, keepers, stores, arrival)
    headers = answer.generation.headers
    if body.stream:
        return NamedEventStream(events(answer), service.server_config.sse_keep_alive_interval, headers)
    try:
        with renamed(RENAMED):
            await unless_gone(request.receive, answer.generation.run())
    except MTPServeError as error:
        answer.failed(error)
        raise
    finally:
        if answer.status == "in_progress":
            answer.finished()
    return JSON(answer.object(), headers=headers)


async def retrieve(
    request: Request,
    service: Served,
    id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """Get a stored response, or one that is still being written. `stream`: as its events, behind the one
    with number `starting_after`, once it is written."""
    store = store_of(request)
    response = store.get(id, "response_id").object
    if not stream:
        return JSON(response)

    async def replay() -> AsyncGenerator[list[ResponseEvent], None]:
        while (written := store.get(id, "response_id").object).status == "in_progress":
            await asyncio.sleep(POLL)
        first = 0 if starting_after is None else starting_after + 1
        yield [event for event in replayed(written) if event.sequence_number >= first]

    return NamedEventStream(replay(), service.server_config.sse_keep_alive_interval)


async def input_items(
    request: Request,
    id: str,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Order = "desc",
    after: str | None = None,
    before: str | None = None,
) -> Response:
    """List the input of a stored response. All that came before it, and its own input; instructions and
    definitions of tools are not items."""
    return JSON(page(store_of(request).get(id, "response_id").items, order, limit, after, before))


async def count_input(request: Request, service: Served, body: InputTokensRequest) -> Response:
    """Count the prompt tokens of a Responses request, without running it."""
    service.check_model(body.model)
    body.check()
    stores, offer = [store_of(request)], body.offer()
    before = before_of(body, stores)
    with renamed(RENAMED | offer.places):
        chat = body.chat(response_input(before, body.input or [], stores).conversation, offer)
        tokens = await service.encode_chat(
            await render_prompt(service, chat, tool_use_of(service, chat, prompt_only=True))
        )
    return JSON(InputTokens("response.input_tokens", len(tokens)))


async def compact(request: Request, service: Served, body: CompactRequest) -> Response:
    """Pack a conversation into one item, which can replace it in a later input. Nothing is left out of
    it, and the model computes nothing."""
    service.check_model(body.model)
    body.check()
    stores = [store_of(request)]
    with renamed(RENAMED):
        items = response_input(before_of(body, stores), body.input or [], stores).items
    item = CompactionItem(f"cmp_{uuid.uuid4().hex}", SEAL + msgspec.json.encode(items).decode())
    usage = ResponseUsage(0, InputDetails(0), 0, OutputDetails(0), 0)
    id = f"resp_{uuid.uuid4().hex}"
    return JSON(CompactionObject(id, "response.compaction", int(time()), [item], usage))


async def cancel(request: Request, service: Served, id: str) -> Response:
    """Cancel a response that is being written. It answers with what it has; 404 for a response that is
    not being written."""
    stored = store_of(request).get(id, "response_id")
    if not service.abort(id):
        raise NotStored(f"the response {id[:50]!r} is not being written", "response_id")
    return JSON(replace(stored.object, status="cancelled"))


async def delete(request: Request, id: str) -> Response:
    """Delete a stored response."""
    store_of(request).delete(id)
    return JSON(DeletedResponse(id, "response", True))
