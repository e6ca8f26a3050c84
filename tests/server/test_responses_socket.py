"""Responses over a WebSocket: the whole server with a fake engine, a plain WebSocket client, and OpenAI's own."""

from __future__ import annotations

import base64
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.server.metric_text import without_model
from tests.server.test_launch import Server, free_port, launched
from tests.server.test_messages import named

LIMIT = 100_000
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with launched(checkpoint, "--max-request-bytes", str(LIMIT)) as started:
        yield started


def opened(server: Server, path: str = "/v1/responses", **more: Any) -> ClientConnection:
    beta = {"OpenAI-Beta": "responses_websockets=2026-02-06"}
    return connect(server.url.replace("http", "ws", 1) + path, additional_headers=beta | more.pop("headers", {}), open_timeout=30, **more)


def send(connection: ClientConnection, **fields: Any) -> None:
    connection.send(json.dumps({"type": "response.create", "model": "fake", "input": "hello", "max_output_tokens": 5} | fields))


def answer(connection: ClientConnection) -> list[dict[str, Any]]:
    """Events up to one that ends a response, or says why there is none."""
    found = [json.loads(connection.recv(timeout=30))]
    while found[-1]["type"] not in ENDS:
        found.append(json.loads(connection.recv(timeout=30)))
    return found


