"""Requests as coding agents and chat clients send them: what only allows something is left out, what demands it is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.server.app import create_app
from mtpserve.server.openai.responses.response_input import InputItem, messages_of
from mtpserve.server.schema import base as bodies
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.speaking import checkpoint
from tests.server.test_errors import CHAT, error, send
from tests.server.test_messages import named
from tests.server.test_templates import serving
from tests.server.test_tool_blocks import MESSAGES, RESPONSES, post
from tests.server.test_tools import Server

COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"], "additionalProperties": False}
SHELL = {"type": "function", "name": "shell", "description": "runs a command", "strict": False, "parameters": COMMAND}
HELPERS = {"type": "namespace", "name": "helpers", "description": "other agents", "tools": [SHELL | {"name": "ask", "defer_loading": True}]}
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
SEARCH = {"type": "web_search", "external_web_access": True}
CODEX: dict[str, Any] = {
    "model": "fake",
    "tools": [SEARCH, SHELL, PATCH, HELPERS, {"type": "tool_search", "execution": "client"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "text": {"verbosity": "low"},
    "include": ["reasoning.encrypted_content", "web_search_call.results"],
    "store": False,
    "stream": True,
    "prompt_cache_key": "01a1",
    "client_metadata": {"session_id": "01a1"},
}
ASKED: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You write programs."}]},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "say hello"}]},
]
TOOL = {"name": "Bash", "description": "runs a command", "input_schema": COMMAND}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 32000,
    "system": [{"type": "text", "text": "You write programs."}, {"type": "text", "text": "Be brief.", **CACHED}],
    "tools": [WEB, TOOL, {"type": "bash_20250124", "name": "bash"}],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": '{"session_id": "01a1"}'},
    "stream": True,
}
SAID = "<think>I call it.</think>Let me see.\n"


def calling(name: str) -> str:
    return SAID + f'<tool_call>\n{{"name": "{name}", "arguments": {{"command": "echo hello"}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


@pytest.mark.parametrize(("name", "told"), [("shell", {"name": "shell"}), ("helpers.ask", {"namespace": "helpers", "name": "ask"})])
def test_an_agent_calls_a_tool_over_responses(tokenizer: Tokenizer, name: str, told: dict[str, str]) -> None:
    server = Server(tokenizer, calling(name), "It said hello.", reasoning="qwen3")
    found = named(post(server, RESPONSES, **CODEX, input=ASKED).text)
    assert [place for place in ("web_search", "apply_patch", "tool_search") if place in server.prompt()] == []
    assert '"name": "shell"' in server.prompt() and '"name": "helpers.ask"' in server.prompt() and "(high):" in server.prompt()
    items = [data["item"] for kind, data in found if kind == "response.output_item.done"]
    kinds = ("type", "namespace", "name")
    assert {key: value for key, value in items[-1].items() if key in kinds} == {"type": "function_call"} | told
    assert found[-1][0] == "response.completed" and found[-1][1]["response"]["output"] == items
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "hello"}
    sent_back = [items[0] | {"encrypted_content": None}, *items[1:], output]
    found = named(post(server, RESPONSES, **CODEX, input=[*ASKED, *sent_back]).text)
    assert found[-1][1]["response"]["output"][-1]["content"][0]["text"] == "It said hello."
    (remembered,) = messages_of([InputItem(**items[-1])])[0].tool_calls or []
    assert remembered.function.name == name
    conversation = f"user: say hello\nassistant: Let me see.\ncommand = echo hello\ntool{output['call_id']}: hello\n"
    assert conversation in server.prompt().replace("\n\n", "\n")


def test_an_agent_calls_a_tool_over_messages(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, calling("Bash"), "It said hello.", reasoning="qwen3")
    asked = [
        {"role": "user", "content": [{"type": "text", "text": "say hello", **CACHED}]},
        {"role": "system", "content": "There are skills."},
    ]
    found = named(post(server, f"{MESSAGES}?beta=true", **CLAUDE, messages=asked).text)
    assert "web_search" not in server.prompt() and '"name": "bash"' not in server.prompt() and '"name": "Bash"' in server.prompt()
    assert "(high):" in server.prompt() and "system: There are skills." in server.prompt()
    blocks = [data["content_block"] for kind, data in found if kind == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"] and found[-2][1]["delta"]["stop_reason"] == "tool_use"
    id = blocks[-1]["id"]
    answered = {
        "role": "assistant",
        "content": [blocks[0], {"type": "text", "text": "Let me see."}, blocks[-1] | {"input": {"command": "x"}}],
    }
    result = {
        "type": "tool_result",
        "tool_use_id": id,
        "content": [{"type": "text", "text": "no such program"}],
        "is_error": True,
        **CACHED,
    }
    more = [answered, {"role": "user", "content": [result]}, {"role": "assistant", "content": []}, {"role": "user", "content": "again"}]
    found = named(post(server, f"{MESSAGES}?beta=true", **CLAUDE, messages=[*asked, *more]).text)
    assert found[-2][1]["delta"]["stop_reason"] == "end_turn"
    assert f"command = x\ntool{id}: Error: no such program\nassistant: \nuser: again\n" in server.prompt()


def test_what_is_left_out_is_told_once(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    bodies.SAID.clear()
    caplog.set_level(logging.INFO, bodies.log.name)
    server = Server(tokenizer, "a")
    for _ in range(2):
        post(server, RESPONSES, **CODEX, input="hello")
        post(server, MESSAGES, **CLAUDE, messages=[{"role": "user", "content": "hello"}])
    told = [record.getMessage() for record in caplog.records]
    for kind in ("web_search", "custom", "tool_search", "web_search_call.results", "web_search_20250305", "bash_20250124"):
        assert len([line for line in told if repr(kind) in line]) == 1, told
    for number in range(2 * bodies.MAX_SAID):
        bodies.say_once(str(number))
    assert len(caplog.records) == bodies.MAX_SAID


BAD = {"type": "function", "name": "a", "parameters": []}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [SEARCH]}, "tools[0].type"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tools[0].type"),
        ({"tools": [SEARCH, SHELL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [SEARCH, BAD]}, "tools[1].parameters"),
        ({"tools": [SEARCH, HELPERS | {"tools": [SHELL, BAD]}]}, "tools[1].tools[1].parameters"),
        ({"tools": [SHELL, HELPERS | {"tools": [PATCH]}]}, "tools[1].tools[0]"),
        ({"tools": [SHELL, {"type": "namespace", "name": "helpers"}]}, "tools[1]"),
        ({"tools": [SHELL, {"type": 7}]}, "tools[1].type"),
        ({"tools": [SHELL, {}]}, "tools[1].type"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
    ],
)
def test_what_responses_demand_is_refused(http: httpx.AsyncClient, client: FakeClient, fields: dict[str, Any], param: str) -> None:
    assert error(send(http, "POST", RESPONSES, json={"input": "hello"} | fields), 400)["param"] == param
    assert not client.submitted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEB]}, "tools[0].type"),
        ({"tools": [WEB, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"tools": [WEB, TOOL | {"input_schema": {"type": "array"}}]}, "tools[1].input_schema"),
        ({"tools": [WEB, {"name": "a"}]}, "tools[1].input_schema"),
        ({"output_config": {"effort": "much"}}, "output_config"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_what_messages_demand_is_refused(
    http: httpx.AsyncClient, client: FakeClient, fields: dict[str, Any], param: str, path: str
) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]} | fields
    told = error(send(http, "POST", path, json=body), 400)
    assert told["param"] == param and (param != "tool_choice" or told["code"] == "unsupported_parameter")
    assert not client.submitted


def test_a_messages_answer_may_be_bound_to_a_schema(http: httpx.AsyncClient, client: FakeClient) -> None:
    asked = {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}], "output_config": {"format": {"type": "json_schema"}}}
    asked["output_config"]["format"]["schema"] = COMMAND  # type: ignore[index]
    assert send(http, "POST", MESSAGES, json=asked).status_code == 200
    grammar = client.submitted[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema" and '"command"' in grammar.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_may_ask_for_more_tokens_than_there_is_room_for(http: httpx.AsyncClient, client: FakeClient, stream: bool) -> None:
    """The field is one that every request must have; agents send what their maker's models can do."""
    client.card = replace(client.card, context_length=40)
    body = {"max_tokens": 32000, "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    answer = send(http, "POST", MESSAGES, json=body)
    room = 40 - len(client.submitted[0].prompt)
    message = answer.json() if not stream else named(answer.text)[-2][1] | named(answer.text)[-2][1]["delta"]
    assert client.submitted[0].sampling.max_tokens == message["usage"]["output_tokens"] == room
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert send(http, "POST", MESSAGES, json=body | {"max_tokens": room, "stream": False}).json()["stop_reason"] == "max_tokens"
    assert error(send(http, "POST", MESSAGES, json=body | {"max_tokens": 0}), 400)["param"] == "max_tokens"


def test_agents_see_that_a_prompt_is_too_long(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.card = replace(client.card, context_length=40)
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "hello " * 20}]}
    for path in (MESSAGES, CHAT):
        told = error(send(http, "POST", path, json=body), 400)
        assert told["code"] == "context_length_exceeded"
        # By these words, and by these numbers, they shorten the conversation and ask again.
        assert told["message"].startswith("prompt is too long: ") and " tokens > 39 maximum" in told["message"]
        assert "maximum context length is 40 tokens" in told["message"]
        longer = body | {"messages": [{"role": "user", "content": "hello " * 200}]}
        assert error(send(http, "POST", path, json=longer), 400)["message"].startswith("prompt is too long: ")


