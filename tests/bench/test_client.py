"""The client against a server whose answers are written here: streams, refusals, cut connections, options that a server does not know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from mtpserve.tools.bench.dataset.asked import AskedTurn
from mtpserve.tools.bench.serve.client import USAGE, BenchError, Client, History, Target
from mtpserve.tools.bench.serve.measured import Measured
from tests.bench.fake import DONE, Handler, event, serving, stream

ASKED = AskedTurn("say", 8, 5)
GOOD = (event("a", 1), event("b c", 3, finish_reason="length"), event(usage=3), DONE)
Use = Callable[[Client], Awaitable[Any]]


def against(handler: Handler, use: Use, *, metrics: Callable[[], str] | None = None, **changed: Any) -> Any:
    """What `use` returns for a client of a server with this handler."""

    async def all_of_it() -> Any:
        async with serving(handler, metrics) as url:
            target = replace(Target(url, "/v1/completions", False, "m"), **changed)
            async with Client(target) as client:
                return await use(client)

    return asyncio.run(all_of_it())


async def ask(client: Client, history: History | None = None) -> Measured:
    now = client.clock.now()
    return await client.ask(ASKED, history or History(), now, now, "c")


def recorded(bodies: list[dict[str, Any]], *parts: bytes) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json() | {"headers": request.headers})
        return await stream(request, *(parts or GOOD))

    return handle


def test_one_request() -> None:
    bodies: list[dict[str, Any]] = []
    body = {"temperature": 0.5, "ignore_eos": True}
    made = against(recorded(bodies), ask, body=body, headers={"Authorization": "Bearer k"}, id_prefix="run-")
    [sent] = bodies
    headers = sent.pop("headers")
    assert sent == {"model": "m", "prompt": "say", "max_tokens": 8, "stream": True, "stream_options": USAGE} | body
    assert headers["Authorization"] == "Bearer k" and headers["x-request-id"] == "run-0" and headers["Content-Type"] == "application/json"
    assert [arrival.tokens for arrival in made.arrivals] == [1, 2] and made.failure is None and made.text == "ab c"
    assert (made.prompt_tokens, made.output_tokens, made.cached_tokens, made.finish) == (5, 3, 2, "length")
    assert (made.meant, made.max_tokens, made.category) == (5, 8, "c")
    assert made.sent.planned_at <= made.sent.ready <= made.sent.at <= made.arrivals[0].time <= made.arrivals[1].time <= made.end


def test_conversations() -> None:
    bodies: list[dict[str, Any]] = []
    history = History().and_then("q", "a")
    for changed in ({}, {"chat": True, "endpoint": "/v1/chat/completions"}):
        against(recorded(bodies), lambda client: ask(client, history), **changed)
    assert bodies[0]["prompt"] == "qasay"
    said = [("user", "q"), ("assistant", "a"), ("user", "say")]
    assert bodies[1]["messages"] == [{"role": role, "content": text} for role, text in said]


def test_token_ids_are_sent_as_they_are() -> None:
    bodies: list[dict[str, Any]] = []
    against(recorded(bodies), lambda client: client.ask(AskedTurn((5, 6), None), History(), 0.0, 0.0))
    assert bodies[0]["prompt"] == [5, 6] and "max_tokens" not in bodies[0]


def test_without_streaming() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert "stream_options" not in await request.json()
        usage = {"prompt_tokens": 5, "completion_tokens": 7}
        return web.json_response({"choices": [{"text": "abc", "finish_reason": "stop"}], "usage": usage})

    made = against(handle, ask, stream=False)
    assert (made.output_tokens, made.text, made.ttft, made.tpot, made.failure) == (7, "abc", None, None, None) and made.e2e > 0


@pytest.mark.parametrize(
    ("status", "body", "reason", "detail"),
    [
        (429, '{"error": {"message": "full"}}', "HTTP 429", "full"),
        (503, "later", "HTTP 503", "later"),
        (404, "", "HTTP 404", ""),
        (400, '{"error": {"message": "no such model"}}', "HTTP 400", "no such model"),
    ],
)
def test_refusals(status: int, body: str, reason: str, detail: str) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    made = against(handle, ask)
    assert made.failure is not None and (made.failure.reason, made.failure.detail) == (reason, detail)
    assert made.arrivals == () and made.output_tokens == 0


@pytest.mark.parametrize(
    ("parts", "cut", "reason"),
    [
        ((event("a", 1), b'data: {"error": {"message": "x"}}\n\n', DONE), False, "error in the answer"),
        ((event("a", 1),), True, "disconnected"),
        ((event("a", 1),), False, "ended in the middle of the answer"),
        ((DONE,), False, "no tokens in the answer"),
    ],
)
def test_streams_that_go_wrong(parts: tuple[bytes, ...], cut: bool, reason: str) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await stream(request, *parts, cut=cut)

    made = against(handle, ask)
    assert made.failure is not None and made.failure.reason == reason


def test_no_error_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.tools.bench.serve.stream.AnswerReader.feed", lambda *_: 1 / 0)
    made = against(recorded([]), ask)
    assert made.failure is not None and (made.failure.reason, made.failure.detail) == ("ZeroDivisionError", "division by zero")


def test_nobody_there() -> None:
    async def use() -> Measured:
        async with Client(Target("http://127.0.0.1:1", "/v1/completions", False, "m")) as client:
            with pytest.raises(BenchError, match=r"no server is ready at http://127\.0\.0\.1:1: Connection refused"):
                await client.wait_until_ready(0.0)
            assert await client.counters() is None
            return await ask(client)

    failure = asyncio.run(use()).failure
    assert failure is not None and failure.reason == "cannot connect"


@pytest.mark.parametrize(
    ("unknown", "left"), [("continuous_usage_stats", {"include_usage": True}), ("stream_options", None)], ids=["continuous", "any"]
)
def test_options_that_the_server_does_not_know_are_left_out(unknown: str, left: object) -> None:
    bodies: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if unknown in str(bodies[-1].get("stream_options", {})) + " ".join(bodies[-1]):
            return web.json_response({"error": {"message": f"unknown field {unknown}"}}, status=400)
        return await stream(request, event("abcd"), event("ef"), event(usage=3), DONE)

    async def twice(client: Client) -> list[Measured]:
        return [await ask(client), await ask(client)]

    made = against(handle, twice)
    assert [each.failure for each in made] == [None, None] and [arrival.tokens for arrival in made[0].arrivals] == [2, 1]
    assert bodies[-1].get("stream_options") == left == bodies[-2].get("stream_options"), "the second request asks rightly at once"


def test_counters_are_read_until_they_rest() -> None:
    values = iter(["1", "2", "3", "3", "4"])
    counters = against(recorded([]), lambda client: client.counters(), metrics=lambda: f"mtpserve_generation_tokens_total {next(values)}\n")
    assert counters.generated == 3
    assert against(recorded([]), lambda client: client.counters()) is None


def test_models_and_readiness() -> None:
    async def use(client: Client) -> object:
        await client.wait_until_ready(1.0)
        with pytest.raises(BenchError, match="neither /flush_cache nor /reset_prefix_cache"):
            await client.flush_cache()
        return await client.models()

    [model] = against(recorded([]), use)
    assert (model.id, model.root) == ("fake", "/nowhere")
