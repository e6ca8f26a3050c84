"""OpenTelemetry: what spans say of streams, aborts and errors, and where they are sent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtpserve.config import ServerConfig
from mtpserve.core.errors import ConfigError
from mtpserve.server.app import create_app
from mtpserve.server.observe.tracing import GRPC, HTTP, protocol_of
from mtpserve.text.tokenizer import Tokenizer
from tests.server.collector import Collector, Span, over_grpc, over_http
from tests.server.fake_client import FakeClient
from tests.server.test_launch import launched

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FROM_CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BODY = {"prompt": "hello", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
DECODED = {
    "gen_ai.usage.completion_tokens": 9, "mtpserve.decode_steps": 4, "mtpserve.spec.drafts": 5,
    "mtpserve.spec.draft_tokens": 10, "mtpserve.spec.accepted_tokens": 4, "mtpserve.spec.accept_length": 1.8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=[over_http, over_grpc])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    with request.param() as found:
        yield found


Send = Callable[..., Any]


def sent(client: FakeClient, tokenizer: Tokenizer, collector: Collector, send: Send, **options: Any) -> tuple[list[Span], Any]:
    """The requests' spans after `send(http)`, and what it returned."""
    app = create_app(client, tokenizer, server_config=ServerConfig(otlp_traces_endpoint=collector.endpoint, **options))

    async def run() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test") as http:
            return await send(http)

    answer = asyncio.run(run())
    app.state.service.tracing.close()
    return collector.requests(), answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_child_of_the_clients_span(client: FakeClient, tokenizer: Tokenizer, collector: Collector, stream: bool) -> None:
    before = time.time_ns()
    headers = FROM_CLIENT | {"x-request-id": "mine"}
    (span,), answer = sent(
        client, tokenizer, collector, lambda http: http.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)
    )
    assert answer.status_code == 200
    assert (span.trace.hex(), span.parent.hex(), span.kind, span.failed) == (TRACE, PARENT, 2, False)
    (request,) = client.submitted
    expected = DECODED | {
        "gen_ai.response.model": "fake", "gen_ai.request.id": request.id, "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9, "gen_ai.request.top_k": 0, "gen_ai.request.n": 1,
        "gen_ai.request.stream": stream, "gen_ai.usage.prompt_tokens": len(request.prompt), "gen_ai.response.finish_reasons": ["length"],
        "http.route": "/v1/completions", "http.request.header.x-request-id": ["mine"], "mtpserve.engine": 0,
    }  # fmt: skip
    assert {name: value for name, value in span.attributes.items() if name in expected} == expected
    latency = {name.removeprefix("gen_ai.latency."): value for name, value in span.attributes.items() if "latency" in name}
    assert latency.keys() == {
        "e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference",
    }  # fmt: skip
    assert latency["e2e"] >= latency["time_to_first_token"] > 0
    children = collector.children(span)
    assert list(children) == ["queue", "prompt", "decode"] and {child.trace for child in children.values()} == {span.trace}
    assert before <= span.begin <= children["queue"].begin <= children["queue"].end == children["prompt"].begin
    assert children["prompt"].end == children["decode"].begin <= children["decode"].end <= span.end
    assert children["decode"].attributes == DECODED
    assert children["prompt"].attributes["gen_ai.usage.prompt_tokens"] == len(request.prompt)
    assert collector.resources[0]["service.name"] == "mtpserve" and set(collector.paths) <= {"/v1/traces"}


def test_requests_without_a_parent_have_traces_of_their_own(client: FakeClient, tokenizer: Tokenizer) -> None:
    with over_http() as collector:
        spans, _ = sent(
            client, tokenizer, collector, lambda http: http.post("/v1/completions", json=BODY | {"n": 2, "speculative": {"num_steps": 0}})
        )
    assert len(spans) == 2 and all(not span.parent for span in spans)
    assert len({span.trace for span in spans}) == 2


def test_a_client_that_leaves_and_one_that_is_refused(client: FakeClient, tokenizer: Tokenizer) -> None:
    async def leave(http: httpx.AsyncClient) -> None:
        client.pause = 0.01
        task = asyncio.create_task(http.post("/v1/completions", json=BODY | {"max_tokens": 4000, "stream": True}))
        while not client.engine.live or client.engine.stats.generation_tokens_total < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await http.post("/v1/completions", json=BODY | {"temperature": -1})).status_code == 400

    with over_http() as collector:
        (span,), _ = sent(client, tokenizer, collector, leave)  # what never reaches the engine is in the log and in no trace
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"] and not span.failed
    assert 0 < span.attributes["gen_ai.usage.completion_tokens"] < 4000 and "decode" in collector.children(span)


