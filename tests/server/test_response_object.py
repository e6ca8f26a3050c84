"""A response as strictly typed clients read it: all of OpenAI's fields, whole, streamed and stored."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mtpserve.text.tokenizer import Tokenizer
from tests.server.speaking import checkpoint
from tests.server.test_errors import error, send
from tests.server.test_messages import named
from tests.server.test_response_items import ask as asked
from tests.server.test_tool_blocks import FUNCTION, RESPONSES, SAID, respond
from tests.server.test_tools import Server

# What the published specification requires beside what OpenAI's library does.
REQUIRED = (
    "completed_at", "presence_penalty", "frequency_penalty", "top_logprobs", "max_tool_calls", "service_tier", "safety_identifier",
    "prompt_cache_key", "truncation", "usage", "previous_response_id", "instructions", "error", "incomplete_details", "reasoning",
    "background",
)  # fmt: skip
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MORE: dict[str, Any] = {
    "tools": [FUNCTION, {"type": "function", "name": "now"}],
    "truncation": "auto",
    "max_tool_calls": 3,
    "service_tier": "flex",
    "safety_identifier": "me",
    "prompt_cache_key": "mine",
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


def check(response: dict[str, Any]) -> None:
    Response.model_validate(response)
    assert [name for name in REQUIRED if name not in response] == []
    assert all({"name", "description", "parameters", "strict"} <= tool.keys() for tool in response["tools"])


def test_a_response_has_all_fields(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, SAID, reasoning="qwen3")
    whole = respond(server, **MORE).json()
    check(whole)
    echoed = {name: whole[name] for name in MORE if name not in ("tools", "service_tier")}
    assert echoed == {name: MORE[name] for name in echoed} and whole["service_tier"] == "default"
    assert whole["created_at"] <= whole["completed_at"] and whole["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    check(asked(server.app, "GET", f"{RESPONSES}/{whole['id']}"))
    cut = respond(server, max_output_tokens=2).json()
    check(cut)
    assert (cut["status"], cut["completed_at"]) == ("incomplete", None)


def test_a_stream_has_all_fields_and_nothing_behind_them(tokenizer: Tokenizer) -> None:
    text = respond(Server(tokenizer, SAID, reasoning="qwen3"), **MORE, stream=True).text
    found = [data for _, data in named(text)]
    for data in found:
        EVENT.validate_python(data)
        if "response" in data:
            check(data["response"])
    assert found[0]["response"]["completed_at"] is None and found[-1]["response"]["completed_at"]
    assert "[DONE]" not in text


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority", "scale"])
@pytest.mark.parametrize(
    ("path", "body"), [(RESPONSES, {"input": "a", "max_output_tokens": 2}), ("/v1/completions", {"prompt": "a", "max_tokens": 2})]
)
def test_every_tier_is_served(http: httpx.AsyncClient, path: str, body: dict[str, Any], tier: str) -> None:
    assert send(http, "POST", path, json=body | {"service_tier": tier}).status_code == 200


def test_a_result_without_its_call_is_refused_in_openais_words(http: httpx.AsyncClient) -> None:
    result = {"type": "function_call_output", "call_id": "call_7", "output": "a"}
    call = {"type": "function_call", "call_id": "call_7", "name": "a", "arguments": "{}"}
    for items in ([result], [result, call]):
        refused = error(send(http, "POST", RESPONSES, json={"input": items}), 400)
        assert "No tool call found for function call output with call_id call_7." in refused["message"]
    assert send(http, "POST", RESPONSES, json={"input": [call, result], "max_output_tokens": 2}).status_code == 200
