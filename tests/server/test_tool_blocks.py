"""Tools and reasoning in OpenAI's responses and Anthropic's messages: there and back, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mtpserve.text.tokenizer import Tokenizer
from tests.server.speaking import checkpoint
from tests.server.test_messages import named
from tests.server.test_tools import CALL, CITY, Server

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SAID = f"<think>hm</think>Let me see. {CALL}\n{CALL}"
ARGUMENTS = '{"city": "Ulm"}'
FUNCTION = {"type": "function", "name": "get_weather", "description": "the weather", "parameters": CITY}
TOOL = {"name": "get_weather", "description": "the weather", "input_schema": CITY}
SHOWN = 'tool: {"type": "function", "function": {"name": "get_weather", "description": "the weather", "parameters":'
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


def post(server: Server, path: str, **fields: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test") as http:
            return await http.post(path, json=fields)

    answer = asyncio.run(ask())
    assert answer.status_code == 200, answer.text
    return answer


def respond(server: Server, **fields: Any) -> httpx.Response:
    return post(server, RESPONSES, **{"input": "hello", "tools": [FUNCTION]} | fields)


def ask(server: Server, **fields: Any) -> httpx.Response:
    return post(server, MESSAGES, **{"max_tokens": 400, "messages": [USER], "tools": [TOOL]} | fields)


def without_ids(item: Any) -> Any:
    """Each id is random."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_a_response_has_an_item_for_each_part(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, SAID, reasoning="qwen3")
    answer = respond(server).json()
    assert SHOWN in server.prompt()
    assert (answer["status"], answer["tools"], answer["tool_choice"]) == ("completed", [FUNCTION | {"strict": None}], "auto")
    call = {"type": "function_call", "status": "completed", "name": "get_weather", "arguments": ARGUMENTS}
    part = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    assert [without_ids(item) for item in answer["output"]] == [
        {"type": "reasoning", "status": "completed", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "status": "completed", "role": "assistant", "content": [part]},
        call,
        call,
    ]
    ids = [item[name] for item in answer["output"] for name in ("id", "call_id") if name in item]
    assert len(set(ids)) == len(ids) == 6
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < answer["usage"]["output_tokens"]


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_a_responses_stream_adds_up(tokenizer: Tokenizer, step: int) -> None:
    found = [data for _, data in named(respond(Server(tokenizer, SAID, reasoning="qwen3", step=step), stream=True).text)]
    assert [data["sequence_number"] for data in found] == list(range(len(found)))
    output = found[-1]["response"]["output"]
    assert found[-1]["type"] == "response.completed" and len(output) == 4
    texts, order = ["", "", "", ""], []
    for data in found[2:-1]:
        index = data["output_index"]
        if data["type"].endswith(".delta"):
            texts[index] += data["delta"]
            assert data["item_id"] == output[index]["id"]
        elif data["type"].startswith("response.output_item."):
            order.append((index, data["type"].rsplit(".", 1)[1]))
            whole = data["type"].endswith(".done")
            assert data["item"] == output[index] if whole else without_ids(data["item"])["status"] == "in_progress"
    assert order == [(index, kind) for index in range(4) for kind in ("added", "done")]
    assert texts == ["hm", "Let me see.", ARGUMENTS, ARGUMENTS]
    done = [data for data in found if data["type"] == "response.function_call_arguments.done"]
    assert [(data["name"], data["arguments"]) for data in done] == [("get_weather", ARGUMENTS)] * 2


@pytest.mark.parametrize("kept", [True, False])
def test_results_go_back_to_a_response(tokenizer: Tokenizer, kept: bool) -> None:
    server = Server(tokenizer, SAID, "7 degrees", reasoning="qwen3")
    first = respond(server).json()
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "cold"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    before = {"previous_response_id": first["id"], "input": results}
    respond(server, **(before if kept else {"input": [USER, *first["output"], *results]}))
    ids = [result["call_id"] for result in results]
    told = "assistant: Let me see.\ncity = Ulm\ncity = Ulm\n"
    assert server.prompt().split("user: hello\n")[1].startswith(told + f"tool{ids[0]}: cold\ntool{ids[1]}: cold\nassistant")


def test_a_call_that_was_cut_off_is_told_and_gone_on_from(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, CALL, "a")
    cut = len(tokenizer.encode(CALL.split("Ulm")[0], special=False))
    first = respond(server, max_output_tokens=cut).json()
    (item,) = first["output"]
    assert (first["status"], item["status"], item["type"]) == ("incomplete", "incomplete", "function_call")
    assert ARGUMENTS.startswith(item["arguments"]) and item["arguments"] != ARGUMENTS
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "no JSON"}]
    respond(server, previous_response_id=first["id"], input=results)
    assert f"INVALID_JSON = {item['arguments']}\n" in server.prompt()
    message = ask(Server(tokenizer, CALL), max_tokens=cut).json()
    assert (message["stop_reason"], message["content"][0]["input"]) == ("max_tokens", {"INVALID_JSON": item["arguments"]})


