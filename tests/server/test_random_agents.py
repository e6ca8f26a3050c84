"""Whatever a model writes, the three APIs take it back, streamed or whole, and the model then sees the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st

from mtpserve.text.tokenizer import Tokenizer
from tests import selection
from tests.server.conftest import events
from tests.server.speaking import checkpoint
from tests.server.test_messages import named
from tests.server.test_tool_blocks import FUNCTION, MESSAGES, RESPONSES, TOOL, USER
from tests.server.test_tools import CALL, CHAT, WEATHER, Server

ARGUMENTS = (
    '{"city": "Ulm"}', '{"city": "a\nb\tc"}', '{"city": "He said "hi" to me"}', '{"city": "Ul', "{}", "[]", "null", "7", '{"a": NaN}', "",
    '"{\\"city\\": \\"Ulm\\"}"', '{"city": "\\ud800"}',
)  # fmt: skip
NAMES = st.just("get_weather") | st.sampled_from(["a b", "é\n", "n" * 600])
PIECES = st.one_of(
    st.text(alphabet='ab \n\x00\x07"{}[]<>\\é:,', max_size=12),
    st.sampled_from(["<think>", "</think>", "<think>hm</think>", "<tool_call>", "</tool_call>", CALL, '<tool_call>{"name": "get_weather"']),
    st.tuples(NAMES, st.sampled_from(ARGUMENTS)).map(
        lambda call: f'<tool_call>\n{{"name": "{call[0]}", "arguments": {call[1]}}}\n</tool_call>'
    ),
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)
Turns = list[tuple[str, int]]  # what the model writes, and how many tokens it may


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


@dataclass
class Agent:
    """Asks, answers the calls, asks again. `rendered`: the last conversation as the template got it."""

    server: Server
    stream: bool
    history: list[dict[str, Any]] = field(default_factory=lambda: [USER])
    rendered: list[dict[str, Any]] = field(default_factory=list)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        tokenizer: Any = self.server.client.tokenizer
        render = tokenizer.render_chat

        def watched(messages: list[dict[str, Any]], **more: Any) -> Any:
            self.rendered = messages
            return render(messages, **more)

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.server.app), base_url="http://test") as http:
                return await http.post(path, json=fields | {"stream": self.stream})

        tokenizer.render_chat = watched
        try:
            answer = asyncio.run(ask())
        finally:
            del tokenizer.render_chat
        assert answer.status_code == 200, (answer.text, fields)
        return answer


def chat(agent: Agent, limit: int) -> None:
    answer = agent.post(CHAT, messages=agent.history, tools=[WEATHER], max_tokens=limit)
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    if not agent.stream:
        message |= {name: value for name, value in answer.json()["choices"][0]["message"].items() if value}
    for chunk in events(answer)[:-1] if agent.stream else []:
        for delta in (choice["delta"] for choice in chunk["choices"]):
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    message["tool_calls"].append(call | {"function": {"name": call["function"]["name"], "arguments": ""}})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "cold"} for call in message["tool_calls"]]
    agent.history += [message, *(results or [USER])]


def messages(agent: Agent, limit: int) -> None:
    answer = agent.post(MESSAGES, messages=agent.history, tools=[TOOL], max_tokens=limit)
    blocks: list[dict[str, Any]] = [] if agent.stream else answer.json()["content"]
    for _, data in named(answer.text) if agent.stream else []:
        if data["type"] == "content_block_start":
            blocks.append(data["content_block"] | {"json": ""})
        elif data["type"] == "content_block_delta":
            kind = data["delta"]["type"].removesuffix("_delta")
            if kind in ("text", "thinking"):
                blocks[-1][kind] += data["delta"][kind]
            blocks[-1]["json"] += data["delta"].get("partial_json", "")
    for block in blocks:
        if written := block.pop("json", ""):
            block["input"] = json.loads(written)
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "cold"} for block in blocks if block["type"] == "tool_use"]
    agent.history += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results} if results else USER]


def items(answer: httpx.Response, stream: bool) -> tuple[str, list[dict[str, Any]]]:
    """The id, and the items, as a client puts them together."""
    if not stream:
        return answer.json()["id"], answer.json()["output"]
    found = [data for _, data in named(answer.text)]
    done = [data["item"] for data in found if data["type"] == "response.output_item.done"]
    assert found[-1]["response"]["output"] == done
    for index, item in enumerate(done):
        text = "".join(data["delta"] for data in found if data["type"].endswith(".delta") and data["output_index"] == index)
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    return found[-1]["response"]["id"], done


def outputs(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = [item for item in output if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": "cold"} for call in calls] or [USER]


def responses(sent: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Agent, int], None]:
    def turn(agent: Agent, limit: int) -> None:
        fields: dict[str, Any] = {"tools": [FUNCTION], "max_output_tokens": limit, "include": ["reasoning.encrypted_content"]}
        _, output = items(agent.post(RESPONSES, input=agent.history, **fields), agent.stream)
        agent.history += [*map(sent, output), *outputs(output)]

    return turn


def going_on(agent: Agent, limit: int) -> None:
    """With the conversation that the server keeps: the first item says from where."""
    before = {"previous_response_id": agent.history[0]["id"]} if "id" in agent.history[0] else {}
    news = agent.history[1:] if before else agent.history
    id, output = items(agent.post(RESPONSES, input=news, tools=[FUNCTION], max_output_tokens=limit, **before), agent.stream)
    agent.history = [{"id": id}, *outputs(output)]


def sealed(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "content"} if item["type"] == "reasoning" else item


TURNS: dict[str, Callable[[Agent, int], None]] = {
    "messages": messages,
    "responses": responses(lambda item: item),
    "responses, references": responses(lambda item: {"type": "item_reference", "id": item["id"]}),
    "responses, sealed": responses(sealed),
    "responses, kept": going_on,
}


def seen(rendered: list[dict[str, Any]]) -> list[Any]:
    """Whose turn it was, and what was said: blanks between the parts of an answer are the APIs'."""
    turns: list[Any] = []
    for role, run in groupby(rendered, lambda message: message["role"]):
        said = list(run)
        texts = ["".join("".join(message.get(name) or "" for message in said).split()) for name in ("content", "reasoning_content")]
        calls = [call["function"] for message in said for call in message.get("tool_calls", [])]
        turns.append((role, *texts, [(call["name"], call["arguments"]) for call in calls]))
    return [turn for turn in turns if any(turn[1:])]