def test_failures_have_the_errors_class_and_no_text_of_the_client(client: FakeClient, tokenizer: Tokenizer) -> None:
    async def fail(http: httpx.AsyncClient) -> list[int]:
        client.pause = 0.05
        late = await http.post("/v1/completions", json=BODY | {"max_tokens": 4000, "timeout": 0.2})
        twice = [http.post("/v1/completions", json=BODY | {"rid": "my-secret-id"}) for _ in range(2)]
        statuses = {response.status_code for response in await asyncio.gather(*twice)}
        client.dead = "the engine process exited with code 1"
        return [late.status_code, *sorted(statuses), (await http.post("/v1/completions", json=BODY)).status_code]

    with over_http() as collector:
        spans, statuses = sent(client, tokenizer, collector, fail)
    assert statuses == [408, 200, 400, 503]
    assert [(span.failed, span.attributes.get("error.type")) for span in spans] == [(True, "DeadlineExceeded"), (False, None)]
    assert "secret" not in " ".join(span.status for span in spans)


def test_an_engine_that_dies_fails_the_spans_of_its_requests(client: FakeClient, tokenizer: Tokenizer) -> None:
    async def die(http: httpx.AsyncClient) -> int:
        client.pause = 0.01
        task = asyncio.create_task(http.post("/v1/completions", json=BODY | {"max_tokens": 4000}))
        while not client.engine.live:
            await asyncio.sleep(0.01)
        client.dead = "the engine process exited with code 1"
        return (await task).status_code

    with over_http() as collector:
        (span,), status = sent(client, tokenizer, collector, die)
    assert (status, span.failed, span.status, span.attributes["error.type"]) == (503, True, client.dead, "EngineDead")


def test_what_the_sampler_leaves_out_is_not_sent(client: FakeClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    unsampled = FROM_CLIENT["traceparent"][:-1] + "0"

    async def both(http: httpx.AsyncClient) -> None:
        await http.post("/v1/completions", json=BODY, headers={"traceparent": unsampled})
        await http.post("/v1/completions", json=BODY, headers={"traceparent": "nonsense"})

    with over_http() as collector:
        (span,), _ = sent(client, tokenizer, collector, both)
    assert span.trace.hex() != TRACE and not span.parent and collector.resources[0]["service.name"] == "chat"


def test_a_server_sends_its_last_spans_before_it_ends(checkpoint: Path) -> None:
    with (
        over_grpc() as collector,
        launched(checkpoint, "--enable-trace", "--otlp-traces-endpoint", f"grpc://{collector.endpoint}") as server,
    ):
        assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end(60)[0] == 0
        (span,) = collector.requests()
    assert span.attributes["mtpserve.spec.accepted_tokens"] == 4 and len(collector.children(span)) == 3


@pytest.mark.parametrize("scheme", ["grpc://", "http://"])
def test_a_collector_that_is_away_holds_nothing_up(checkpoint: Path, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    path = "/v1/traces" if scheme == "http://" else ""
    with launched(checkpoint, "--otlp-traces-endpoint", f"{scheme}127.0.0.1:{port}{path}") as server:
        assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.end(60)[0] == 0 and time.monotonic() - began < 15


@pytest.mark.parametrize(("endpoint", "env", "protocol"), [
    ("localhost:4317", {}, GRPC), ("http://collector:4317", {}, GRPC), ("grpc://[::1]:4317/", {}, GRPC), ("collector", {}, GRPC),
    ("http://collector:4318", {}, HTTP), ("https://traces.example/v1/traces", {}, HTTP),
    ("https://traces.example", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, HTTP),
    ("http://c:4318", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, GRPC),
])  # fmt: skip
def test_the_protocol_follows_the_environment_or_the_endpoint(endpoint: str, env: dict[str, str], protocol: str) -> None:
    assert ServerConfig(otlp_traces_endpoint=endpoint).traces_endpoint == endpoint
    assert protocol_of(endpoint, env) == protocol


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL must be grpc or http/protobuf, got 'http/json'"):
        protocol_of("x:1", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
