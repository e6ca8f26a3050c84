"""Tools and reasoning through the HTTP app: what the engine and the template are given, and what clients get, whole and streamed."""

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

from mtpserve.config import ServerConfig
from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.speaking import SpeakingClient, checkpoint
from tests.text import tiny
from tests.text.test_parsers import GOLDEN

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "the weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


class Server:
    def __init__(self, tokenizer: Tokenizer, *texts: str, tools: str = "hermes", reasoning: str = "none", step: int = 2) -> None:
        self.client = SpeakingClient(tokenizer, texts, step)
        self.app = create_app(self.client, tokenizer, server_config=ServerConfig(tool_call_parser=tools, reasoning_parser=reasoning))

    def post(self, **fields: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                content = json.dumps({"messages": [USER], **fields})  # ASCII: half a surrogate pair must arrive
                return await http.post(CHAT, content=content, headers={"content-type": "application/json"})

        return asyncio.run(ask())

    def choice(self, **fields: Any) -> dict[str, Any]:
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])

    def prompt(self, index: int = -1) -> str:
        return self.client.tokenizer.decode(self.client.submitted[index].prompt, skip_special_tokens=False)


def streamed(response: httpx.Response, index: int = 0) -> dict[str, Any]:
    """The deltas of one choice put together, as a message with its finish_reason."""
    choices = [choice for chunk in events(response)[:-1] for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": choices[-1]["finish_reason"]}
    for delta in (choice["delta"] for choice in choices):
        found["content"] += delta.get("content", "")
        found["reasoning_content"] += delta.get("reasoning_content", "")
        assert "reasoning" not in delta, "clients that add up both fields would show all of it twice"
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(found["tool_calls"]) and call["function"]["arguments"] == "" and call["type"] == "function"
                found["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert call.keys() == {"index", "function"} and call["function"]["arguments"]
                found["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return found


@pytest.mark.covering(1)  # tests/text/test_parsers_split.py cuts every text everywhere
@pytest.mark.parametrize("step", [1, 2, 5, 1000])
@pytest.mark.parametrize(("format", "text", "content", "calls"), [case for case in GOLDEN if "[TOOL" not in case[1]])
def test_auto_whole_and_streamed(
    tokenizer: Tokenizer, format: str, text: str, content: str, calls: list[tuple[str, str]], step: int
) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("save", "now")]
    days = {"city": {"type": "string"}, "days": {"type": "integer"}}
    tools.append({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": days}}})
    server = Server(tokenizer, text, tools=format, step=step)
    message = (whole := server.choice(tools=tools))["message"]
    assert message["content"] == (content or None) and whole["finish_reason"] == ("tool_calls" if calls else "stop")
    found = message.get("tool_calls", [])
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in found] == calls
    assert len({call["id"] for call in found}) == len(calls) and all(call["type"] == "function" for call in found)
    parts = streamed(server.post(tools=tools, stream=True))
    assert parts["content"] == content and parts["finish_reason"] == whole["finish_reason"]
    assert [(call["name"], call["arguments"]) for call in parts["tool_calls"]] == calls


def test_markers_that_are_special_tokens_stay_visible(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, '[TOOL_CALLS][{"name": "now", "arguments": {}}]', tools="mistral")
    call = server.choice(tools=[NOW])["message"]["tool_calls"][0]
    assert call["function"] == {"name": "now", "arguments": "{}"} and len(call["id"]) == 9
    assert server.client.submitted[0].sampling.skip_special_tokens is False
    server.choice()
    assert server.client.submitted[1].sampling.skip_special_tokens is True


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_before_a_call(tokenizer: Tokenizer, stream: bool) -> None:
    server = Server(tokenizer, f"<think>\nwhere?\n</think>\n\nI look.\n{CALL}", reasoning="qwen3")
    if stream:
        found = streamed(server.post(tools=[WEATHER], stream=True))
    else:
        message = server.choice(tools=[WEATHER])["message"]
        assert message["reasoning"] == message["reasoning_content"] and len(message["tool_calls"]) == 1
        found = message
    assert (found["reasoning_content"], found["content"]) == ("where?", "I look.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reasoning", "text", "reasoned"), [
    ("qwen3", "\n<think>a b</think>\n\nc <think>d</think>", "\n<think>a b</think>"),
    ("deepseek_r1", "a < b</think>c", "a < b</think>"),
    ("qwen3", "<thin>a</think>", ""),
    ("none", "<think>a</think>", ""),
])  # fmt: skip
def test_usage_counts_reasoning(tokenizer: Tokenizer, stream: bool, reasoning: str, text: str, reasoned: str) -> None:
    server = Server(tokenizer, text, reasoning=reasoning, step=3)
    answer = server.post(**({"stream": True, "stream_options": {"include_usage": True}} if stream else {}), n=2)
    usage = events(answer)[-2]["usage"] if stream else answer.json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * len(tokenizer.encode(reasoned, special=False))


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_gpt_oss_writes(tokenizer: Tokenizer, step: int) -> None:
    call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + '{"city": "Ulm"}'
    texts = [f"<|channel|>analysis<|message|>where?<|start|>assistant{rest}" for rest in (call, "<|channel|>final<|message|>There.")]
    for text, tools, name in ((texts[0], [WEATHER], "get_weather"), (texts[1], [WEATHER], None), (texts[1], None, None)):
        server = Server(tokenizer, text, tools="openai", reasoning="openai_gptoss", step=step)
        whole = server.choice(tools=tools)
        message, calls = whole["message"], whole["message"].get("tool_calls", [])
        assert (message["reasoning_content"], message["content"]) == ("where?", None if name else "There.")
        assert [(each["function"]["name"], each["function"]["arguments"]) for each in calls] == (
            [(name, '{"city": "Ulm"}')] if name else []
        )
        parts = streamed(server.post(tools=tools, stream=True))
        assert (parts["reasoning_content"], parts["content"]) == ("where?", "" if name else "There.")
        assert [(each["name"], each["arguments"]) for each in parts["tool_calls"]] == ([(name, '{"city": "Ulm"}')] if name else [])
        assert all(request.sampling.skip_special_tokens is False for request in server.client.submitted)


def test_what_gpt_oss_must_write_begins_with_its_channel(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "<|channel|>final<|message|>7", tools="none", reasoning="openai_gptoss")
    assert server.choice(regex="[0-9]")["message"]["content"] == "7"
    server.choice(tools=[WEATHER], tool_choice="required")
    answer, calls = (request.sampling.grammar for request in server.client.submitted)
    assert answer is not None and '"final"' in answer.lead and '"analysis"' in answer.front
    assert calls is not None and calls.lead == "" and "commentary to=functions.get_weather" in calls.text and calls.front == answer.front


def test_reasoning_switches(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "<think>a</think>b", tools="none", reasoning="qwen3")
    assert server.choice(separate_reasoning=False)["message"]["content"] == "<think>a</think>b"
    assert server.choice(include_reasoning=False)["message"] == {"role": "assistant", "content": "b", "refusal": None}
    assert streamed(server.post(include_reasoning=False, stream=True))["reasoning_content"] == ""
    server.choice(chat_template_kwargs={"enable_thinking": False})
    assert server.prompt().endswith("<think></think>")
    message = server.choice(reasoning_effort="none")["message"]
    assert message["content"] == "<think>a</think>b" and message["reasoning_content"] is None  # the prompt had closed it
    server.choice(reasoning_effort="high")
    assert "assistant (high):" in server.prompt()
    assert "reasoning_content" not in Server(tokenizer, "a").choice()["message"]


def test_what_the_template_is_given(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "ok")
    calls = [{"id": "call_1", "type": "function", "index": 0, "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}]
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    ]
    server.choice(messages=messages, tools=[WEATHER])
    prompt = server.prompt()
    assert '"description": "the weather"' in prompt and "toolcall_1: 7" in prompt
    assert "city = Köln" in prompt
    server.choice(tools=[WEATHER], tool_choice="none")
    assert "the weather" not in server.prompt()


def test_templates_that_want_arguments_as_text_get_them_so(tmp_path: Path) -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city":"Köln"}'}}]
    template = "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ '```json\n' + c['function']['arguments'] }}"
    template += "{% endfor %}{% endfor %}"
    server = Server(Tokenizer(tiny.write(tmp_path, template)), "ok")
    server.choice(messages=[{"role": "assistant", "tool_calls": calls}])
    assert server.prompt() == '```json\n{"city": "Köln"}'


def test_a_model_that_must_not_call_is_not_parsed(tokenizer: Tokenizer) -> None:
    for fields in ({"tools": [WEATHER], "tool_choice": "none"}, {}, {"tools": []}):
        choice = Server(tokenizer, CALL).choice(**fields)
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


LIST = '[{"name": "get_weather", "arguments": {"city": "Ulm"}}, {"name": "now", "arguments": {}}]'
NAMED = {"type": "function", "function": {"name": "now"}}


def test_required_and_named_without_a_parser(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, LIST, tools="none")
    message = server.choice(tools=[WEATHER, NOW], tool_choice="required")["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "now"] and message["content"] is None
    grammar = server.client.submitted[0].sampling.grammar
    assert grammar is not None and grammar.kind == "tool_calls" and "(" in grammar.text.splitlines()[0]
    server.choice(tools=[WEATHER, NOW], tool_choice=NAMED)
    named = server.client.submitted[1].sampling.grammar
    assert named is not None and "get_weather" not in named.text and "*" not in named.text.splitlines()[0]
    refused = server.post(tools=[NOW])
    assert refused.status_code == 400 and "--tool-call-parser" in refused.json()["error"]["message"]


def test_forced_calls_leave_room_for_reasoning(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, f"<think>a</think>\n{CALL}", reasoning="qwen3")
    assert server.choice(tools=[WEATHER], tool_choice="required")["finish_reason"] == "tool_calls"
    server.choice(regex="a+")
    server.choice(regex="a+", chat_template_kwargs={"enable_thinking": False})
    fronts = [request.sampling.grammar.front for request in server.client.submitted if request.sampling.grammar]
    assert "</think>" in fronts[0] and fronts[0] == fronts[1] and fronts[2] == ""


def test_a_constrained_answer_leaves_the_choice_of_a_call(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, CALL, '{"a": 1}')
    asked: dict[str, Any] = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    assert len(server.choice(**asked)["message"]["tool_calls"]) == 1
    assert server.choice(**asked)["message"]["content"] == '{"a": 1}'
    grammar = server.client.submitted[0].sampling.grammar
    assert grammar is not None and grammar.kind == "json_object" and "get_weather" in grammar.instead
    assert server.choice(tools=parameters(**{"not": {}}))["message"]["content"]  # nothing is enforced


def test_a_demanded_call_goes_before_a_form_of_the_answer(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, CALL)
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required"}
    assert server.choice(**asked, response_format={"type": "json_object"})["finish_reason"] == "tool_calls"
    assert server.client.submitted[0].sampling.grammar.kind == "tool_calls"  # type: ignore[union-attr]
    assert server.post(**asked, regex="a+").json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_that_is_cut_leaks_no_markup(tokenizer: Tokenizer, stream: bool) -> None:
    server, asked = Server(tokenizer, CALL), {"tools": [WEATHER], "tool_choice": "required"}
    for tokens in range(1, len(tokenizer.encode(CALL, special=False))):
        cut = asked | {"max_tokens": tokens}
        assert not (streamed(server.post(stream=True, **cut)) if stream else server.choice(**cut)["message"])["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_parallel_ones_are_not_wanted(tokenizer: Tokenizer, stream: bool) -> None:
    server = Server(tokenizer, f"{CALL}\n{CALL}")
    asked: dict[str, Any] = {"tools": [WEATHER], "parallel_tool_calls": False}
    if stream:
        assert len(streamed(server.post(stream=True, **asked))["tool_calls"]) == 1
    else:
        assert len(server.choice(**asked)["message"]["tool_calls"]) == 1


def test_a_call_that_max_tokens_cuts(tokenizer: Tokenizer) -> None:
    choice = Server(tokenizer, CALL).choice(tools=[WEATHER], max_tokens=len(tokenizer.encode(CALL, special=False)) - 18)
    assert choice["finish_reason"] == "length"
    assert CALL.split('"arguments": ')[1].startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("stream", [False, True])
def test_choices_logprobs_and_usage_with_tools(tokenizer: Tokenizer, stream: bool) -> None:
    texts = [f"one {CALL}", "two", f"<think>x</think>{CALL}{CALL}"]
    server = Server(tokenizer, *texts, reasoning="qwen3")
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = server.post(tools=[WEATHER], n=3, logprobs=True, **options)
    counts = [len(tokenizer.encode(text, special=False)) + 1 for text in texts]
    if stream:
        chunks = events(answer)[:-1]
        scores = [
            [e for c in chunks[:-1] for x in c["choices"] if x["index"] == i and x["logprobs"] for e in x["logprobs"]["content"]]
            for i in range(3)
        ]
        found = [streamed(answer, index) for index in range(3)]
        usage = chunks[-1]["usage"]
    else:
        choices = answer.json()["choices"]
        scores = [choice["logprobs"]["content"] for choice in choices]
        found = [{"tool_calls": [], **choice["message"], "finish_reason": choice["finish_reason"]} for choice in choices]
        usage = answer.json()["usage"]
    assert [len(each) for each in scores] == counts and usage["completion_tokens"] == sum(counts)
    assert [len(choice["tool_calls"]) for choice in found] == [1, 0, 2]
    assert [choice["finish_reason"] for choice in found] == ["tool_calls", "stop", "tool_calls"]


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def parameters(**fields: Any) -> list[dict[str, Any]]:
    return function(parameters={"type": "object", "properties": {"a": fields}})


def called(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", **fields}}]}]


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"items": DEEP}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
    ({"tools": [5]}, "tools[0]", "object"),
    ({"tools": [NOW] * 4097}, "tools", "4096"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name", "twice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "object"),
    ({"tools": function(name="a b")}, "tools[0].function.name", "'a b'"),
    ({"tools": function(parameters=[])}, "tools[0].function.parameters", "list"),
    ({"tools": function(parameters={"type": "array"})}, "tools[0].function.parameters", "array"),
    ({"tools": function(parameters={"required": "a"})}, "tools[0].function.parameters", "required"),
    ({"tools": function(strict="yes")}, "tools[0].function.strict", "str"),
    ({"tools": function(description="\ud800")}, "tools[0].function", "Unicode"),
    ({"tools": parameters(**DEEP)}, "tools[0].function.parameters", "64"),
    ({"tools": parameters(**{"not": {}}), "tool_choice": "required"}, "tools[0].function.parameters", "properties.a.not"),
    ({"tools": [NOW, *parameters(uniqueItems=True)], "tool_choice": "required"}, "tools[1].function.parameters", "uniqueItems"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "'any'"),
    ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice", "function"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "'other'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [NOW], "tool_choice": "required", "regex": "a"}, "tool_choice", "constraint"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "required"),
    ({"messages": [{"role": "function", "content": "a"}]}, "messages", "'function'"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "huge"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "no such variable"),
    ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token", "no such variable"),
    ({"chat_template_kwargs": {"colour": "red"}}, "chat_template_kwargs.colour", "no such variable"),
    ({"chat_template_kwargs": {f"x{i}": i for i in range(17)}}, "chat_template_kwargs", "17 entries"),
    ({"chat_template_kwargs": {"enable_thinking": []}}, "chat_template_kwargs.enable_thinking", "true, false"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "told"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(tokenizer: Tokenizer, fields: dict[str, Any], param: str, told: str) -> None:
    server = Server(tokenizer, "a")
    answer = server.post(**fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and told in error["message"] and not server.client.submitted


def test_a_value_that_a_format_of_calls_cannot_enforce_is_named(tokenizer: Tokenizer) -> None:
    answer = Server(tokenizer, "a", tools="qwen3_coder").post(tools=parameters(type="string", pattern="a+"), tool_choice="required")
    error = answer.json()["error"]
    assert error["param"] == "tools[0].function.parameters" and "properties.a.pattern" in error["message"]


def test_the_openai_client_takes_calls_and_sends_them_back() -> None:
    text = f"<think>hm</think>Let me see. {CALL}\n{CALL}"
    command = [sys.executable, "-m", "tests.server.speaking", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            client: Any = openai.OpenAI(base_url=f"http://127.0.0.1:{int(process.stdout.readline())}/v1", api_key="none", timeout=30)
            asked: dict[str, Any] = {"model": "fake", "tools": [WEATHER]}
            message = client.chat.completions.create(messages=[USER], **asked).choices[0].message
            assert message.content == "Let me see." and message.reasoning_content == "hm"
            assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Ulm"}] * 2
            with client.chat.completions.stream(messages=[USER], **asked) as stream:
                final = stream.get_final_completion().choices[0]
            assert final.finish_reason == "tool_calls" and final.message.content == "Let me see."
            assert [call.function.arguments for call in final.message.tool_calls] == ['{"city": "Ulm"}'] * 2
            answers = [{"role": "tool", "tool_call_id": call.id, "content": "7 degrees"} for call in message.tool_calls]
            again = client.chat.completions.create(messages=[USER, message.model_dump(), *answers], **asked)
            assert again.usage.prompt_tokens > 0
        finally:
            process.kill()


@pytest.mark.parametrize(("fields", "reason", "matched"), [
    ({"stop": ["eat", "not"]}, "eat", "eat"),
    ({"stop_token_ids": [tiny.EOS_ID]}, tiny.EOS_ID, tiny.EOS_ID),
    ({}, None, tiny.EOS_ID),
    ({"max_tokens": 2}, None, None),
])  # fmt: skip
def test_what_ended_a_text_is_told_in_both_peers_words(tokenizer: Tokenizer, fields: dict[str, Any], reason: Any, matched: Any) -> None:
    whole = Server(tokenizer, "great", step=5).choice(**fields)
    chunks = events(Server(tokenizer, "great", step=5).post(stream=True, **fields))[:-1]
    ends = [chunk["choices"][0] for chunk in chunks if "stop_reason" in chunk["choices"][0]]
    assert len(ends) == 1 and ends[0] is chunks[-1]["choices"][0]
    for found in (whole, ends[0]):
        assert (found["stop_reason"], found["matched_stop"]) == (reason, matched)
