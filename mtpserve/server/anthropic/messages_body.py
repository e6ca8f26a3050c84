"""The bodies of /v1/messages and /v1/messages/count_tokens, and their way to a conversation."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import RANGES
from mtpserve.server.chat import forms
from mtpserve.server.chat.bodies import BudgetTokens, ChatRequest, SamplingFields
from mtpserve.server.chat.conversation import (
    MAX_MESSAGES,
    CalledFunction,
    ChatMessage,
    MessageToolCall,
    TextPart,
    TextParts,
    text_of_parts,
)
from mtpserve.server.chat.offers import Offer
from mtpserve.server.http.errors import Unsupported
from mtpserve.server.schema.base import Label, RequestId, Strict, Texts, Timeout
from mtpserve.server.schema.fields import either
from mtpserve.server.schema.shapes import NULL, SAMPLING, Schema, bounds, present
from mtpserve.text.requests import check_text

CONTENT = "a string or a list of blocks like {'type': 'text', 'text': ...}"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # in OpenAI's words


class ContentBlock(TextPart):
    """`thinking` is of a block of reasoning; `id`, `name`, `input` of a tool_use; `tool_use_id`, `content`,
    `is_error` of a tool_result. Results of Anthropic's own tools have content of other kinds."""

    thinking: str | None = None
    id: Label | None = None
    name: str | None = None  # of any length: the model wrote it
    input: Any = None
    tool_use_id: Label | None = None
    content: Annotated[str | TextParts | dict[str, Any] | None, either(CONTENT)] = None
    is_error: bool | None = None


CALL = {"id": forms.STRING, "name": forms.STRING}
RESULT = {"tool_use_id": forms.STRING, "content": forms.or_null(forms.HISTORY)}
OF_USER = (
    forms.TEXT_PART,
    forms.DOCUMENT,
    forms.SEARCH_RESULT,
    forms.kind("tool_result", RESULT, ["tool_use_id"]),
)
OF_ASSISTANT = (
    forms.TEXT_PART,
    forms.kind("tool_use", CALL, CALL),
    forms.other_part("text", "tool_use"),
)


DEMANDED: Schema = {  # what is demanded has to be there
    "anyOf": [
        {
            "properties": {
                "tool_choice": {
                    "anyOf": [NULL, {"type": "object", "properties": {"type": {"enum": ["auto", "none"]}}}]
                }
            }
        },
        {"required": ["tools"], "properties": {"tools": {"type": "array", "minItems": 1}}},
    ]
}


def blocks(role: str, kinds: tuple[Schema, ...]) -> Schema:
    return {
        "properties": {
            "role": {"const": role},
            "content": {"anyOf": [forms.STRING, {"type": "array", "items": {"anyOf": list(kinds)}}]},
        }
    }


class InputMessage(Strict):
    rules: ClassVar[tuple[Schema, ...]] = (
        {
            "anyOf": [
                blocks("user", OF_USER),
                blocks("assistant", OF_ASSISTANT),
                blocks("system", (forms.TEXT_PART,)),
            ]
        },
    )

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Annotated[list[ContentBlock], Field(fail_fast=True)], either(CONTENT)]


class UserMetadata(Strict):
    user_id: Label | None = None


class ThinkingOptions(Strict):
    """Told to the chat template, as `thinking` and `enable_thinking`. The budget ends the reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: BudgetTokens | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """The output's form, and how much to think, which the chat template is told as `reasoning_effort`."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ToolDefinition(Strict):
    """One with another type than these is of those that only Anthropic's own models know."""

    shapes: ClassVar[dict[str, Schema]] = {"input_schema": forms.PARAMETERS}
    rules: ClassVar[tuple[Schema, ...]] = (
        {
            "anyOf": [
                {
                    "required": ["name", "input_schema"],
                    "properties": {
                        "type": {"enum": [None, "custom"]},
                        "name": forms.FIELDS["name"],
                        "input_schema": forms.OBJECT,
                    },
                },
                {
                    "required": ["type"],
                    "properties": {"type": {"type": "string", "not": {"const": "custom"}}},
                },
            ]
        },
    )

    type: str | None = None
    name: str | None = None  # a set of tools of some other server has none
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None

    def function(self, place: str) -> dict[str, Any]:
        """Returns the tool in OpenAI's form. Raises InvalidRequest."""
        for field in ("name", "input_schema"):
            if getattr(self, field) is None:
                raise InvalidRequest(f"{place}.{field}: field required", f"{place}.{field}")
        fields = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {name: value for name, value in fields.items() if value is not None}


class ToolChoice(Strict):
    rules: ClassVar[tuple[Schema, ...]] = (
        {"anyOf": [{"properties": {"type": {"enum": [*CHOICES]}}}, present("name")]},
    )

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def openai_form(self) -> str | dict[str, Any]:
        """Returns the choice in OpenAI's form. Raises InvalidRequest."""
        if self.type != "tool":
            return CHOICES[self.type]
        if self.name is None:
            raise InvalidRequest("tool_choice of type tool needs a name", "tool_choice")
        return {"type": "function", "function": {"name": self.name}}