def test_what_libraries_put_beside_a_message_says_nothing(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    mark = {"type": "ephemeral"}
    beside = {"provider_specific_fields": {"refusal": None}, "thinking_blocks": [{"type": "thinking"}], "cache_control": mark}
    part = {"type": "text", "text": "hello", "cache_control": mark}
    said = {"role": "assistant", "content": [part], "annotations": [{"type": "url_citation"}], **beside}
    assert send(http, "POST", CHAT, json={"messages": [said], "max_tokens": 2}).status_code == 200
    assert error(send(http, "POST", CHAT, json={"messages": [said | {"audio": {"id": "a"}}]}), 400)["param"] == "messages"


def test_a_model_has_several_names(client: FakeClient, tokenizer: Tokenizer) -> None:
    config = EngineConfig(model=ModelConfig(served_model_name=("fake", "gpt-5", "org/model")))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(client, tokenizer, config)), base_url="http://test")
    assert [model["id"] for model in send(http, "GET", "/v1/models").json()["data"]] == ["fake", "gpt-5", "org/model"]
    for name in ("fake", "gpt-5", "org/model"):
        assert send(http, "GET", f"/v1/models/{name}").json()["id"] == name
        answer = send(http, "POST", RESPONSES, json={"model": name, "input": "hello", "max_output_tokens": 2})
        assert answer.status_code == 200 and answer.json()["model"] == "fake"
    told = error(send(http, "POST", RESPONSES, json={"model": "gpt-4", "input": "hello"}), 404)
    assert told["code"] == "model_not_found" and "'fake', 'gpt-5', 'org/model'" in told["message"]
    assert error(send(http, "GET", "/v1/models/gpt-4"), 404)["code"] == "model_not_found"


