"""What a response was made from: its input items, page by page, and how many tokens an input has."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.speaking import checkpoint
from tests.server.test_errors import error, send
from tests.server.test_tool_blocks import ARGUMENTS, FUNCTION, RESPONSES, SAID, without_ids
from tests.server.test_tools import Server

COUNT = f"{RESPONSES}/input_tokens"


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


def ask(app: FastAPI, method: str, path: str, status: int = 200, **fields: Any) -> Any:
    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.request(method, path, json=fields) if method == "POST" else await http.request(method, path, params=fields)

    response = asyncio.run(answer())
    assert response.status_code == status, response.text
    return response.json()


def said(role: str, kind: str, text: str) -> dict[str, Any]:
    extra = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": "message", "status": "completed", "role": role, "content": [{"type": kind, "text": text} | extra]}


def test_the_items_that_a_response_was_made_from(speaking: Tokenizer) -> None:
    app = Server(speaking, SAID, "It is cold.", reasoning="qwen3").app
    first = ask(app, "POST", RESPONSES, input="hello", tools=[FUNCTION], instructions="be brief")
    listed = ask(app, "GET", f"{RESPONSES}/{first['id']}/input_items")
    assert [without_ids(item) for item in listed["data"]] == [said("user", "input_text", "hello")]
    assert (listed["object"], listed["has_more"]) == ("list", False) and listed["first_id"] == listed["last_id"] == listed["data"][0]["id"]
    calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
    results: list[dict[str, Any]] = [
        {"type": "function_call_output", "call_id": calls[0], "output": "cold"},
        {"type": "function_call_output", "call_id": calls[1], "output": [{"type": "input_text", "text": "cold"}], "id": "fco_mine"},
        {"role": "assistant", "content": "Well."},
        {"role": "developer", "content": [{"type": "input_text", "text": "Go"}, {"type": "text", "text": "on."}], "id": "fco_mine"},
    ]
    second = ask(app, "POST", RESPONSES, input=results, tools=[FUNCTION], previous_response_id=first["id"])
    items = ask(app, "GET", f"{RESPONSES}/{second['id']}/input_items", order="asc")["data"]
    assert items[0] == listed["data"][0] and items[1:5] == first["output"]
    done = {"type": "function_call_output", "status": "completed"}
    assert [without_ids(item) for item in items[5:7]] == [done | {"output": "cold"}, done | {"output": results[1]["output"]}]
    assert [item["call_id"] for item in items[5:7]] == calls and items[6]["id"] == "fco_mine"
    parts = [{"type": "input_text", "text": text} for text in ("Go", "on.")]
    assert [without_ids(item) for item in items[7:]] == [
        said("assistant", "output_text", "Well."),
        {"type": "message", "status": "completed", "role": "developer", "content": parts},
    ]
    assert len({item["id"] for item in items}) == len(items) == 9  # the client has given one id twice


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_items_come_in_pages(http: httpx.AsyncClient, order: str) -> None:
    given = [{"role": "user", "content": str(number)} for number in range(25)]
    id = send(http, "POST", RESPONSES, json={"input": given, "max_output_tokens": 1}).json()["id"]

    def page(**query: Any) -> Any:
        return send(http, "GET", f"{RESPONSES}/{id}/input_items", params={"order": order} | query).json()

    everything = page(limit=100)
    texts = [item["content"][0]["text"] for item in everything["data"]]
    assert texts == [str(number) for number in (range(25) if order == "asc" else reversed(range(25)))]
    ids = [item["id"] for item in everything["data"]]
    assert [item["id"] for item in page()["data"]] == ids[:20]  # as many as in OpenAI's API
    found, after = [], {}
    while True:
        part = page(limit=10, **after)
        assert (part["first_id"], part["last_id"]) == (part["data"][0]["id"], part["data"][-1]["id"])
        found += [item["id"] for item in part["data"]]
        after = {"after": part["last_id"]}
        if not part["has_more"]:
            break
    assert found == ids and len(part["data"]) == 5
    back = page(limit=10, before=ids[12])
    assert [item["id"] for item in back["data"]] == ids[2:12] and back["has_more"]
    between = page(after=ids[3], before=ids[6])
    assert [item["id"] for item in between["data"]] == ids[4:6] and not between["has_more"]
    nothing = page(after=ids[-1])
    assert nothing == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(("param", "value"), [
    ("limit", 0), ("limit", 101), ("limit", "x"), ("order", "up"), ("after", "msg_no"), ("before", "msg_no"),
])  # fmt: skip
def test_what_is_wrong_with_a_page(http: httpx.AsyncClient, param: str, value: Any) -> None:
    id = send(http, "POST", RESPONSES, json={"input": "a", "max_output_tokens": 1}).json()["id"]
    found = error(send(http, "GET", f"{RESPONSES}/{id}/input_items", params={param: value}), 400)
    assert found["param"] == param and found["message"].startswith(f"{param}: ")
    assert error(send(http, "GET", f"{RESPONSES}/resp_none/input_items"), 404)["code"] == "response_not_found"


def test_tokens_are_counted_as_the_prompt_has_them(speaking: Tokenizer) -> None:
    server = Server(speaking, "It is cold.", reasoning="qwen3")
    calling = [{"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": ARGUMENTS}]
    asked: dict[str, Any] = {"input": [{"role": "user", "content": "hello"}, *calling], "instructions": "be brief", "tools": [FUNCTION]}
    counted = ask(server.app, "POST", COUNT, **asked)
    first = ask(server.app, "POST", RESPONSES, **asked)
    assert counted == {"object": "response.input_tokens", "input_tokens": len(server.client.submitted[-1].prompt)}
    assert counted["input_tokens"] == first["usage"]["input_tokens"]
    more: dict[str, Any] = {"previous_response_id": first["id"], "input": "why?", "reasoning": {"effort": "high"}, "model": "fake"}
    more |= {"temperature": 7, "stream": True}  # no part of the prompt
    counted = ask(server.app, "POST", COUNT, **more)
    ask(server.app, "POST", RESPONSES, **more | {"temperature": 1, "stream": False})
    assert counted["input_tokens"] == len(server.client.submitted[-1].prompt)
    without = {name: value for name, value in more.items() if name != "input"}
    assert 0 < ask(server.app, "POST", COUNT, **without)["input_tokens"] < counted["input_tokens"]
    assert len(server.client.submitted) == 2  # nothing was generated for it


def test_counting_needs_no_parser_and_honours_the_choice_of_tools(http: httpx.AsyncClient) -> None:
    def count(**fields: Any) -> int:
        return int(send(http, "POST", COUNT, json={"input": "hello"} | fields).json()["input_tokens"])

    tools = [FUNCTION]
    assert count(tools=tools) > count() == count(tools=tools, tool_choice="none")


@pytest.mark.parametrize(("fields", "status", "param"), [
    ({}, 400, "input"), ({"input": 5}, 400, "input"), ({"model": "other", "input": "a"}, 404, "model"),
    ({"previous_response_id": "resp_no"}, 400, "previous_response_id"), ({"input": "a", "truncation": "no"}, 400, "truncation"),
    ({"input": "a", "conversation": "c"}, 400, "conversation"), ({"input": "a" * 40_000}, 400, "input"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
])  # fmt: skip
def test_what_cannot_be_counted(http: httpx.AsyncClient, client: FakeClient, fields: dict[str, Any], status: int, param: str) -> None:
    assert error(send(http, "POST", COUNT, json=fields), status)["param"] == param


def test_the_openai_client_lists_and_counts() -> None:
    command = [sys.executable, "-m", "tests.server.speaking", "It is cold."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            client: Any = openai.OpenAI(base_url=f"http://127.0.0.1:{int(process.stdout.readline())}/v1", api_key="none", timeout=30)
            first = client.responses.create(model="fake", input="hello")
            more = {"model": "fake", "input": "why?", "previous_response_id": first.id, "tools": [FUNCTION]}
            count = client.responses.input_tokens.count(**more)
            second = client.responses.create(**more)
            assert count.input_tokens == second.usage.input_tokens > first.usage.input_tokens
            items = list(client.responses.input_items.list(second.id, limit=1))  # page after page
            assert [item.content[0].text for item in items] == ["why?", "It is cold.", "hello"]
            assert [item.role for item in items] == ["user", "assistant", "user"] and items[1].id == first.output[0].id
        finally:
            process.kill()