def test_a_choice_of_tools_is_enforced(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, CALL)
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        respond(server, tool_choice=choice)
        assert server.client.submitted[-1].sampling.grammar.kind == "tool_calls"
    for kind in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        ask(server, tool_choice=kind)
        assert server.client.submitted[-1].sampling.grammar.kind == "tool_calls"
    respond(server, tool_choice="none")
    assert SHOWN not in server.prompt()
    ask(server, tool_choice={"type": "none"})
    assert SHOWN not in server.prompt()
    twice = Server(tokenizer, f"{CALL}\n{CALL}")
    assert len(respond(twice, parallel_tool_calls=False).json()["output"]) == 1
    assert len(ask(twice, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json()["content"]) == 1


def test_a_message_has_a_block_for_each_part(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, SAID, reasoning="qwen3")
    message = ask(server).json()
    assert SHOWN in server.prompt()
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    used = {"type": "tool_use", "name": "get_weather", "input": {"city": "Ulm"}}
    signature = message["content"][0]["signature"]
    assert signature, "clients take an empty one for none, and drop the block"
    assert [without_ids(block) for block in message["content"]] == [
        {"type": "thinking", "thinking": "hm", "signature": signature},
        {"type": "text", "text": "Let me see."},
        used,
        used,
    ]
    assert message["content"][2]["id"] != message["content"][3]["id"]
    quiet = ask(server, thinking={"type": "disabled"}).json()
    assert server.prompt().endswith("<think></think>")
    assert [block["type"] for block in quiet["content"]] == ["text", "tool_use", "tool_use"]
    counted = post(server, f"{MESSAGES}/count_tokens", messages=[USER], tools=[TOOL]).json()
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}
    tools = [{"type": "function", "function": {"name": TOOL["name"], "description": TOOL["description"], "parameters": CITY}}]
    assert post(server, "/tokenize", messages=[USER], tools=tools).json()["count"] == counted["input_tokens"]


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_a_messages_stream_adds_up(tokenizer: Tokenizer, step: int) -> None:
    found = [data for _, data in named(ask(Server(tokenizer, SAID, reasoning="qwen3", step=step), stream=True).text)]
    blocks: list[Any] = []
    for data in found[1:-2]:
        match data["type"]:
            case "content_block_start":
                assert data["index"] == len(blocks)
                blocks.append(data["content_block"] | {"json": "", "open": True})
            case "content_block_delta":
                kind = data["delta"]["type"]
                field = "json" if kind == "input_json_delta" else kind.removesuffix("_delta")
                assert blocks[data["index"]]["open"] and not blocks[data["index"]].get("signature"), "a signature is a block's last delta"
                blocks[data["index"]][field] += data["delta"].get("partial_json", data["delta"].get(field))
            case "content_block_stop":
                blocks[data["index"]]["open"] = False
    assert not any(block["open"] for block in blocks)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("hm", "Let me see.") and blocks[0]["signature"]
    assert [(block["input"], json.loads(block["json"])) for block in blocks[2:]] == [({}, {"city": "Ulm"})] * 2
    assert [data["type"] for data in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_results_go_back_to_a_message(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, SAID, "7 degrees", reasoning="qwen3")
    content = ask(server).json()["content"]
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "cold"}]},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "no such city", "is_error": True},
        {"type": "text", "text": "well?"},
    ]
    answer = ask(server, messages=[USER, {"role": "assistant", "content": content}, {"role": "user", "content": results}]).json()
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": "7 degrees"}], "end_turn")
    told = f"tool{ids[0]}: cold\ntool{ids[1]}: Error: no such city\nuser: well?\nassistant"
    assert content[0]["signature"], "it is accepted back"
    assert "assistant: Let me see.\ncity = Ulm\ncity = Ulm\n" + told in server.prompt()


def test_a_thought_alone_ends_with_its_signature(tokenizer: Tokenizer) -> None:
    found = [data for _, data in named(ask(Server(tokenizer, "<think>hm", reasoning="qwen3"), stream=True).text)]
    assert [data["type"] for data in found[-4:]] == ["content_block_delta", "content_block_stop", "message_delta", "message_stop"]
    assert found[-4]["delta"]["type"] == "signature_delta" and found[-4]["delta"]["signature"]


@pytest.mark.parametrize(
    ("begun", "blocks"),
    [("Well, ", ["text"]), ("<think>well, ", ["thinking", "text"]), ("<think>so</think>Well, ", ["text"])],
)
def test_what_goes_on_is_reasoning_only_behind_an_open_tag(tokenizer: Tokenizer, begun: str, blocks: list[str]) -> None:
    server = Server(tokenizer, "it is</think>cold" if len(blocks) > 1 else "it is cold", reasoning="deepseek_r1")
    answer = ask(server, messages=[USER, {"role": "assistant", "content": begun}]).json()
    assert [block["type"] for block in answer["content"]] == blocks


def test_the_openai_client_takes_items_and_sends_them_back() -> None:
    command = [sys.executable, "-m", "tests.server.speaking", SAID]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            client: Any = openai.OpenAI(base_url=f"http://127.0.0.1:{int(process.stdout.readline())}/v1", api_key="none", timeout=30)
            asked: dict[str, Any] = {"model": "fake", "tools": [FUNCTION]}
            whole = client.responses.create(input="hello", **asked)
            with client.responses.stream(input="hello", **asked) as stream:
                streamed = stream.get_final_response()
            for answer in (whole, streamed):
                assert answer.output_text == "Let me see." and answer.output[0].content[0].text == "hm"
                assert [item.arguments for item in answer.output if item.type == "function_call"] == [ARGUMENTS] * 2
            calls = [item for item in whole.output if item.type == "function_call"]
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "cold"} for call in calls]
            assert client.responses.create(input=[USER, *whole.output, *results], **asked).usage.input_tokens > 0
        finally:
            process.kill()