ONE_SYSTEM = """{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('one system') }}{% endif %}
{% if not loop.first and m['role'] == loop.previtem['role'] %}{{ raise_exception('roles must alternate') }}{% endif %}
{{ m['role'] }}: {{ m['content'] }} {% endfor %}"""


def test_a_template_that_wants_one_system_message_and_turns(client: FakeClient, tmp_path: Path) -> None:
    """Agents send several of each, and some in the middle."""
    http, tokenizer = serving(client, tmp_path, ONE_SYSTEM)
    roles = ("developer", "system", "user", "system", "user", "assistant", "user")
    body = {"messages": [{"role": role, "content": str(number)} for number, role in enumerate(roles)], "max_tokens": 2}
    assert send(http, "POST", CHAT, json=body).status_code == 200
    assert " ".join(tokenizer.decode(client.submitted[-1].prompt).split()) == "system: 0 1 user: 2 3 4 assistant: 5 user: 6"
    body = {"messages": [{"role": role, "content": str(number)} for number, role in enumerate(("user", "assistant", "assistant"))]}
    assert send(http, "POST", CHAT, json=body | {"max_tokens": 2}).status_code == 200
    assert " ".join(tokenizer.decode(client.submitted[-1].prompt).split()) == "user: 0 assistant: 1 2"
    wrong = {"messages": [{"role": "tool", "tool_call_id": "a", "content": "a"}] * 2, "max_tokens": 2}
    assert "roles must alternate" in error(send(http, "POST", CHAT, json=wrong), 400)["message"]
