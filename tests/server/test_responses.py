"""OpenAI's responses over a fake engine."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mtpserve.core.sampling import GrammarSpec
from mtpserve.server.chat.conversation import ChatMessage
from mtpserve.server.openai.responses.store import MAX_CHARACTERS, MAX_RESPONSES, ResponseStore, Stored
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.fake_engine import FIRST_TOKEN
from tests.server.test_errors import error, send
from tests.server.test_messages import named

ROUTE = "/v1/responses"
BODY: dict[str, Any] = {"model": "fake", "input": "hello", "max_output_tokens": 5}
IDS = list(range(FIRST_TOKEN, FIRST_TOKEN + 5))


def post(http: httpx.AsyncClient, **fields: Any) -> Any:
    response = send(http, "POST", ROUTE, json=BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_response_and_one_that_goes_on_from_it(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(IDS)
    first = post(http, instructions="be brief", metadata={"a": "b"})
    assert tokenizer.decode(client.submitted[0].prompt) == "system: be brief\nuser: hello\nassistant:"
    assert (first["object"], first["status"], first["incomplete_details"]) == ("response", "incomplete", {"reason": "max_output_tokens"})
    assert [part["text"] for item in first["output"] for part in item["content"]] == [text]
    assert first["usage"]["output_tokens"] == 5 and first["metadata"] == {"a": "b"}
    assert send(http, "GET", f"{ROUTE}/{first['id']}").json() == first
    post(http, input=[{"role": "user", "content": [{"type": "input_text", "text": "more"}]}], previous_response_id=first["id"])
    # Instructions are not inherited.
    assert tokenizer.decode(client.submitted[1].prompt) == f"user: hello\nassistant: {text}\nuser: more\nassistant:"
    assert send(http, "DELETE", f"{ROUTE}/{first['id']}").json()["deleted"] is True
    forgotten = post(http, store=False)
    for id in (first["id"], forgotten["id"], "resp_none"):
        for method, path in (("GET", f"{ROUTE}/{id}"), ("DELETE", f"{ROUTE}/{id}"), ("POST", f"{ROUTE}/{id}/cancel")):
            assert error(send(http, method, path), 404)["code"] == "response_not_found"
        refused = error(send(http, "POST", ROUTE, json=BODY | {"previous_response_id": id}), 400)
        assert (refused["param"], refused["code"]) == ("previous_response_id", "previous_response_not_found")
    stopped = post(http, max_output_tokens=None, temperature=0, text={"format": {"type": "json_schema", "name": "a", "schema": {}}})
    assert (stopped["status"], stopped["temperature"]) == ("incomplete", 0)  # the fake engine runs to the context's end
    assert client.submitted[-1].sampling.grammar == GrammarSpec("json_schema", "{}")


def test_a_stream_of_events(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    found = named(send(http, "POST", ROUTE, json=BODY | {"stream": True}).text)
    names = [name.removeprefix("response.") for name, _ in found]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert "".join(data["delta"] for name, data in found if name.endswith("delta")) == tokenizer.decode(IDS) == found[-4][1]["text"]
    assert found[0][1]["response"]["status"] == "in_progress" and found[0][1]["response"]["output"] == []
    assert send(http, "GET", f"{ROUTE}/{found[0][1]['response']['id']}").json() == found[-1][1]["response"]


@pytest.mark.parametrize("leaves", [False, True])
def test_one_that_is_cancelled(http: httpx.AsyncClient, app: FastAPI, client: FakeClient, leaves: bool) -> None:
    client.pause = 0.001

    async def ask() -> tuple[str, httpx.Response | None]:
        task = asyncio.create_task(http.post(ROUTE, json=BODY | {"stream": True, "max_output_tokens": 4000}))
        while not (client.engine.live and app.state.responses._by_id):
            await asyncio.sleep(0.005)
        (id,) = app.state.responses._by_id
        assert (await http.get(f"{ROUTE}/{id}")).json()["status"] == "in_progress"
        await asyncio.sleep(0.05)
        if leaves:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return id, None
        assert (await http.post(f"{ROUTE}/{id}/cancel")).json()["status"] == "cancelled"
        return id, await task

    id, stream = asyncio.run(ask())
    kept = send(http, "GET", f"{ROUTE}/{id}").json()
    assert kept["status"] == "cancelled" and kept["output"][0]["content"][0]["text"]
    assert stream is None or named(stream.text)[-1][1]["response"] == kept
    assert not client.engine.live
    assert send(http, "POST", f"{ROUTE}/{id}/cancel").status_code == 404


def test_one_that_fails(http: httpx.AsyncClient, app: FastAPI, client: FakeClient) -> None:
    client.pause = 0.05
    late = BODY | {"max_output_tokens": 4000, "timeout": 0.3}
    assert error(send(http, "POST", ROUTE, json=late), 408)["code"] == "deadline_exceeded"
    name, last = named(send(http, "POST", ROUTE, json=late | {"stream": True}).text)[-1]
    assert (name, last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "deadline_exceeded"
    assert [stored.object.status for stored in app.state.responses._by_id.values()] == ["failed", "failed"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/"}]}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "a", "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{"type": "function", "name": "a"}]}, "tool_choice"),  # auto, and nobody said how the model writes calls
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input"),
        ({"background": True}, "background"),
        ({"truncation": "always"}, "truncation"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"service_tier": "fast"}, "service_tier"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "input"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"reasoning": {"effort": "much"}}, "reasoning"),
        ({"stream_options": {}}, "stream_options"),
        ({"instructions": "\ud800"}, "instructions"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.AsyncClient, client: FakeClient, fields: dict[str, Any], param: str) -> None:
    content = json.dumps(BODY | fields).encode()  # half characters escaped
    assert error(send(http, "POST", ROUTE, content=content, headers={"content-type": "application/json"}), 400)["param"] == param
    assert not client.submitted


def test_what_is_kept_is_bounded() -> None:
    response: Any = SimpleNamespace(output=[])
    store, short = ResponseStore(), Stored(response, [ChatMessage(role="user", content="a")], [])
    for number in range(MAX_RESPONSES + 5):
        store.put(str(number), short)
    assert len(store._by_id) == MAX_RESPONSES and "4" not in store._by_id and "5" in store._by_id
    half = Stored(response, [ChatMessage(role="user", content="a" * (MAX_CHARACTERS // 2))], [])
    for name in ("one", "two", "two", "three"):
        store.put(name, half)
    assert list(store._by_id) == ["two", "three"] and store._characters == MAX_CHARACTERS // 2 * 2
    store.delete("two")
    store.delete("three")
    assert store._characters == 0