def ask(connection: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    send(connection, **fields)
    return answer(connection)


def refused(connection: ClientConnection, **fields: Any) -> dict[str, Any]:
    (event,) = ask(connection, **fields)
    assert event["type"] == "error"
    return dict(event["error"], status=event["status"])


def until(done: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def running(server: Server) -> float:
    found = re.search(r"^mtpserve_requests_running (\S+)$", without_model(httpx.get(f"{server.url}/metrics").text), re.MULTILINE)
    assert found
    return float(found[1])


def test_the_events_are_those_of_a_stream(server: Server) -> None:
    body = {"model": "fake", "input": "hello", "max_output_tokens": 5, "stream": True}
    streamed = named(httpx.post(f"{server.url}/v1/responses", json=body).text)
    with opened(server) as connection:
        for _ in range(2):
            found = ask(connection)
            assert [event["type"] for event in found] == [name for name, _ in streamed]
            assert [event.get("delta") for event in found] == [data.get("delta") for _, data in streamed]
            assert [event["sequence_number"] for event in found] == list(range(len(found))) and "stream_id" not in found[0]
        response = found[-1]["response"]
        assert httpx.get(f"{server.url}/v1/responses/{response['id']}").json() == response
        assert {event["stream_id"] for event in ask(connection, stream_id="left")} == {"left"}


def test_a_conversation_goes_on_without_being_stored(server: Server) -> None:
    with opened(server) as connection, opened(server) as other:
        first = ask(connection, store=False)[-1]["response"]
        second = ask(connection, store=False, input="more", previous_response_id=first["id"])[-1]["response"]
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        again = ask(connection, store=False, input="more", previous_response_id=first["id"])[-1]["response"]
        assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        for elsewhere in (first["id"], "resp_none"):
            found = refused(other, previous_response_id=elsewhere)
            assert (found["status"], found["code"], found["param"]) == (400, "previous_response_not_found", "previous_response_id")
        assert httpx.get(f"{server.url}/v1/responses/{first['id']}").status_code == 404
        kept = httpx.post(f"{server.url}/v1/responses", json={"input": "hello", "max_output_tokens": 5}).json()["id"]
        assert ask(other, previous_response_id=kept)[-1]["response"]["previous_response_id"] == kept


def test_a_prompt_is_computed_before_it_is_gone_on_from(server: Server) -> None:
    with opened(server) as connection:
        long = "one two three four " * 9
        found = ask(connection, input=[{"role": "user", "content": long}], generate=False, store=False, min_tokens=3)
        assert [event["type"] for event in found] == ["response.created", "response.in_progress", "response.completed"]
        warmed = found[-1]["response"]
        assert warmed["output"] == [] and warmed["usage"]["output_tokens"] == 0 < warmed["usage"]["input_tokens"]
        after = ask(connection, input=[{"role": "user", "content": "hello"}], previous_response_id=warmed["id"])[-1]["response"]
        assert after["usage"]["input_tokens_details"]["cached_tokens"] > 0 < after["usage"]["output_tokens"]
        nothing = {"type": "response.create", "instructions": "be brief", "generate": False}
        connection.send(json.dumps(nothing))  # no input at all
        assert answer(connection)[-1]["type"] == "response.completed"
        assert refused(connection, input=[])["param"] == "input"


WRONG: list[tuple[str | bytes, str | None, str]] = [
    ("{", None, "not valid JSON"),
    ("[]", None, "must be a JSON object"),
    ("[" * 100_000, None, "nested too deeply"),
    ("{}", "type", "events of type None"),
    (b'{"type": "response.steer"}', "type", "events of type 'response.steer'"),
    (json.dumps({"type": "response.create"}), "input", "input is empty"),
    (json.dumps({"type": "response.create", "input": 5}), "input", "a string or a list"),
    (json.dumps({"type": "response.create", "input": "a", "background": True}), "background", "background is not supported"),
    (json.dumps({"type": "response.create", "input": "a", "temperature": -1}), "temperature", "temperature"),
    (json.dumps({"type": "response.create", "input": "a", "max_output_tokens": 0}), "max_output_tokens", "max_output_tokens"),
    (json.dumps({"type": "response.create", "input": "a", "model": "other"}), "model", "does not exist"),
    (json.dumps({"type": "response.create", "input": "\ud800"}), "input", "input"),
    (json.dumps({"type": "response.create", "input": "a", "seed": 400}), "seed", "seed 400 is refused"),  # by the engine
]


def test_a_response_is_forgotten_after_a_request_that_could_not_continue_it(server: Server) -> None:
    result = [{"type": "function_call_output", "call_id": "missing", "output": "x"}]
    for store, code in ((False, "previous_response_not_found"), (True, None)):
        with opened(server) as connection:
            first = ask(connection, store=store)[-1]["response"]["id"]
            assert "No tool call found" in refused(connection, previous_response_id=first, store=store, input=result)["message"]
            last = ask(connection, previous_response_id=first, store=store)[-1]
            assert (last["error"]["code"] if last["type"] == "error" else None) == code, last


def test_what_is_wrong_is_said_and_the_connection_stays(server: Server) -> None:
    with opened(server) as connection:
        for message, param, text in WRONG:
            connection.send(message)
            (event,) = answer(connection)
            assert event["type"] == "error" and event["status"] in (400, 404), message
            assert event["error"]["param"] == param and text in event["error"]["message"], event
        assert refused(connection, seed=429) | {"message": ""} == {
            "message": "", "type": "rate_limit_error", "param": None, "code": "queue_full", "headers": {"Retry-After": "1"}, "status": 429,
        }  # fmt: skip
        assert ask(connection, stream_id="a", input=5)[0]["stream_id"] == "a"
        failed = ask(connection, seed=500, max_output_tokens=50)[-1]
        assert failed["type"] == "response.failed" and failed["response"]["error"]["message"] == "not a finite number"
        assert ask(connection)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("leaves", [False, True])
def test_an_answer_is_ended_by_its_client(server: Server, leaves: bool) -> None:
    with opened(server) as connection:
        send(connection, max_output_tokens=4000)
        created = json.loads(connection.recv(timeout=30))["response"]["id"]
        until(lambda: running(server) == 1)
        if not leaves:
            connection.send('{"type": "response.cancel"}')
            last = answer(connection)[-1]
            assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
            connection.send('{"type": "response.cancel"}')  # nothing is written any more
            assert ask(connection)[-1]["response"]["status"] == "incomplete"
    until(lambda: running(server) == 0)
    until(lambda: httpx.get(f"{server.url}/v1/responses/{created}").json()["status"] == "cancelled")


def test_messages_and_waiting_requests_are_bounded(server: Server) -> None:
    with opened(server) as connection:
        send(connection, max_output_tokens=4000)
        answered = [json.loads(connection.recv(timeout=30))]
        for _ in range(33):
            send(connection)
        while answered[-1]["type"] != "error":
            answered.append(json.loads(connection.recv(timeout=30)))
        assert answered[-1]["status"] == 429 and "32 requests wait" in answered[-1]["error"]["message"]
        connection.send('{"type": "response.cancel"}')
        assert [answer(connection)[-1]["response"]["usage"]["output_tokens"] for _ in range(33)][1:] == [5] * 32
        send(connection, max_output_tokens=4000)
        send(connection, input="a" * (LIMIT // 2))
        send(connection, input="a" * (LIMIT // 2))  # together too much
        while (event := json.loads(connection.recv(timeout=30)))["type"] != "error":
            pass
        assert event["error"]["code"] == "queue_full"
    with opened(server, max_size=None) as connection:
        send(connection, input="a" * LIMIT)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=30)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
    until(lambda: running(server) == 0)


def test_no_other_path_has_a_websocket(server: Server) -> None:
    for path in ("/v1/chat/completions", "/", "/v1/responses/a"):
        with pytest.raises(InvalidStatus) as found, opened(server, path):
            pass
        body = json.loads(found.value.response.body or b"")
        assert (
            found.value.response.status_code == 404
            and body["error"]["code"] == "not_found"
            and "x-request-id" in found.value.response.headers
        )
    assert httpx.get(f"{server.url}/v1/responses").status_code == 405


def test_who_may_open_one(checkpoint: Path) -> None:
    with launched(checkpoint, "--api-key", "secret", "--allowed-origins", "https://mine.example") as server:

        def status(key: str | None, origin: str | None, **headers: str) -> int:
            keyed = {} if key is None else {"Authorization": f"Bearer {key}"}
            try:
                with opened(server, origin=origin, headers=keyed | headers) as connection:
                    assert connection.response is not None and connection.response.headers["x-request-id"]
                    return 200 if ask(connection)[-1]["type"] == "response.incomplete" else 0
            except InvalidStatus as refusal:
                return refusal.response.status_code if json.loads(refusal.response.body or b"")["error"]["message"] else 0

        assert [status(key, None) for key in (None, "other", "secret")] == [401, 401, 200]
        assert status(None, None, **{"X-Api-Key": "secret"}) == 200
        own = server.url
        origins = (own, "https://mine.example", "https://other.example", "null", "https://mine.example.other.example")
        assert [status("secret", origin) for origin in origins] == [200, 200, 403, 403, 403]
        with opened(server, headers={"Authorization": "Bearer secret"}) as connection:
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(timeout=30)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        code, log = server.end(20)
        assert code == 0 and "WEBSOCKET /v1/responses 101" in log and "WEBSOCKET /v1/responses 401" in log
        assert "response.create 200" in log and "secret" not in log


def test_none_is_opened_while_the_model_loads(checkpoint: Path) -> None:
    port = free_port()
    with launched(checkpoint, "--port", str(port), ready=False, FAKE_ENGINE="slow") as server:
        server.url = f"http://127.0.0.1:{port}"

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listens)
        with pytest.raises(InvalidStatus) as found, opened(server):
            pass
        assert found.value.response.status_code == 503


def test_a_client_that_does_not_read_is_cut_off(checkpoint: Path) -> None:
    with launched(checkpoint, "--write-timeout", "1", FAKE_PAUSE="0") as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(30)
        slow.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
        key = base64.b64encode(bytes(16))
        head = b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        slow.sendall(head + b"Sec-WebSocket-Key: " + key + b"\r\n\r\n")
        assert slow.recv(12) == b"HTTP/1.1 101"
        event = json.dumps({"type": "response.create", "input": "a", "max_output_tokens": 4000}).encode()
        for _ in range(20):
            slow.sendall(bytes([0x81, 0x80 | len(event)]) + bytes(4) + event)  # masked with zeros
        log: list[str] = []
        threading.Thread(target=lambda: log.extend(server.process.stderr or []), daemon=True).start()
        until(lambda: any("WebSocket closed: the client did not read its answer within 1 s" in line for line in log))
        until(lambda: any("WEBSOCKET /v1/responses 101" in line for line in log) and running(server) == 0)
        assert sum("response.create" in line for line in log) < 20


def test_openais_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with client.responses.connect() as connection:
        previous: Any = openai.omit
        for said in ("hello", "more"):
            connection.response.create(model="fake", input=said, max_output_tokens=5, store=False, previous_response_id=previous)
            text = ""
            for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type == "response.incomplete":
                    previous = event.response.id
                    assert event.response.output_text == text != ""
                    break
        connection.response.create(model="other", input="hello")
        event = connection.recv()
        assert event.type == "error" and event.status == 404 and event.error.code == "model_not_found"
