"""Schemas of tools that no grammar can enforce: what is refused, by which name, and what a tool only loses."""

from __future__ import annotations

from typing import Any

import pytest

from mtpserve.server.http import warnings
from mtpserve.server.http.warnings import HEADER
from mtpserve.text.tokenizer import Tokenizer
from tests.server.speaking import checkpoint
from tests.server.test_tools import CALL, NOW, WEATHER, Server

JSON = {"type": "json_object"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


def send(strict: bool | None = None, **to: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"to": to, "subject": {"type": "string", "maxLength": 9}}, "required": ["to"]}
    return {"type": "function", "function": {"name": "send", "parameters": schema, "strict": strict}}


LOOK_AHEAD = {"type": "string", "pattern": "^(?!\\.).+@.+$"}
UNENFORCED: list[tuple[dict[str, Any], str]] = [
    (LOOK_AHEAD, "properties.to.pattern"),
    ({"type": "array", "uniqueItems": True}, "properties.to.uniqueItems"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, "properties.to.propertyNames"),
]


@pytest.mark.parametrize(("to", "word"), UNENFORCED, ids=str)
def test_a_demanded_call_names_tool_property_and_word(tokenizer: Tokenizer, to: dict[str, Any], word: str) -> None:
    server = Server(tokenizer, "a")
    answer = server.post(tools=[NOW, send(**to)], tool_choice="required")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "tools[1].function.parameters"
    assert f"tools[1].function.parameters.{word} cannot be enforced" in error["message"] and "'send'" in error["message"]
    assert "call" not in error["message"] and not server.client.submitted


@pytest.mark.parametrize(("to", "word"), UNENFORCED, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_the_model_may_call_loses_what_cannot_be_enforced(
    tokenizer: Tokenizer, to: dict[str, Any], word: str, stream: bool
) -> None:
    server = Server(tokenizer, '{"a": 1}')
    answer = server.post(tools=[WEATHER, send(**to)], response_format=JSON, stream=stream)
    assert answer.status_code == 200 and f"tool 'send': {word} is not enforced" in answer.headers[HEADER]
    grammar = server.client.submitted[0].sampling.grammar
    assert grammar is not None and '"maxLength": 9' in grammar.instead, "the rest of it is"
    assert word.rpartition(".")[2] not in grammar.instead


def test_a_strict_tool_is_enforced_or_refused(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, '{"a": 1}')
    answer = server.post(tools=[send(strict=True, **LOOK_AHEAD)], response_format=JSON)
    assert answer.status_code == 400 and "properties.to.pattern" in answer.json()["error"]["message"]


def test_an_answer_without_a_fault_has_no_warning(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, CALL)
    assert HEADER not in server.post(tools=[WEATHER], response_format=JSON).headers
    assert HEADER not in server.post(tools=[send(**LOOK_AHEAD)]).headers, "nothing is enforced without a constraint"
    annotated = send(type="string", format="path")
    assert HEADER not in server.post(tools=[annotated], response_format=JSON).headers
    assert server.post(tools=[annotated], tool_choice="required").status_code == 200


def test_what_a_format_of_calls_cannot_enforce_is_lost_too(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, '{"a": 1}', tools="qwen3_coder")
    answer = server.post(tools=[send(type="string", minLength=2)], response_format=JSON)
    assert answer.status_code == 200
    warning = answer.headers[HEADER]
    assert "properties.to.minLength" in warning and "properties.subject.maxLength" in warning
    server = Server(tokenizer, '{"a": 1}', tools="pythonic")
    spaced = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a b": {"type": "string"}}}}}
    assert "properties.a b is not enforced" in server.post(tools=[spaced], response_format=JSON).headers[HEADER]


def test_the_log_has_a_warning_once(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients send their tools with every request."""
    monkeypatch.setattr(warnings, "LOGGED", set())
    tool = send(type="string", pattern="(?=never said before)")
    for _ in range(3):
        assert HEADER in Server(tokenizer, '{"a": 1}').post(tools=[tool], response_format=JSON).headers
    assert [record.getMessage() for record in caplog.records if "properties.to.pattern" in record.getMessage()] == [
        "tool 'send': properties.to.pattern is not enforced: its regular expression is not usable: look-around, including look-ahead "
        "and look-behind, is not supported"
    ]
