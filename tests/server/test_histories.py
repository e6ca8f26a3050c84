"""Conversations go on whatever is in them: calls that are no JSON, and what other servers' models have written."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.speaking import checkpoint
from tests.server.test_errors import error, send
from tests.server.test_messages import named
from tests.server.test_response_items import ask as asked
from tests.server.test_tool_blocks import FUNCTION, MESSAGES, RESPONSES, TOOL, ask, post, respond
from tests.server.test_tools import CHAT, USER, WEATHER, Server

CUT, UNQUOTED = '{"city": "Ul', '{"city": "He said "hi" to me"}'
BROKEN = (CUT, UNQUOTED, "[]", '["Ulm"]', "7", '{"city": NaN}', "Ulm", "[" * 2000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


def going_on(path: str, arguments: Any) -> dict[str, Any]:
    """A conversation in which the model called a tool with these arguments, for a route."""
    if path == CHAT:
        call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "c1", "content": "no JSON"}
        return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result], "tools": [WEATHER]}
    if path == RESPONSES:
        called = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": arguments}
        return {"input": [USER, called, {"type": "function_call_output", "call_id": "c1", "output": "no JSON"}], "tools": [FUNCTION]}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "get_weather", "input": arguments}]}
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "no JSON"}]}
    return {"messages": [USER, used, results], "tools": [TOOL], "max_tokens": 9}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        *((text, f"INVALID_JSON = {text}") for text in BROKEN),
        *((value, "") for value in (None, "", "null", {}, "{}")),
        (["Ulm"], 'INVALID_JSON = ["Ulm"]'),
        ({"city": "Ulm"}, "city = Ulm"),
        ('{"city": "a\nb"}', "city = a\nb"),
    ],
)
def test_calls_that_are_no_json_are_shown_to_the_model(tokenizer: Tokenizer, path: str, arguments: Any, shown: str) -> None:
    server = Server(tokenizer, "a")
    post(server, path, **going_on(path, arguments))
    call = f"{shown}\n" if shown else ""
    assert f"assistant: \n{call}toolc1: no JSON\nassistant ():" in server.prompt().replace("\n\n", "\n")


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"city": "a\nb\tc"}', '{"city": "a\\nb\\tc"}'),
        ('{\n"city": "a \\\nb"}', '{\n"city": "a \\\\\\nb"}'),  # a shell's line that goes on
        (json.dumps('{"city": "a\nb"}'), '{"city": "a\\nb"}'),  # as a text
    ],
)
def test_line_breaks_in_strings_are_escaped(tokenizer: Tokenizer, step: int, written: str, told: str) -> None:
    server = Server(tokenizer, f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>', step=step)
    call = server.choice(tools=[WEATHER])["message"]["tool_calls"][0]
    assert call["function"]["arguments"] == told and json.loads(told)
    deltas = [choice["delta"] for chunk in events(server.post(tools=[WEATHER], stream=True))[:-1] for choice in chunk["choices"]]
    assert "".join(call["function"].get("arguments", "") for delta in deltas for call in delta.get("tool_calls", [])) == told


@pytest.mark.parametrize("eager", [False, True])
def test_a_messages_stream_has_the_same_input_as_the_whole_message(tokenizer: Tokenizer, eager: bool) -> None:
    server = Server(tokenizer, f'<tool_call>{{"name": "get_weather", "arguments": {UNQUOTED}}}</tool_call>')
    tools = [TOOL | ({"eager_input_streaming": True} if eager else {})]
    whole = ask(server, tools=tools).json()
    assert (whole["stop_reason"], whole["content"][0]["input"]) == ("tool_use", {"INVALID_JSON": UNQUOTED})
    found = [data["delta"] for _, data in named(ask(server, tools=tools, stream=True).text) if data["type"] == "content_block_delta"]
    pieces = [delta["partial_json"] for delta in found]
    assert "".join(pieces) == UNQUOTED if eager else json.loads("".join(pieces)) == {"INVALID_JSON": UNQUOTED}
    assert len([piece for piece in pieces if piece]) == 1 or eager  # a part of it may look like another call


def test_a_stored_response_has_its_calls_that_are_no_json(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, f'<tool_call>{{"name": "get_weather", "arguments": {UNQUOTED}}}</tool_call>', "a")
    first = respond(server).json()
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "no JSON"}
    respond(server, previous_response_id=first["id"], input=[result])
    assert f"INVALID_JSON = {UNQUOTED}\n" in server.prompt()
    assert server.prompt().index("INVALID_JSON") < server.prompt().index("no JSON")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}
PLAIN = {"type": "document", "title": "notes.txt", "source": {"type": "text", "media_type": "text/plain", "data": "it rains"}}
PAPER = {"type": "document", "title": "paper.pdf", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGVsbG8="}}
FOUND = {"type": "search_result", "source": "http://a/b", "title": "Ulm", "content": [{"type": "text", "text": "it snows"}]}
WEB = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "title": "t", "url": "u"}]}
WEB_USE = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "Ulm"}}
UNSEEN = "this model cannot see it]"
SEEN_PARTS: list[tuple[dict[str, Any], str]] = [
    (IMAGE, f"[image: {UNSEEN}"),
    (PAPER, f"[document paper.pdf: {UNSEEN}"),
    (PLAIN, "notes.txt\nit rains"),
    (FOUND, "Ulm http://a/b\nit snows"),
    ({"type": "tool_reference", "tool_name": "get_weather"}, f"[tool_reference get_weather: {UNSEEN}"),
    ({"type": "input_image", "image_url": "data:image/png;base64,aGVsbG8="}, f"[image: {UNSEEN}"),
    ({"type": "input_file", "filename": "a.pdf", "file_data": "aGVsbG8="}, f"[file a.pdf: {UNSEEN}"),
    ({"type": "image_url", "image_url": {"url": "http://a/b"}}, f"[image_url: {UNSEEN}"),
]


def with_result(path: str, *content: dict[str, Any]) -> dict[str, Any]:
    """A conversation in which a tool answered so."""
    body = going_on(path, {})
    result = body["messages" if path != RESPONSES else "input"][-1]
    place, field = (result["content"][0], "content") if path == MESSAGES else (result, "output" if path == RESPONSES else "content")
    place[field] = list(content)
    return body


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("part", "shown"), SEEN_PARTS)
def test_a_tools_result_that_is_no_text_is_named(tokenizer: Tokenizer, path: str, part: dict[str, Any], shown: str) -> None:
    server = Server(tokenizer, "a")
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "look:"}
    post(server, path, **with_result(path, text, part))
    assert f"toolc1: look:\n{shown}\nassistant" in server.prompt()


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("part", [IMAGE, PAPER, SEEN_PARTS[-1][0], SEEN_PARTS[-3][0], {"type": "text"}])
def test_what_the_user_shows_is_refused_by_name(http: httpx.AsyncClient, path: str, part: dict[str, Any]) -> None:
    asked = {"role": "user", "content": [part]}
    body = {"input": [asked]} if path == RESPONSES else {"messages": [asked], "max_tokens": 9}
    refused = error(send(http, "POST", path, json=body), 400)
    assert refused["param"] == ("input" if path == RESPONSES else "messages") and repr(part["type"]) in refused["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_picture_behind_a_tools_result_is_the_tools(tokenizer: Tokenizer, http: httpx.AsyncClient, path: str) -> None:
    """Agents send a tool's pictures so where a result may only have text."""
    server = Server(tokenizer, "a")
    body = going_on(path, {})
    messages = body["input" if path == RESPONSES else "messages"]
    if path == MESSAGES:
        messages[-1]["content"].append(IMAGE)
    else:
        messages += [{"role": "system", "content": "Look."}] if path == CHAT else []  # as pydantic-ai does
        messages.append({"role": "user", "content": [IMAGE]})
    post(server, path, **body)
    assert f"user: [image: {UNSEEN}\nassistant" in server.prompt()
    messages.append({"role": "user", "content": [IMAGE]})
    error(send(http, "POST", path, json=body), 400)


