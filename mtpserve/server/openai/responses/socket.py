"""Responses over a WebSocket at /v1/responses: the client sends a request as an event, and gets the events of
its stream as messages.

    {"type": "response.create", …}   the body of POST /v1/responses; `stream` is implied. `generate: false`
                                     computes the prompt alone, so that what goes on from it is faster.
                                     `stream_id` is in all events of the request's answer.
    {"type": "response.cancel"}      ours: the answer that is being written ends

One answer is written at a time; further requests wait for it. What is wrong is an event of type error, and
the connection stays. The responses of a connection may be gone on from there, also where they are not stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import msgspec
from fastapi import WebSocket
from msgspec import UNSET, UnsetType
from pydantic import ValidationError
from starlette.websockets import WebSocketDisconnect

from mtpserve.core.errors import InvalidRequest, MTPServeError, QueueFull, quantity
from mtpserve.server.chat.service import Service
from mtpserve.server.http.errors import (
    RETRY_AFTER,
    ErrorAnswer,
    ErrorObject,
    Unsupported,
    describe,
    error_body,
    validation_message,
)
from mtpserve.server.http.rendering import Rendered
from mtpserve.server.openai.responses.response_answer import events
from mtpserve.server.openai.responses.response_body import ResponsesRequest
from mtpserve.server.openai.responses.start import before_of, create_response
from mtpserve.server.openai.responses.store import ResponseStore
from mtpserve.server.schema.base import Label

log = logging.getLogger(__name__)

MAX_WAITING = 32  # requests that wait for the one that is answered
MAX_OWN = 16  # responses of a connection that may be gone on from there
MAX_OWN_CHARACTERS = 4 << 20
TOO_BIG = 1009  # RFC 6455


class CreateEvent(ResponsesRequest):
    type: Literal["response.create"]
    generate: bool | None = None
    stream_id: Label | None = None

    @property
    def needs_input(self) -> bool:
        return not self.only_prompt

    @property
    def only_prompt(self) -> bool:
        return self.generate is False


class SocketErrorObject(ErrorObject):
    headers: dict[str, str] | UnsetType = UNSET


class SocketError(Rendered, tag_field="type", tag="error"):
    status: int
    error: SocketErrorObject
    stream_id: str | UnsetType = UNSET


def error_event(status: int, answer: ErrorAnswer, stream_id: str | UnsetType) -> SocketError:
    error, headers = answer.error, RETRY_AFTER if status in (429, 503) else UNSET
    return SocketError(
        status, SocketErrorObject(error.message, error.type, error.param, error.code, headers), stream_id
    )


@dataclass(slots=True)
class Connection:
    """One client's connection. It reads while an answer is written: so it sees the client leave, and ends the
    answer."""

    socket: WebSocket
    service: Service
    shared: ResponseStore
    connection_store: ResponseStore = field(
        default_factory=lambda: ResponseStore(MAX_OWN, MAX_OWN_CHARACTERS)
    )
    _waiting: deque[str] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _current_id: str | None = None  # the id of the response that is being written

    async def serve(self) -> None:
        await self.socket.accept()
        answering = asyncio.create_task(self._answer_all())
        try:
            while (message := await self.socket.receive())["type"] != "websocket.disconnect":
                await self._take(message)
        except WebSocketDisconnect:
            pass
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _take(self, message: Any) -> None:
        text: str = message.get("text") or (message.get("bytes") or b"").decode(errors="replace")
        limit = self.service.server_config.max_request_bytes
        if len(text) > limit:  # uvicorn has refused it already; other servers may not
            await self.socket.close(TOO_BIG, f"a message has at most {limit} bytes")
            raise WebSocketDisconnect(TOO_BIG)
        if kind_of(text) == "response.cancel":
            self._cancel()
        elif len(self._waiting) >= MAX_WAITING or sum(map(len, self._waiting)) + len(text) > limit:
            waiting = (
                f"{quantity(len(self._waiting), 'request')} waiting on this connection, and no more are kept"
            )
            await self._send(error_event(*describe(QueueFull(waiting)), UNSET))
        else:
            self._waiting.append(text)
            self._arrived.set()

    def _cancel(self) -> None:
        """Ends the answer that is being written; it may just have ended by itself."""
        if self._current_id is not None:
            self.service.abort(self._current_id)

    async def _answer_all(self) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                await self._arrived.wait()
                while self._waiting:
                    await self._answer(self._waiting.popleft())
                self._arrived.clear()

    async def _answer(self, text: str) -> None:
        """The error of a request is told to its client, whatever it is: the next one may be better."""
        stream_id: str | UnsetType = UNSET
        start, status = perf_counter(), 200
        self._current_id = id = f"resp_{uuid.uuid4().hex}"
        try:
            fields = parse_fields(text)
            value = fields.get("stream_id")
            stream_id = value if isinstance(value, str) else UNSET
            await self._write(CreateEvent.model_validate(fields), id, stream_id, start)
        except ValidationError as error:
            message, param, code = validation_message(error.errors())
            status = 400
            await self._send(
                error_event(status, error_body(status, message, param=param, code=code), stream_id)
            )
        except MTPServeError as error:
            status, body = describe(error)
            await self._send(error_event(status, body, stream_id))
        except WebSocketDisconnect:
            status = 499
            raise
        except Exception as error:
            log.exception("a response over a WebSocket failed")
            status, body = describe(error)
            await self._send(error_event(status, body, stream_id))
        finally:
            self._current_id = None
            log.info("%s response.create %d %.3f s %s", self._who, status, perf_counter() - start, id)

    async def _write(self, event: CreateEvent, id: str, stream_id: str | UnsetType, arrival: float) -> None:
        body = event.model_copy(update={"stream": True})
        stores = [self.connection_store] if body.store is False else [self.connection_store, self.shared]
        sources = [self.connection_store, self.shared]
        before = before_of(body, sources)
        try:
            answer = await create_response(
                self.service, body, id, before, stores, sources, arrival, only_prompt=event.only_prompt
            )
        except MTPServeError:
            self._forget(body.previous_response_id)
            raise
        answer.stream_id = stream_id
        async with contextlib.aclosing(events(answer)) as batches:
            async for some in batches:
                for response_event in some:
                    await self._send(response_event)

    def _forget(self, id: str | None) -> None:
        """A response that only this connection keeps is gone after a request that could not continue it, as
        OpenAI and Open Responses document."""
        if id is not None and id in self.connection_store and id not in self.shared:
            self.connection_store.delete(id)

    async def _send(self, response_event: Rendered) -> None:
        await self.socket.send_text(msgspec.json.encode(response_event).decode())

    @property
    def _who(self) -> str:
        client = self.socket.client
        return "-" if client is None else client.host


class EventKind(msgspec.Struct):
    type: Any = None


def kind_of(text: str) -> Any:
    """Returns the type of an event; None if the text is no event."""
    try:
        return msgspec.json.decode(text, type=EventKind).type
    except (msgspec.MsgspecError, RecursionError):
        return None


def parse_fields(text: str) -> dict[str, Any]:
    """A request's fields. Without an input it has an empty one. Raises InvalidRequest."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the message is not valid JSON: {error.msg} at position {error.pos}") from error
    except RecursionError:
        raise InvalidRequest("the message is nested too deeply") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the message must be a JSON object")
    if (kind := fields.get("type")) != "response.create":
        kind_shown = ascii(kind)[:50]
        raise Unsupported(
            f"events of type {kind_shown} are not supported here: send response.create or response.cancel",
            "type",
        )
    return fields if fields.get("input") is not None else fields | {"input": []}


async def responses_socket(socket: WebSocket) -> None:
    state = socket.app.state
    await Connection(socket, state.service, state.responses).serve()
