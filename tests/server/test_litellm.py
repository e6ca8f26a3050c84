"""Claude Code through LiteLLM, as LiteLLM 1.106 sends it on: unchanged to /v1/messages, and translated to chat completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from mtpserve.config import ServerConfig
from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.server.speaking import checkpoint
from tests.server.test_agents import COMMAND, calling
from tests.server.test_messages import named
from tests.server.test_tools import Server, streamed

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
MARK = {"cache_control": {"type": "ephemeral"}}
ASKED = {"type": "text", "text": "say hello", **MARK}
USED = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "echo hello"}}
THOUGHT = {"type": "thinking", "thinking": "I call it.", "signature": ""}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "hello"}], **MARK}
CALLED = {"id": "toolu_1", "type": "function", "function": {"name": "Bash", "arguments": '{"command": "echo hello"}'}}
SENT: dict[str, dict[str, Any]] = {
    MESSAGES: {
        "messages": [
            {"role": "user", "content": [ASKED]},
            {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "Let me see."}, USED]},
            {"role": "user", "content": [RESULT]},
        ],
        "max_tokens": 400, "model": "fake", "metadata": {"user_id": "u"}, "stream": True,
        "system": [{"type": "text", "text": "You write programs.", **MARK}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "Bash", "description": "runs a command", "input_schema": COMMAND, **MARK}],
    },
    CHAT: {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "You write programs."}]},
            {"role": "user", "content": [{"type": "text", "text": "say hello"}]},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALLED], "reasoning_content": "I call it."},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "hello"},
        ],
        "max_tokens": 400, "model": "fake", "reasoning_effort": "low", "stream": True, "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "Bash", "description": "runs a command", "parameters": COMMAND}}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


def post(app: Any, path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post(path, json=SENT[path])

    answer = asyncio.run(ask())
    assert answer.status_code == 200, answer.text
    return answer


def test_both_ways_lead_to_one_prompt(tokenizer: Tokenizer) -> None:
    prompts = []
    for path in (MESSAGES, CHAT):
        server = Server(tokenizer, "Done.", reasoning="qwen3")
        post(server.app, path)
        prompts.append(server.prompt().partition("assistant (")[0])
    assert prompts[0] == prompts[1]
    assert prompts[0].endswith("user: say hello\nassistant: Let me see.\ncommand = echo hello\ntooltoolu_1: hello\n")


@pytest.mark.parametrize("step", [1, 7])
def test_thinking_and_a_streamed_call(tokenizer: Tokenizer, step: int) -> None:
    found = named(post(Server(tokenizer, calling("Bash"), reasoning="qwen3", step=step).app, MESSAGES).text)
    blocks = [data["content_block"]["type"] for _, data in found if data["type"] == "content_block_start"]
    deltas = [data["delta"] for _, data in found if data["type"] == "content_block_delta"]
    assert blocks == ["thinking", "text", "tool_use"] and found[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert "".join(delta.get("thinking", "") for delta in deltas) == "I call it."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"command": "echo hello"}
    response = post(Server(tokenizer, calling("Bash"), reasoning="qwen3", step=step).app, CHAT)
    chat = streamed(response)
    assert (chat["reasoning_content"], chat["finish_reason"]) == ("I call it.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in chat["tool_calls"]] == [("Bash", {"command": "echo hello"})]
    usage = events(response)[-2]["usage"]
    assert usage["completion_tokens"] == found[-2][1]["usage"]["output_tokens"] > 0
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_what_was_cached_is_told(tokenizer: Tokenizer) -> None:
    app = create_app(FakeClient(), tokenizer, server_config=ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"))
    first, second = (named(post(app, MESSAGES).text)[-2][1]["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0 < second["cache_read_input_tokens"]
    assert first["input_tokens"] == second["input_tokens"] + second["cache_read_input_tokens"]
    assert first["cache_creation_input_tokens"] == second["cache_creation_input_tokens"] == 0  # LiteLLM adds it up
    usage = events(post(app, CHAT))[-2]["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