def test_documents_in_plain_text_are_text(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "a")
    ask(server, messages=[{"role": "user", "content": [PLAIN, FOUND, {"type": "text", "text": "so?"}]}])
    assert "user: notes.txt\nit rains\nUlm http://a/b\nit snows\nso?\nassistant" in server.prompt()


def test_what_anthropics_own_tools_did_is_named(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "a")
    said = [
        {"type": "text", "text": "I look."},
        WEB_USE,
        WEB,
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": {"error_code": "x"}},
    ]
    ask(server, messages=[USER, {"role": "assistant", "content": said}, USER])
    note = f"[web_search_tool_result: {UNSEEN}"
    assert f"assistant: I look.\n[server_tool_use web_search: {UNSEEN}\n{note}\n{note}\nuser: hello" in server.prompt()


def test_a_refusal_is_what_the_model_said(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "a")
    part = {"type": "refusal", "refusal": "No."}
    for refused in ({"content": [part]}, {"content": None, "refusal": "No."}):
        post(server, CHAT, messages=[USER, {"role": "assistant"} | refused, USER])
        assert "assistant: No.\nuser: hello" in server.prompt()
    respond(server, input=[USER, {"role": "assistant", "content": [part]}, USER])
    assert "assistant: No.\nuser: hello" in server.prompt()


def test_calls_of_other_kinds_of_tools_are_calls(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "a")
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    post(server, CHAT, messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result])
    assert "assistant: \ninput = *** Begin\ntoolc1: done\n" in server.prompt()
    items = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin", "status": "completed"},
        {"type": "local_shell_call", "call_id": "c2", "id": "lsh_1", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "a b", "stderr": ""}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "Ulm"}},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "message", "role": "user", "content": "so?"},
    ]
    first = respond(server, input=items).json()
    prompt = server.prompt()
    assert "input = *** Begin\n" in prompt and "command': ['ls']" in prompt
    assert 'toolc1: done\ntoolc2: [{"stdout": "a b", "stderr": ""}]\n' in prompt
    assert (
        f"assistant: [web_search_call Ulm: {UNSEEN}\n" in prompt
        and f"assistant: [compaction: {UNSEEN}\n" in prompt
        and "gAAAA" not in prompt
    )
    kinds = [item["type"] for item in asked(server.app, "GET", f"{RESPONSES}/{first['id']}/input_items", order="asc")["data"]]
    assert kinds == ["function_call"] * 2 + ["function_call_output"] * 2 + ["message"] * 3
