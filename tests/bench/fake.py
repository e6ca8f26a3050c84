"""A clock that runs only while everybody waits, and a server whose answers are written in the test."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from mtpserve.tools.bench.dataset.asked import AskedTurn
from mtpserve.tools.bench.exported import ServerCounters
from mtpserve.tools.bench.serve.client import History
from mtpserve.tools.bench.serve.measured import Arrival, Measured, Sent

Made = TypeVar("Made")


class FakeClock:
    def __init__(self) -> None:
        self.time = 0.0
        self.behind = 0.0  # seconds that every sleep takes longer than it should
        self._sleeping: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleeping, (self.time + max(0.0, seconds) + (self.behind if seconds > 0 else 0), next(self._order), wake))
        await wake

    def run(self, made: Awaitable[Made]) -> Made:
        """`made` in this clock's time."""

        async def driven() -> Made:
            task = asyncio.ensure_future(made)
            while not task.done():
                for _ in range(20):
                    await asyncio.sleep(0)
                if self._sleeping and not task.done():
                    self.time, _, wake = heapq.heappop(self._sleeping)
                    wake.set_result(None)
            return task.result()

        return asyncio.run(driven())


class FakeClient:
    """Answers after `takes` seconds with `tokens` tokens, the first after `first`."""

    def __init__(self, clock: FakeClock, takes: float = 1.0, first: float = 0.25, tokens: int = 4) -> None:
        self.clock, self.takes, self.first, self.tokens = clock, takes, first, tokens
        self.asked: list[tuple[AskedTurn, History]] = []
        self.counted: list[ServerCounters | None] = []
        self.flushed: list[int] = []  # how many had been asked by then

    async def ask(self, turn: AskedTurn, history: History, planned: float, ready: float, category: str = "") -> Measured:
        self.asked.append((turn, history))
        at = self.clock.now()
        await self.clock.sleep(self.first)
        first = Arrival(self.clock.now(), 1)
        await self.clock.sleep(self.takes - self.first)
        end = self.clock.now()
        arrivals = (first, Arrival(end, self.tokens - 1))
        return Measured(
            Sent(planned, ready, at), end, arrivals=arrivals, output_tokens=self.tokens, max_tokens=turn.output, category=category, text="!"
        )

    async def counters(self) -> ServerCounters | None:
        return self.counted.pop(0) if self.counted else None

    async def flush_cache(self) -> None:
        self.flushed.append(len(self.asked))


def event(text: str | None = None, usage: int | None = None, **more: Any) -> bytes:
    """A chunk of /v1/completions. `usage`: tokens so far."""
    made: dict[str, Any] = {"choices": [] if text is None else [{"index": 0, "text": text, **more}]}
    if usage is not None:
        made["usage"] = {"prompt_tokens": 5, "completion_tokens": usage, "prompt_tokens_details": {"cached_tokens": 2}}
    return b"data: " + msgspec.json.encode(made) + b"\n\n"


def chat_event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + b"\n\n"


DONE = b"data: [DONE]\n\n"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def stream(request: web.Request, *parts: bytes, cut: bool = False) -> web.StreamResponse:
    """`cut`: the connection is closed without the response's end."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    if cut and request.transport is not None:
        request.transport.close()
    return response


@asynccontextmanager
async def serving(handler: Handler, metrics: Callable[[], str] | None = None) -> AsyncIterator[str]:
    """The URL of a server that answers both generating routes by `handler`."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "root": "/nowhere"}]})

    async def counters(_: web.Request) -> web.Response:
        return web.Response(text=metrics()) if metrics is not None else web.Response(status=404)

    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", counters)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")
