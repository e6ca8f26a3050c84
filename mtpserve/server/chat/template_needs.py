"""What a model's chat template needs of conversations with tools, determined by rendering small ones.

Templates differ in what they render, and many drop the rest without an error: calls beside a text, or tools
altogether.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mtpserve.core.errors import InvalidRequest
from mtpserve.text.parsers.formats.json_calls import Listed
from mtpserve.text.parsers.tools import example_of

Message = dict[str, Any]
# messages and tools to the prompt's text
Render = Callable[[list[Message], list[dict[str, Any]] | None], str]

ID_LENGTH = 9  # characters of an id, which Mistral's templates insist on


@dataclass(frozen=True, slots=True)
class Needs:
    json_text: bool = False  # arguments as JSON; an object otherwise
    short_ids: bool = False  # nine letters and digits
    one_call: bool = False  # one call in a message
    in_text: bool = False  # calls as the model writes them, in the content
    tools_told: bool = True  # the template says which tools there are
    described: bool = False  # each tool has a description
    one_text: bool = False  # reasoning or a text before calls, and not both, as gpt-oss's template insists on

    def adapt_messages(self, messages: Sequence[Message], example: str) -> list[Message]:
        """The same conversation, as the template takes it. `example`: of a call in the model's format."""
        if not any("tool_calls" in message for message in messages):
            return list(messages)
        return [
            self._adapt_message(message, example)
            for message in (single(messages) if self.one_call else messages)
        ]

    def adapt_tools(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if not self.described or tools is None:
            return tools
        return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]

    def _adapt_message(self, message: Message, example: str) -> Message:
        if self.short_ids and "tool_call_id" in message:
            return {**message, "tool_call_id": short(message["tool_call_id"])}
        if "tool_calls" not in message:
            return message
        if self.one_text and message["content"] and (reasoning := message.get("reasoning_content")):
            message = {**message, "reasoning_content": f"{reasoning}\n\n{message['content']}", "content": ""}
        if self.in_text:
            calls = [example_of(example, **call["function"]) for call in message["tool_calls"]]
            content = "\n".join([message["content"], *calls] if message["content"] else calls)
            return {
                **{name: value for name, value in message.items() if name != "tool_calls"},
                "content": content,
            }
        return {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.json_text:
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return {**call, "function": function} | ({"id": short(call.get("id", ""))} if self.short_ids else {})


def short(id: str) -> str:
    if len(id) == ID_LENGTH and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:ID_LENGTH]


def single(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields each call in a message of its own, followed by its result. The first message has the text and
    the reasoning before the calls."""
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            yield message
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for number, call in enumerate(calls):
            front = (
                message
                if number == 0
                else {name: value for name, value in message.items() if name != "reasoning_content"}
            )
            yield {**front, "content": message["content"] if number == 0 else "", "tool_calls": [call]}
            result = next(
                (candidate for candidate in results if candidate["tool_call_id"] == call.get("id")), None
            )
            if result is not None:
                results.remove(result)
                yield result
        yield from results


# -- trying --------------------------------------------------------------------------------------------------

NAME, VALUES = "probed_function", ("qzv", "qwv")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "probe",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
UNDESCRIBED = {
    **TOOL,
    "function": {name: value for name, value in TOOL["function"].items() if name != "description"},
}
USER = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "answer"}
RESULT, THOUGHT = "qyv", "qxv"
# the needs that templates with calls may have
KINDS = tuple(Needs(short_ids=ids, json_text=text) for ids, text in product((False, True), repeat=2))
WRONG = ("None", "{'", '{\\"')  # a null, a Python object and JSON within JSON, printed into the text


def calling(*values: str) -> list[Message]:
    ids = [f"call_{number:024}" for number in range(len(values))]  # as OpenAI and this server write them
    calls = [
        {"id": id, "type": "function", "function": {"name": NAME, "arguments": {"key": value}}}
        for id, value in zip(ids, values, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": id, "content": f"{RESULT} of {value}"}
        for id, value in zip(ids, values, strict=True)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def needs_of(render: Render) -> Needs:
    """The first that suits, the plainest first. Where nothing does, conversations with calls fail with the
    template's own words."""

    def tried(needs: Needs, *messages: Message, tool: dict[str, Any] = TOOL) -> str:
        try:
            return render(needs.adapt_messages(messages, Listed.example), [tool])
        except InvalidRequest:
            return ""

    plain = tried(Needs(), USER)

    def shows(needs: Needs, *values: str) -> bool:
        # The call as the newest turn, and further back, where some templates write less.
        newest, older = (
            tried(needs, USER, *calling(*values)),
            tried(needs, USER, *calling(*values), ANSWER, USER),
        )
        same = all(text.count(word) == plain.count(word) for word in WRONG for text in (newest, older))
        whole = all(
            text.count(f"{RESULT} of {value}") == 1 and text.count(value) == 2
            for value in values
            for text in (newest, older)
        )
        return same and whole

    suits = next((kind for kind in [*KINDS, Needs(in_text=True)] if shows(kind, VALUES[0])), Needs())

    def shows_thought(content: str) -> bool:
        call, result = calling(VALUES[0])
        return THOUGHT in tried(
            suits, USER, {**call, "reasoning_content": THOUGHT, "content": content}, result
        )

    one_call = not shows(suits, *VALUES) and shows(replace(suits, one_call=True), *VALUES)
    one_text = shows_thought("") and not shows_thought("text")
    described = bool(plain) and not tried(Needs(), USER, tool=UNDESCRIBED)
    return replace(
        suits,
        one_call=one_call,
        tools_told=not plain or NAME in plain,
        one_text=one_text,
        described=described,
    )
