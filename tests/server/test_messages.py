"""Anthropic's messages over a fake engine."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mtpserve.core.sampling import GrammarSpec
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.fake_engine import FIRST_TOKEN
from tests.server.test_errors import USER, error, send

ROUTE = "/v1/messages"
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 5, "messages": USER}
SCHEMA: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}
IDS = list(range(FIRST_TOKEN, FIRST_TOKEN + 5))


def named(text: str) -> list[tuple[str, Any]]:
    """Names and objects of a stream."""
    parts = [part.split("\n") for part in text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def test_a_message(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    response = send(http, "POST", ROUTE, json=BODY | {"system": system, "top_k": 3, "metadata": {"user_id": "me"}})
    message = response.json()
    prompt = client.submitted[0].prompt
    assert tokenizer.decode(prompt) == "system: be brief\nuser: hello\nassistant:"
    assert message["id"].startswith("msg_") and (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert message["content"] == [{"type": "text", "text": tokenizer.decode(IDS)}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert message["usage"] == {
        "input_tokens": len(prompt), "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 5,
    }  # fmt: skip
    assert client.submitted[0].sampling.top_k == 3
    counted = send(http, "POST", f"{ROUTE}/count_tokens", json={"model": "fake", "system": system, "messages": USER})
    assert counted.json() == {"input_tokens": len(prompt)}


def test_a_stream_of_events(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    found = named(send(http, "POST", ROUTE, json=BODY | {"stream": True}).text)
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(data["type"] == name for name, data in found)
    assert "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta") == tokenizer.decode(IDS)
    assert found[0][1]["message"]["content"] == [] and found[0][1]["message"]["stop_reason"] is None
    assert found[-2][1]["delta"]["stop_reason"] == "max_tokens" and found[-2][1]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_are_told(http: httpx.AsyncClient, tokenizer: Tokenizer, stream: bool) -> None:
    stop = tokenizer.decode([FIRST_TOKEN + 3])
    text = send(http, "POST", ROUTE, json=BODY | {"stop_sequences": ["never", stop], "stream": stream}).text
    told = named(text)[-2][1]["delta"] if stream else json.loads(text)
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)


def test_reasoning_and_the_beginning_of_an_answer(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    thought = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Well"}]
    body = BODY | {"messages": [*USER, {"role": "assistant", "content": thought}], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert send(http, "POST", ROUTE, json=body).status_code == 200
    assert tokenizer.decode(client.submitted[0].prompt).endswith("assistant: Well")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": {}}]}, "tool_choice"),  # auto, and nobody said how the model writes calls
        ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "a", "input": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "a", "input": {}}]}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"system": "\ud800"}, "system"),
        ({"top_k": 10**30}, "top_k"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"output_config": {"effort": "none"}}, "output_config"),
        ({"output_config": {"format": SCHEMA}, "output_format": SCHEMA}, "output_format"),
        ({"compaction": {}}, "compaction"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.AsyncClient, client: FakeClient, fields: dict[str, Any], param: str) -> None:
    assert error(send_raw(http, BODY | fields), 400)["param"] == param
    assert not client.submitted


@pytest.mark.parametrize("fields", [{"output_config": {"format": SCHEMA, "effort": "max"}}, {"output_format": SCHEMA}])
def test_a_schema_constrains_the_answer(http: httpx.AsyncClient, client: FakeClient, fields: dict[str, Any]) -> None:
    assert send(http, "POST", ROUTE, json=BODY | fields).status_code == 200
    assert client.submitted[0].sampling.grammar == GrammarSpec("json_schema", json.dumps(SCHEMA["schema"]))


def test_a_thread_is_refused_in_the_words_that_clients_recover_from(http: httpx.AsyncClient, client: FakeClient) -> None:
    """Their tool runner starts one unasked, and would go on from it with the last message alone."""
    refused = send(http, "POST", f"{ROUTE}?beta=true", json=BODY | {"thread": {"type": "create"}})
    told = refused.json()["error"]
    assert (refused.status_code, told["param"], told["details"]["error_code"]) == (400, "thread", "thread_unsupported_request")
    assert send(http, "POST", ROUTE, json=BODY | {"thread": None}).status_code == 200 and len(client.submitted) == 1


def test_models_in_the_form_of_its_clients(http: httpx.AsyncClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = send(http, "GET", "/v1/models", headers=headers).json()
    model = send(http, "GET", "/v1/models/fake", headers=headers).json()
    assert listed == {"data": [model], "has_more": False, "first_id": "fake", "last_id": "fake"}
    assert (model["type"], model["id"], model["display_name"]) == ("model", "fake", "fake")
    assert datetime.fromisoformat(model["created_at"]).tzinfo is not None
    assert send(http, "GET", "/v1/models").json()["object"] == "list"
    assert error(send(http, "GET", "/v1/models/other", headers=headers), 404)["code"] == "model_not_found"


def send_raw(http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """Half characters escaped, as JSON has them."""
    return send(http, "POST", ROUTE, content=json.dumps(body).encode(), headers={"content-type": "application/json"})


def test_errors_are_anthropics_too(http: httpx.AsyncClient, app: FastAPI) -> None:
    """In all layers: what `error` looks for is there in each of them."""
    assert error(send(http, "POST", ROUTE, json=BODY | {"model": "other"}), 404)["type"] == "not_found_error"
    assert error(send(http, "POST", ROUTE, content=b"{"), 400)["type"] == "invalid_request_error"
    assert error(send(http, "GET", ROUTE), 405)["code"] == "method_not_allowed"
    assert error(send(http, "POST", ROUTE, content=b" " * (9 << 20)), 413)["type"] == "request_too_large"
    app.state.service.draining = True
    response = send(http, "POST", ROUTE, json=BODY)
    assert error(response, 503)["type"] == "overloaded_error" and response.headers["retry-after"]
    app.state.service.draining = False
    app.state.service.tokenizer = None
    response = send(http, "POST", ROUTE, json=BODY)
    assert error(response, 500)["type"] == "api_error" and response.headers["x-request-id"]


def test_an_error_in_a_stream_is_an_event(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.pause = 0.05
    *_, (name, data) = named(send(http, "POST", ROUTE, json=BODY | {"stream": True, "max_tokens": 4000, "timeout": 0.3}).text)
    assert name == data["type"] == "error" and data["error"]["code"] == "deadline_exceeded"
    assert data["error"]["type"] == "invalid_request_error"
