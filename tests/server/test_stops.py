"""Stop strings through the HTTP app: they count in the answer's text alone, and the one that was met is told. No cut call is complete."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mtpserve.text.tokenizer import Tokenizer
from tests.server.speaking import checkpoint
from tests.server.test_messages import named
from tests.server.test_tool_blocks import ask, post, respond
from tests.server.test_tools import CALL, WEATHER, Server, streamed

THOUGHT = "<think>The text says Question: and so on.</think>"
CUT = CALL[: CALL.index("Ulm") + 2]  # the model ended its text in the middle


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


def chat(server: Server, stream: bool, **fields: Any) -> dict[str, Any]:
    """A message with its finish_reason and, unless streamed, its stop_reason."""
    if stream:
        return streamed(server.post(stream=True, **fields))
    choice = server.choice(**fields)
    return choice["message"] | {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}


def calls_of(message: dict[str, Any]) -> list[str]:
    return [(call.get("function") or call)["arguments"] for call in message.get("tool_calls") or []]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_reasoning_may_contain_a_stop_string(tokenizer: Tokenizer, stream: bool, step: int) -> None:
    server = Server(tokenizer, f"{THOUGHT}The answer is 4. Question: next", reasoning="qwen3", step=step)
    message = chat(server, stream, stop=["Question:"])
    assert message["reasoning_content"] == "The text says Question: and so on."
    assert (message["content"], message["finish_reason"]) == ("The answer is 4. ", "stop")
    assert chat(server, stream, stop=["Question:"], separate_reasoning=False)["content"] == f"{THOUGHT}The answer is 4. "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_call_may_contain_a_stop_string(tokenizer: Tokenizer, stream: bool, step: int) -> None:
    server = Server(tokenizer, f"See. {CALL}", step=step)
    message = chat(server, stream, tools=[WEATHER], stop=["Ulm", '"}'])
    assert calls_of(message) == ['{"city": "Ulm"}'] and message["finish_reason"] == "tool_calls"
    message = chat(server, stream, tools=[WEATHER], stop=["ee"])
    assert (message["content"], calls_of(message), message["finish_reason"]) == ("S", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_messages_and_their_stop_sequences(tokenizer: Tokenizer, stream: bool) -> None:
    for text, reason, matched in ((f"{THOUGHT}See. {CALL}", "tool_use", None), (f"{THOUGHT}Question: 1", "stop_sequence", "Question:")):
        server = Server(tokenizer, text, reasoning="qwen3")
        answer = ask(server, stop_sequences=["Ulm", "Question:"], stream=stream)
        told = named(answer.text)[-2][1]["delta"] if stream else answer.json()
        assert (told["stop_reason"], told["stop_sequence"]) == (reason, matched)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_its_text_cuts_is_not_complete(tokenizer: Tokenizer, stream: bool) -> None:
    server = Server(tokenizer, CUT)
    assert chat(server, stream, tools=[WEATHER])["finish_reason"] == "stop"
    answer = ask(server, stream=stream)
    assert (named(answer.text)[-2][1]["delta"] if stream else answer.json())["stop_reason"] == "end_turn"
    answer = respond(server, stream=stream)
    items = (named(answer.text)[-1][1]["response"] if stream else answer.json())["output"]
    assert [item["status"] for item in items if item["type"] == "function_call"] == ["incomplete"]


def test_a_call_that_is_no_json_is_complete_where_the_model_closed_it(tokenizer: Tokenizer) -> None:
    """Its client tells the model what is wrong with it."""
    broken = CALL.replace('"Ulm"', '"say "Ulm""')
    message = chat(Server(tokenizer, broken), False, tools=[WEATHER])
    assert message["finish_reason"] == "tool_calls" and calls_of(message) == ['{"city": "say "Ulm""}']


@pytest.mark.parametrize(
    ("stops", "text", "matched"), [(["bc", "abc"], "x ", "abc"), (["bd", "xa", "x a"], "", "x a"), (["zz"], "x abc", None)]
)
def test_the_stop_string_that_was_met_is_told(tokenizer: Tokenizer, stops: list[str], text: str, matched: str | None) -> None:
    server = Server(tokenizer, "x abc", tools="none")
    told = post(server, "/v1/completions", prompt="a", max_tokens=9, stop=stops).json()["choices"][0]
    assert (told["text"], told["stop_reason"]) == (text, matched)
    asked = {"text": "a", "sampling_params": {"max_new_tokens": 9, "stop": stops}}
    meta = json.loads(post(server, "/generate", **asked).text)["meta_info"]["finish_reason"]
    assert meta.get("matched") == (matched or tokenizer.encode("<|end|>", special=False)[0])
