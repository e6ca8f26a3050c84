"""Writing an answer while watching for the client's disconnect. Plain ASGI; knows nothing of what is written.

A disconnect is a message on `receive`, and it must be read while the engine computes, not when the next write
fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mtpserve.core.errors import MTPServeError
from mtpserve.server.http.errors import ClientGone, anthropics, describe, error_response, note
from mtpserve.server.http.rendering import Rendered

T = TypeVar("T")
COMMENT = b": waiting\n\n"  # event streams begin comments with a colon; clients skip them
WRITES_IN_A_ROW = 4
DONE = b"data: [DONE]\n\n"
# the latter: nginx would collect the chunks
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Pause:
    """Nothing came for a while."""


PAUSE = Pause()


def event(data: Rendered) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientGone raised, when the client disconnects first."""
    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class PausingIterator(Generic[T]):
    """Iterates over `objects`, with PAUSE whenever none came for `seconds`."""

    def __init__(self, objects: AsyncGenerator[T, None], seconds: float) -> None:
        self._objects, self._seconds = objects, seconds
        self._next: asyncio.Future[T] | None = None

    def __aiter__(self) -> PausingIterator[T]:
        return self

    async def __anext__(self) -> T | Pause:
        self._next = self._next or asyncio.ensure_future(anext(self._objects))
        done, _ = await asyncio.wait((self._next,), timeout=self._seconds)
        if not done:
            return PAUSE
        item, self._next = self._next, None
        return item.result()

    async def aclose(self) -> None:
        """Closes `objects`, which is only possible once they do not run."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._objects.aclose()


class EventStream(Response):
    """Server-sent events from a generator of lists of objects: an event for each, and one write for a list.

    The response starts with the first list, so that a request that is refused gets a status code. A failure
    after that is an `error` event, and no [DONE] follows: clients raise on it instead of taking the text for
    complete.
    """

    media_type = "text/event-stream"
    last = DONE

    def encoded(self, chunk: Any) -> bytes:
        return event(chunk)

    def failed(self, error: MTPServeError) -> Rendered:
        return describe(error)[1]

    def __init__(
        self,
        objects: AsyncGenerator[Sequence[Any], None],
        keep_alive: float = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`keep_alive`: seconds of silence after which a comment is sent; the response then starts with it.
        0: never. `headers`: beside those of every stream."""
        super().__init__(headers={**HEADERS, **(headers or {})})
        self._keep_alive = keep_alive
        del self.headers["content-length"]
        self._objects = objects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, written = False, 0
        objects, seconds = self._objects, self._keep_alive
        async with contextlib.aclosing(PausingIterator(objects, seconds) if seconds else objects) as batches:
            try:
                async for batch in batches:
                    if not started:
                        await send(
                            {
                                "type": "http.response.start",
                                "status": self.status_code,
                                "headers": self.raw_headers,
                            }
                        )
                        started = True
                    body = (
                        COMMENT
                        if isinstance(batch, Pause)
                        else b"".join([self.encoded(chunk) for chunk in batch])
                    )
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    written += 1
                    if written % WRITES_IN_A_ROW == 0:
                        # A backlog would be written without a pause, also to a client that has left:
                        # cancellation and other requests get their turn here.
                        await asyncio.sleep(0)
                last = self.last
            except MTPServeError as error:
                if not started:
                    await error_response(error)(scope, receive, send)
                    return
                note(scope, describe(error)[1])
                last = self.encoded(self.failed(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})


class NamedEventStream(EventStream):
    """Events with their objects' type as their name, and nothing after the last one: Anthropic's streams, and
    OpenAI's newer ones."""

    last = b""

    def failed(self, error: MTPServeError) -> Rendered:
        """Anthropic's: in OpenAI's streams of this kind a failure is an event of its own."""
        return anthropics(*describe(error))

    def encoded(self, chunk: Any) -> bytes:
        return f"event: {chunk.type}\n".encode() + event(chunk)
