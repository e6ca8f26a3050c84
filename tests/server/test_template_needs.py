"""Conversations with tools through templates of every kind that models come with: no call, result or tool may get lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpserve.server.chat.template_needs import Needs, needs_of
from mtpserve.text.tokenizer import Tokenizer
from tests.server.test_tools import CITY, USER, WEATHER, Server
from tests.text import tiny

HEAD = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
# How a message is written: its calls as `calls` say, or else its content.
PLAIN = "{{ m.role[0] }}{{ m.tool_call_id }}: {{ m.content }}"
TURN = "{% for m in messages %}%1{% if m.tool_calls is defined %}%2{% else %}" + PLAIN + "{% endif %}{{ '\n' }}{% endfor %}"
EACH = "{% for c in m.tool_calls %}{{ c.function.name }}%1{% endfor %}"
RAISE = "{% if m.tool_calls is defined and m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
NINE = "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}"
ULM, BONN = {"city": "Ulm"}, {"city": "Bonn"}
A9, B9 = "05f49740f", "9d60374e1"  # for call_a and call_b


def template(calls: str, front: str = "", head: str = HEAD) -> str:
    return head + TURN.replace("%1", front).replace("%2", calls)


def calling(*cities: dict[str, str], content: str | None = None) -> list[dict[str, Any]]:
    ids = ["call_a", "call_b"][: len(cities)]
    calls = [
        {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(city)}}
        for id, city in zip(ids, cities, strict=True)
    ]
    results = [{"role": "tool", "tool_call_id": id, "content": f"sun in {city['city']}"} for id, city in zip(ids, cities, strict=True)]
    return [USER, {"role": "assistant", "content": content, "tool_calls": calls}, *reversed(results)]


def prompt(folder: Path, text: str, messages: list[dict[str, Any]], format: str = "hermes", **fields: Any) -> str:
    server = Server(Tokenizer(tiny.write(folder, text)), "ok", tools=format)
    server.choice(messages=messages, **fields)
    return server.prompt()


OBJECT, TEXT = EACH.replace("%1", " {{ c.function.arguments | tojson }} "), EACH.replace("%1", "{{ ' ' + c.function.arguments }} ")
PRINTED = EACH.replace("%1", " {{ c.function.arguments }} ")  # Python's spelling of an object, JSON as it is
ULM_CALL, BONN_CALL = 'get_weather {"city": "Ulm"}', 'get_weather {"city": "Bonn"}'
RESULTS = "tcall_b: sun in Bonn\ntcall_a: sun in Ulm"
BOTH = f"{ULM_CALL} {BONN_CALL} "
THINKS = "{% if m.thinking and m.content %}{{ raise_exception('one of both') }}{% endif %}"
THOUGHT = "{{ '(' + (m.thinking or m.content) + ')' }}"
WRITTEN = [
    ("object", template(OBJECT), f"u: hello\n{BOTH}\n{RESULTS}\n"),
    ("text", template(TEXT), f"u: hello\n{BOTH}\n{RESULTS}\n"),
    ("printed", template(PRINTED), f"u: hello\n{BOTH}\n{RESULTS}\n"),
    ("one call", template(OBJECT, RAISE), f"u: hello\n{ULM_CALL} \ntcall_a: sun in Ulm\n{BONN_CALL} \ntcall_b: sun in Bonn\n"),
    ("short ids", template(OBJECT, NINE), f"u: hello\n{BOTH}\nt{B9}: sun in Bonn\nt{A9}: sun in Ulm\n"),
    ("short ids, text", template(TEXT, NINE), f"u: hello\n{BOTH}\nt{B9}: sun in Bonn\nt{A9}: sun in Ulm\n"),
]


@pytest.mark.parametrize(("kind", "text", "written"), WRITTEN, ids=lambda value: value[:15])
def test_calls_reach_every_kind_of_template(tmp_path: Path, kind: str, text: str, written: str) -> None:
    found = prompt(tmp_path, text, calling(ULM, BONN), tools=[WEATHER])
    assert found == json.dumps([WEATHER]) + "\n" + written
    assert prompt(tmp_path, text, calling(ULM, BONN)) == written, "tools of an earlier request"


def test_a_template_that_takes_reasoning_or_text_before_calls_gets_one_of_them(tmp_path: Path) -> None:
    text = template(THOUGHT + OBJECT, RAISE + THINKS)
    messages = calling(ULM, BONN)
    messages[1]["reasoning_content"] = "why"
    written = f"u: hello\n(why){ULM_CALL} \ntcall_a: sun in Ulm\n(){BONN_CALL} \ntcall_b: sun in Bonn\n"
    assert prompt(tmp_path, text, messages) == written
    messages[1]["content"] = "So."
    assert prompt(tmp_path, text, messages) == written.replace("why", "why\n\nSo.")
    other = template("{{ m.reasoning_content }}" + OBJECT)
    assert prompt(tmp_path, other, messages) == f"u: hello\nwhy{BOTH}\n{RESULTS}\n"


@pytest.mark.parametrize(("format", "call"), [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                    '{"city": "Ulm"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>'
                     '{"city": "Ulm"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Ulm"}}'),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Ulm"}}]'),
    ("glm45", '{"name": "get_weather", "arguments": {"city": "Ulm"}}'),
])  # fmt: skip
def test_a_template_without_calls_gets_them_as_the_model_writes_them(tmp_path: Path, format: str, call: str) -> None:
    plain = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"
    assert prompt(tmp_path, plain, calling(ULM), format) == f"u: hello\na: {call}\nt: sun in Ulm\n"
    assert prompt(tmp_path, plain, calling(ULM, content="So."), format) == f"u: hello\na: So.\n{call}\nt: sun in Ulm\n"


def test_a_template_without_tools_gets_them_as_a_system_message(tmp_path: Path) -> None:
    silent = template(OBJECT, head="")
    told = (
        "## Tools\nYou have access to the following tools:\n\n### get_weather\nDescription: the weather\n\n"
        f"Parameters: {json.dumps(CITY)}\n\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
        "{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces\n"
    )
    system = {"role": "system", "content": "Be kind."}
    asked = {"format": "deepseek_v31", "tools": [WEATHER]}
    assert prompt(tmp_path, silent, [USER], **asked) == f"s: {told}u: hello\n"
    assert prompt(tmp_path, silent, [system, USER], **asked) == f"s: Be kind.\n\n{told}u: hello\n"
    assert prompt(tmp_path, silent, [system, USER], tool_choice="none", **asked) == "s: Be kind.\nu: hello\n"
    assert "## Tools" not in prompt(tmp_path, template(OBJECT), [USER], **asked)


def test_a_template_that_needs_descriptions_gets_empty_ones(tmp_path: Path) -> None:
    undescribed = {"type": "function", "function": {"name": "now"}}
    needed = "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}\n{% endfor %}"
    assert prompt(tmp_path / "needed", template(OBJECT, head=needed), [USER], tools=[undescribed, WEATHER]).startswith(
        "now: \nget_weather: the weather\n"
    )
    assert "description" not in prompt(tmp_path / "not", template(OBJECT), [USER], tools=[undescribed])


def test_of_several_templates_the_one_for_tools_writes_calls(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    both = [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": template(OBJECT)}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": both}))
    server = Server(Tokenizer(tmp_path), "ok")
    server.choice(messages=[USER])
    assert server.prompt() == "hello"
    server.choice(messages=calling(ULM))
    assert server.prompt() == f"u: hello\n{ULM_CALL} \ntcall_a: sun in Ulm\n"


def test_nothing_is_tried_where_there_are_no_tools(tmp_path: Path) -> None:
    server = Server(Tokenizer(tiny.write(tmp_path)), "ok")
    server.choice(messages=[USER])
    service = server.app.state.service
    assert service._needs is None
    server.choice(messages=calling(ULM))
    assert service._needs == Needs(in_text=True, tools_told=False)


def test_a_template_that_refuses_everything_refuses_in_its_own_words(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny.write(tmp_path, "{{ raise_exception('not today') }}"))
    assert needs_of(lambda messages, tools: tokenizer.render_chat(messages, tools=tools)) == Needs()
    answer = Server(tokenizer, "ok").post(messages=calling(ULM), tools=[WEATHER])
    assert answer.status_code == 400 and "not today" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_either_name_switches_thinking(tmp_path: Path, name: str) -> None:
    text = "{{ thinking }}/{{ enable_thinking }}"
    for asked, found in ((True, "True/True"), (False, "False/False")):
        assert prompt(tmp_path, text, [USER], chat_template_kwargs={name: asked}) == found
    assert prompt(tmp_path, text, [USER], chat_template_kwargs={"thinking": True, "enable_thinking": False}) == "True/False"
    for asked, found in ((True, "True/True"), (False, "False/False"), (None, "/")):
        assert prompt(tmp_path, text, [USER], reasoning={"enabled": asked}) == found
    assert prompt(tmp_path, text, [USER]) == "/"