class CountRequest(Strict):
    column = "messages"
    shapes: ClassVar[dict[str, Schema]] = {
        "messages": {"minItems": 1},
        "system": forms.CONTENT,
        "chat_template_kwargs": forms.VARIABLES,
    }
    rules: ClassVar[tuple[Schema, ...]] = ({"properties": {"thread": NULL}}, DEMANDED)

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    system: Annotated[str | TextParts | None, either(CONTENT)] = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the name of output_config.format in the API's beta
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_threads(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("thread") is not None:
            raise Unsupported(
                "thread is not supported: this server keeps no messages, send all of them", "thread"
            )
        return body

    def offer(self) -> Offer:
        offer = Offer()
        for index, tool in enumerate(self.tools or []):
            place = f"tools[{index}]"
            if tool.type in (None, "custom"):
                offer.add(tool.function(place), place)
            else:
                offer.leave_out(tool.type, place, tool.name)
        offer.check(None if self.tool_choice is None else self.tool_choice.name)
        return offer

    def chat(self, offer: Offer) -> ChatRequest:
        system = None if self.system is None else text_of_parts(self.system, "system", "system")
        check_text(system or "", "system")
        messages = [] if system is None else [ChatMessage(role="system", content=system)]
        for message in self.messages:
            messages += chat_messages(message)
        # An assistant's message at the end is the beginning of the answer.
        goes_on = bool(messages) and messages[-1].role == "assistant"
        if goes_on and messages[-1].tool_calls:
            raise InvalidRequest(
                "messages: tool_use blocks in the last message need their tool_result blocks after it",
                "messages",
            )
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        switches = {} if thinks is None else dict.fromkeys(("thinking", "enable_thinking"), thinks)
        choice, output = self.tool_choice, self.output_config or OutputConfig()
        return ChatRequest.model_construct(
            messages=messages,
            continue_final_message=goes_on,
            chat_template_kwargs=switches | (self.chat_template_kwargs or {}),
            include_reasoning=thinks,
            reasoning_effort=output.effort,
            response_format=self._form(),
            tools=offer.functions,
            tool_choice=None if choice is None else choice.openai_form(),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        )

    def _form(self) -> dict[str, Any] | None:
        """Returns the output's form as OpenAI's response_format, or None. Raises InvalidRequest."""
        new = None if self.output_config is None else self.output_config.format
        if new is not None and self.output_format is not None:
            raise InvalidRequest(
                "output_config.format and output_format are the same thing: give one of them", "output_format"
            )
        form = new or self.output_format
        return None if form is None else {"type": "json_schema", "json_schema": {"schema": form.schema_}}


class MessagesRequest(CountRequest, SamplingFields):
    shapes: ClassVar[dict[str, Schema]] = {
        "max_tokens": bounds(RANGES["max_tokens"]),  # it may be more than there is room for
        "stop_sequences": SAMPLING["stop"],
    }

    max_tokens: int
    stop_sequences: Texts | None = None
    stream: bool | None = None
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    rid: RequestId | None = None
    timeout: Timeout | None = None

    def chat(self, offer: Offer) -> ChatRequest:
        """Returns the chat request without `max_tokens`, which may exceed the room."""
        names = ("model", "stream", "timeout", *SamplingFields.model_fields)
        fields = {name: getattr(self, name) for name in names}
        if self.stop_sequences is not None:
            fields["stop"] = self.stop_sequences
        if self.thinking is not None and self.thinking_token_budget is None:
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        return CountRequest.chat(self, offer).model_copy(update=fields)


def chat_messages(message: InputMessage) -> list[ChatMessage]:
    """Results of tools are messages of their own, in the blocks' order."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [assistant_message(message.content)]
    messages: list[ChatMessage] = []
    for of_tools, blocks in groupby(
        message.content, lambda block: message.role == "user" and block.type == "tool_result"
    ):
        if of_tools:
            messages += [result(block) for block in blocks]
        else:
            after_tool = bool(messages) and messages[-1].role == "tool"
            text = text_of_parts(list(blocks), "messages", "messages", history=after_tool)
            messages.append(ChatMessage(role=message.role, content=text))
    return messages or [ChatMessage(role=message.role, content="")]


def assistant_message(blocks: list[ContentBlock]) -> ChatMessage:
    texts = [block for block in blocks if block.type not in ("thinking", "redacted_thinking", "tool_use")]
    reasoning = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    calls = [tool_call_of(block) for block in blocks if block.type == "tool_use"]
    return ChatMessage(
        role="assistant",
        content=text_of_parts(texts, "messages", "messages", history=True),
        reasoning_content=reasoning or None,
        tool_calls=calls or None,
    )


def tool_call_of(block: ContentBlock) -> MessageToolCall:
    if block.id is None or block.name is None:
        raise InvalidRequest("messages: a tool_use block needs id and name", "messages")
    return MessageToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=block.input))


def result(block: ContentBlock) -> ChatMessage:
    """Templates know of no errors: the text says that it is one."""
    if block.tool_use_id is None:
        raise InvalidRequest("messages: a tool_result block needs tool_use_id", "messages")
    if isinstance(block.content, dict):
        raise InvalidRequest(f"messages: the content of a tool_result block must be {CONTENT}", "messages")
    text = text_of_parts(block.content, "messages", "messages", history=True)
    return ChatMessage(
        role="tool", content=f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id
    )
