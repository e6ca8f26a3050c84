"""What real clients send and expect beyond the letter of the APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from msgspec.structs import replace as replace_in

from mtpserve.core.request import Proposal, Request, TokenEvent
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.speaking import SpeakingClient, checkpoint
from tests.server.test_messages import named
from tests.server.test_tool_blocks import RESPONSES, post
from tests.server.test_tools import CALL, CHAT, CITY, NOW, USER, WEATHER, Server, streamed

MESSAGES = "/v1/messages"
MANY = [{"name": f"f{index}", "parameters": {"type": "object", "properties": {}}} for index in range(200)]
OF_ROUTE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "tools": [{"type": "function", "function": function} for function in MANY]},
    RESPONSES: {"input": "a", "tools": [{"type": "function"} | function for function in MANY]},
    MESSAGES: {"messages": [USER], "max_tokens": 9, "tools": [{"name": function["name"], "input_schema": CITY} for function in MANY]},
}


def sent(server: Server, path: str, **fields: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test") as http:
            return await http.post(path, json=fields)

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


@pytest.mark.parametrize(("option", "names"), [
    (None, {"reasoning_content"}),
    ("reasoning", {"reasoning"}),
    ("both", {"reasoning_content", "reasoning"}),
])  # fmt: skip
def test_a_stream_has_reasoning_in_the_fields_of_the_option(tokenizer: Tokenizer, option: str | None, names: set[str]) -> None:
    server = Server(tokenizer, "<think>Why not?</think>Yes.", reasoning="qwen3")
    if option is not None:
        service: Any = server.app.state.service
        service.server_config = replace(service.server_config, reasoning_field=option)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(server.post(stream=True))[:-1]]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == ("Why not?" if name in names else "")
    message = server.choice()["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Why not?"


def test_fields_of_tools_that_nobody_knows_are_ignored(tokenizer: Tokenizer) -> None:
    marked = {"type": "function", "function": WEATHER["function"] | {"returns": {}}, "cache_control": {"type": "ephemeral"}, "strict": True}
    server = Server(tokenizer, CALL)
    for tool in (WEATHER, marked, {"function": marked["function"]}):
        (call,) = server.choice(tools=[tool])["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
    assert server.prompt(0) == server.prompt(1) == server.prompt(2), "a prompt that the prefix cache finds again"


OTHERS = [{"type": "custom", "custom": {"name": "sh"}}, {"type": "web_search_preview"}]


def test_a_chats_tools_that_are_no_functions_are_left_out(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, CALL)
    assert server.choice(tools=[OTHERS[0], WEATHER, OTHERS[1]])["message"]["tool_calls"]
    assert server.choice(tools=[WEATHER])["message"]["tool_calls"] and server.prompt(0) == server.prompt(1)
    worse = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}}
    for tools, param in (([OTHERS[0], worse], "tools[1].function.parameters"), (OTHERS, "tools[0].type")):
        assert server.post(tools=tools, tool_choice="required").json()["error"]["param"] == param
    found = post(server, "/parse_function_call", text=CALL, tools=[OTHERS[0], NOW, WEATHER]).json()
    assert found["calls"][0]["tool_index"] == 2


def test_a_set_of_another_servers_tools_has_no_name(tokenizer: Tokenizer) -> None:
    toolset = {"type": "mcp_toolset", "mcp_server_name": "mine"}
    tools = [toolset, {"name": "get_weather", "input_schema": CITY}]
    answer = post(Server(tokenizer, CALL), MESSAGES, messages=[USER], max_tokens=400, tools=tools).json()
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("route", OF_ROUTE)
def test_there_may_be_more_than_128_tools(tokenizer: Tokenizer, route: str) -> None:
    server = Server(tokenizer, "a")
    server.client.card = replace(server.client.card, context_length=1 << 16)
    post(server, route, **OF_ROUTE[route])
    assert '"f199"' in server.prompt()
    if route == MESSAGES:
        counted = post(server, f"{MESSAGES}/count_tokens", messages=[USER], tools=OF_ROUTE[route]["tools"]).json()
        assert counted["input_tokens"] == len(server.client.submitted[0].prompt)


def allowed(mode: str, *names: str, flat: bool = False) -> dict[str, Any]:
    """A choice of several tools as chat completions have it; `flat`: as responses have it."""
    tools = [{"type": "function", "name": name} if flat else {"type": "function", "function": {"name": name}} for name in names]
    fields = {"mode": mode, "tools": [{"type": "mcp", "server_label": "x"}, *tools]}
    return {"type": "allowed_tools"} | (fields if flat else {"allowed_tools": fields})


def test_a_choice_of_some_tools_is_kept(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, CALL)
    tools = [WEATHER, NOW]
    for mode in ("auto", "required"):
        choice = server.choice(tools=tools, tool_choice=allowed(mode, "get_weather"))
        assert choice["message"]["tool_calls"] and choice["finish_reason"] == "tool_calls"
        assert ('"now"' in server.prompt()) == (mode == "required"), "a model that no grammar keeps from a tool is not told of it"
    grammar = server.client.submitted[-1].sampling.grammar
    assert grammar is not None and "get_weather" in grammar.text and "now" not in grammar.text
    for stream in (False, True):
        answer = server.post(tools=tools, tool_choice=allowed("auto", "now"), stream=stream)
        refused = streamed(answer) if stream else answer.json()["choices"][0]
        message = refused if stream else refused["message"]
        assert not message.get("tool_calls") and refused["finish_reason"] == "stop", "a call that is not allowed"


def test_a_response_allows_some_tools(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, CALL)
    tools = [{"type": "function", "name": name, "parameters": CITY} for name in ("get_weather", "now")]
    choice = allowed("required", "get_weather", flat=True)
    answer = post(server, RESPONSES, input="a", tools=tools, tool_choice=choice).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"] and answer["tool_choice"] == choice
    grammar = server.client.submitted[-1].sampling.grammar
    assert grammar is not None and "now" not in grammar.text
    last = named(post(server, RESPONSES, input="a", tools=tools, tool_choice=allowed("auto", "now", flat=True), stream=True).text)[-1][1]
    assert not [item for item in last["response"]["output"] if item["type"] == "function_call"]


@pytest.mark.parametrize(("fields", "words"), [
    ({"tools": [NOW, OTHERS[1]], "tool_choice": {"type": "web_search_preview"}}, "'web_search_preview'"),
    ({"tools": [NOW], "tool_choice": allowed("auto", "other")}, "'other'"),
    ({"tools": [NOW], "tool_choice": allowed("none", "now")}, "a mode"),
    ({"tools": [NOW], "tool_choice": allowed("auto")}, "names of functions"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "a mode"),
    ({"tool_choice": allowed("auto", "now")}, "needs tools"),
])  # fmt: skip
def test_a_choice_that_cannot_be_kept_is_refused(tokenizer: Tokenizer, fields: dict[str, Any], words: str) -> None:
    error = Server(tokenizer, "a").post(**fields).json()["error"]
    assert error["param"] == "tool_choice" and words in error["message"]


def test_unknown_fields_of_a_prediction_and_a_format_are_ignored(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "a")
    schema = {"name": "a", "schema": CITY, "new": 1}
    server.choice(prediction={"type": "content", "content": "a", "new": 1}, response_format={"type": "json_schema", "json_schema": schema})
    request = server.client.submitted[0]
    assert request.prediction and request.sampling.grammar is not None and '"city"' in request.sampling.grammar.text


ASKED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [USER]}, "max_tokens"),
    (CHAT, {"messages": [USER]}, "max_completion_tokens"),
    (CHAT, {"messages": [USER], "max_completion_tokens": 7}, "max_tokens"),  # which does not count then
    (RESPONSES, {"input": "hello"}, "max_output_tokens"),
    (MESSAGES, {"messages": [USER]}, "max_tokens"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body", "field"), ASKED)
def test_a_limit_above_the_context_is_clamped(tokenizer: Tokenizer, route: str, body: dict[str, Any], field: str, stream: bool) -> None:
    server = Server(tokenizer, "a")
    context = server.client.card.context_length
    for asked in (context - 1, context, 10**6):
        answer = post(server, route, **body, **{field: asked}, stream=stream)
        request = server.client.submitted[-1]
        if "max_completion_tokens" in body:
            assert request.sampling.max_tokens == 7 and "x-max-tokens-clamped" not in answer.headers
            continue
        room = context - len(request.prompt)
        assert request.sampling.max_tokens == room and answer.headers["x-max-tokens-clamped"] == f"{asked}->{room}"
    assert "x-max-tokens-clamped" not in post(server, route, **body | {field: 9}, stream=stream).headers


@pytest.mark.parametrize(("route", "body", "field"), ASKED)
def test_an_option_refuses_such_a_limit(tokenizer: Tokenizer, route: str, body: dict[str, Any], field: str) -> None:
    server = Server(tokenizer, "a")
    service: Any = server.app.state.service
    service.server_config = replace(service.server_config, clamp_max_tokens=False)
    for asked in (server.client.card.context_length, server.client.card.context_length - 1):
        answer = sent(server, route, **body, **{field: asked})
        if route == MESSAGES or ("max_completion_tokens" in body and asked < server.client.card.context_length):
            assert answer.status_code == 200
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert answer.json()["error"]["param"] in (field, "max_tokens")


def test_what_a_truncated_prompt_leaves_is_what_was_asked_for(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "a")
    context = server.client.card.context_length
    answer = server.post(truncate_prompt_tokens=-1, max_tokens=context - 3)
    request = server.client.submitted[0]
    assert answer.status_code == 200 and (len(request.prompt), request.sampling.max_tokens) == (3, context - 3)
    assert server.post(truncate_prompt_tokens=-1, max_tokens=context).json()["error"]["code"] == "context_length_exceeded"


def test_completions_refuse_a_limit_above_the_context(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "a")
    answer = sent(server, "/v1/completions", prompt="a", max_tokens=server.client.card.context_length)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_steps_without_drafts_are_no_verifications(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where n-grams find nothing, or where a depth of 0 is chosen: one of nine steps verifies three drafts and accepts one."""
    server, submit = Server(tokenizer, "a text of 18 bytes"), SpeakingClient.submit

    async def drafting(client: SpeakingClient, request: Request) -> AsyncIterator[list[TokenEvent]]:
        first = True
        async for (event,) in submit(client, request):
            proposal = Proposal([event.tokens[0], 5, 6], [0, 1, 2], ["ngram"] * 3, [1]) if first else Proposal()
            yield [replace_in(event, proposal=proposal, num_accepted_tokens=int(first))]
            first = False

    monkeypatch.setattr(SpeakingClient, "submit", drafting)
    meta = post(server, "/generate", text="a", sampling_params={"max_new_tokens": 30}).json()["meta_info"]
    assert (meta["completion_tokens"], meta["spec_verify_ct"], meta["spec_num_correct_drafts"]) == (18, 1, 1)
    assert meta["spec_accept_length"] == 2.0, "never more than the drafts and one token"