def conversation(tokenizer: Tokenizer, turns: Turns, turn: Callable[[Agent, int], None], stream: bool) -> list[Any]:
    agent = Agent(Server(tokenizer, *(text for text, _ in turns), "bye", reasoning="qwen3"), stream)
    for _, limit in [*turns, ("bye", 9)]:
        turn(agent, limit)
    return seen(agent.rendered)


@selection.examples(80)
@given(st.lists(st.tuples(TEXTS, st.integers(1, 60) | st.just(900)), min_size=1, max_size=3))
def test_whatever_a_model_writes_it_sees_again(tokenizer: Tokenizer, turns: Turns) -> None:
    expected = conversation(tokenizer, turns, chat, stream=False)
    assert conversation(tokenizer, turns, chat, stream=True) == expected
    for name, turn in TURNS.items():
        for stream in (False, True):
            assert conversation(tokenizer, turns, turn, stream) == expected, (name, stream)


def test_what_is_no_json_is_among_what_it_sees(tokenizer: Tokenizer) -> None:
    written = '{"city": "He said "hi" to me"}'
    turns = [(f'<think>hm</think>So: <tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>', 900)]
    told = [("assistant", "So:", "hm", [("get_weather", {"INVALID_JSON": written})]), ("tool", "cold", "", [])]
    assert conversation(tokenizer, turns, chat, stream=False)[1:] == told
