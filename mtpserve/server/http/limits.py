"""Limits of how much a client may send, and how slowly it may send and read. They refuse while it happens,
not after the body was collected.

What waits for a client that does not read is bounded three times: the engine's client holds so many events
for each request and then ends it; uvicorn stops asking for more once the socket takes nothing; and the
connection is cut after the write timeout.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mtpserve.server.http.errors import STATUS_CODES, Refusal, error_body

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
READING, WRITING = "send its request", "read its answer"  # what is waited for


class BoundedHTTP(HttpToolsProtocol):
    """uvicorn's fast parser, which by itself has no limit for headers, for the time that a request takes to
    arrive, or for the time that a client takes to read.

    It overrides uvicorn's internals: pyproject.toml bounds uvicorn's version, and a test names what must be
    there."""

    def __init__(self, *arguments: Any, read_timeout: float, write_timeout: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._read_timeout, self._write_timeout = read_timeout, write_timeout
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by what the client has to do
        self._in_headers = False
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(READING, self._read_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting(READING, WRITING)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        self._wait(READING, self._read_timeout)
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._stop_waiting(READING)
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait(WRITING, self._write_timeout)

    def resume_writing(self) -> None:
        self._stop_waiting(WRITING)
        super().resume_writing()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            send_unchunked(self.cycle)

    def data_received(self, data: bytes) -> None:
        # an idle connection, whose own timer ends with the first byte
        if self.cycle is None or self.cycle.response_complete:
            self._wait(READING, self._read_timeout)
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.send_400_response(f"The headers have more than {MAX_HEADER_BYTES} bytes.")

    def handle_websocket_upgrade(self) -> None:
        self._stop_waiting(READING, WRITING)  # the connection is another protocol's from here on
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are not HTTP, in the form of all errors."""
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = msgspec.json.encode(error_body(status, message, code=code))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _wait(self, what: str, seconds: float) -> None:
        if what not in self._timers:
            self._timers[what] = self.loop.call_later(seconds, self._give_up, what, seconds)

    def _give_up(self, what: str, seconds: float) -> None:
        log.info(
            "%s: connection closed: the client did not %s within %g s",
            (self.client or ("-",))[0],
            what,
            seconds,
        )
        self._stop_waiting(READING, WRITING)
        if self._in_headers and (self.cycle is None or self.cycle.response_complete):
            self._refuse(408, f"the request did not arrive within {seconds:g} s", "request_timeout")
        else:
            self.transport.abort()  # closing would wait until the client has read what is written already

    def _stop_waiting(self, *whats: str) -> None:
        for what in whats:
            if (timer := self._timers.pop(what, None)) is not None:
                timer.cancel()


def send_unchunked(cycle: RequestResponseCycle) -> None:
    """Makes uvicorn send the answer as HTTP/1.0 knows it: its end is that of the connection, which uvicorn
    closes after such a request."""
    send, cycle.chunked_encoding = cycle.send, False

    async def unchunked(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = unchunked  # type: ignore[method-assign]


class BoundedSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, which by itself waits for ever for a client that does not read. It overrides
    uvicorn's internals, too."""

    def __init__(self, *arguments: Any, write_timeout: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._write_timeout = write_timeout
        self._timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._timer = self._timer or self.loop.call_later(self._write_timeout, self._give_up)

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        who = (self.client or ("-",))[0]
        log.info("%s: WebSocket closed: the client did not %s within %g s", who, WRITING, self._write_timeout)
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BodyLimit:
    """ASGI middleware: 413 for a body that says, or turns out, to be longer than `limit` bytes, and 415 for
    one that is compressed, whose length says nothing."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self.message = f"the body has more than {limit} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"").strip().lower().decode("latin-1")
        if encoding not in ("", "identity") and scope["method"] == "POST":
            message = f"Content-Encoding {encoding[:50]!r} is not supported: send the body as it is"
            refusal = Refusal(
                415, error_body(415, message, code=STATUS_CODES[415]), {"accept-encoding": "identity"}
            )
            await refusal(scope, receive, send)
            return
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self.limit:
            await Refusal(413, error_body(413, self.message, code=STATUS_CODES[413]))(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.limit:
                raise HTTPException(413, self.message)
            return message

        await self.app(scope, counted, send)
