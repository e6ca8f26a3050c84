"""The body of POST /v1/responses, and its way to a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.conversation import MAX_MESSAGES, CalledFunction, ChatMessage, MessageToolCall, called
from mtpserve.server.errors import SHORT, Unsupported
from mtpserve.server.fields import either
from mtpserve.server.openai import ChatRequest, Effort, Label, Metadata, SamplingFields, Strict, Timeout, refuse, unsupported
from mtpserve.text.requests import check_text

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    # Reasoning comes as text and is taken back as text: nothing has to be encrypted for a client that keeps it itself.
    "include": (None, [], ["reasoning.encrypted_content"]),
    "max_tool_calls": (None,),
    "prompt": (None,),
    "request_id": (None,),
    "rid": (None,),
    "service_tier": (None, "auto", "default"),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
CONTENT = "a string or a list of parts like {'type': 'input_text', 'text': ...}"
TEXTS = ("input_text", "output_text", "text")


class Part(Strict):
    type: str
    text: str | None = None


Parts = Annotated[list[Part], Field(fail_fast=True)]


class Item(Strict):
    """A message, the reasoning in front of the assistant's next one, a call that the assistant made, or what came of it."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Annotated[str | Parts | None, either(CONTENT)] = None
    call_id: Label | None = None
    name: Label | None = None
    arguments: str | None = None
    output: Annotated[str | Parts | None, either(CONTENT)] = None


class Reasoning(Strict):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None  # OpenAI's word for what there is, which is the reasoning itself


class TextOptions(Strict):
    """`format` as in chat completions, but with the schema's fields beside its type."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(SamplingFields):
    input: Annotated[
        str | Annotated[list[Item], Field(fail_fast=True, max_length=MAX_MESSAGES)],
        either(f"a string or a list of at most {MAX_MESSAGES} items"),
    ]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: Label | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, either("a string or an object")] = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    timeout: Timeout | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_by_name(cls, body: Any) -> Any:
        return refuse(body, unsupported(cls) | UNSUPPORTED)

    def check(self) -> None:
        if not self.input:
            raise InvalidRequest("input is empty", "input")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        check_text(self.instructions or "", "instructions")

    def chat(self, conversation: list[ChatMessage]) -> ChatRequest:
        instructions = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        return ChatRequest.model_construct(
            messages=[*instructions, *conversation],
            model=self.model,
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            response_format=self._format(),
            structured_outputs=self.structured_outputs,
            tools=[function(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or [])],
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            timeout=self.timeout,
            **{name: getattr(self, name) for name in SamplingFields.model_fields},
        )

    def _format(self) -> dict[str, Any] | None:
        given = None if self.text is None else self.text.format
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}

    def _tool_choice(self) -> str | dict[str, Any] | None:
        """As chat completions have it, where a name stands one level deeper."""
        given = self.tool_choice
        if not isinstance(given, dict):
            return given
        if given.get("type") != "function" or not isinstance(given.get("name"), str):
            raise Unsupported("tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'name': ...}", "tool_choice")
        return {"type": "function", "function": {"name": given["name"]}}


def function(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """A tool as chat completions have it, where all but its type stands one level deeper."""
    if tool.get("type") != "function":
        kind = SHORT.repr(tool.get("type"))
        raise Unsupported(f"{place}.type {kind} is not supported: this server has no tools of its own, only functions", f"{place}.type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def messages_of(given: str | list[Item]) -> list[ChatMessage]:
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    messages: list[ChatMessage] = []
    reasoning = ""
    for index, item in enumerate(given):
        if item.type == "reasoning":
            reasoning += text_of(item.content, ("reasoning_text",))
            continue
        message = message_of(item, f"input[{index}]")
        if item.type == "function_call" and messages and messages[-1].role == "assistant" and not reasoning:
            last = messages[-1]  # the calls of one answer are one message's
            messages[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or []), *(message.tool_calls or [])]})
            continue
        if message.role == "assistant" and reasoning:
            message = message.model_copy(update={"reasoning_content": reasoning})
        messages.append(message)
        reasoning = ""
    return messages


def message_of(item: Item, place: str) -> ChatMessage:
    match item.type:
        case "message":
            if item.role is None or item.content is None:
                raise InvalidRequest(f"{place}: a message needs role and content", "input")
            return ChatMessage(role=item.role, content=text_of(item.content, TEXTS))
        case "function_call":
            if item.call_id is None or item.name is None or item.arguments is None:
                raise InvalidRequest(f"{place}: a function_call needs call_id, name and arguments", "input")
            call = MessageToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
            called(call, place)
            return ChatMessage(role="assistant", content="", tool_calls=[call])
        case "function_call_output":
            if item.call_id is None or item.output is None:
                raise InvalidRequest(f"{place}: a function_call_output needs call_id and output", "input")
            return ChatMessage(role="tool", content=text_of(item.output, TEXTS), tool_call_id=item.call_id)
    raise Unsupported(f"{place}: items of type {item.type[:50]!r} are not supported here", "input")


def text_of(content: str | list[Part] | None, kinds: tuple[str, ...]) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    for part in content:
        if part.type not in kinds or part.text is None:
            raise Unsupported(f"input: content of type {part.type[:50]!r} is not supported here", "input")
    return "\n".join(part.text or "" for part in content)
