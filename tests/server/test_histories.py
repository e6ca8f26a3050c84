"""Conversations go on whatever is in them: calls that are no JSON, and what other servers' models have written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.speaking import checkpoint
from tests.server.test_messages import named
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
