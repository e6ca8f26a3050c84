"""The body of POST /v1/responses, and its way to a conversation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.chat import forms
from mtpserve.server.chat.bodies import ChatRequest, SamplingFields
from mtpserve.server.chat.conversation import ChatMessage
from mtpserve.server.chat.offers import Offer
from mtpserve.server.chat.tools import checked_name
from mtpserve.server.http.errors import SHORT, Unsupported
from mtpserve.server.openai.responses.response_input import Input
from mtpserve.server.schema.base import Effort, Label, Metadata, Strict, Timeout, say_once
from mtpserve.server.schema.fields import either
from mtpserve.server.schema.shapes import CLAMPED_TOKENS, TEXT, Schema, needs
from mtpserve.text.requests import check_text

# A chat request's fields as this API names them.
RENAMED = {
    "max_tokens": "max_output_tokens", "messages": "input", "response_format": "text",
    "reasoning_effort": "reasoning", ".function": "",
}  # fmt: skip
SEALED_REASONING = "reasoning.encrypted_content"
# Accepted, and never included: they are of tools that other servers run.
NOTHING_TO_INCLUDE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url", "file_search_call.results",
        "message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results",
    }
)  # fmt: skip


MEMBER = forms.kind("function", forms.FIELDS, ["name"])
TOOL: Schema = {
    "anyOf": [
        MEMBER,
        forms.kind(
            "namespace",
            {"name": forms.FIELDS["name"], "tools": {"type": "array", "items": MEMBER}},
            ["name", "tools"],
        ),
        {
            "type": "object",
            "properties": {"type": {"type": "string", "not": {"enum": ["function", "namespace"]}}},
            "required": ["type"],
        },
    ]
}


class EffortOptions(Strict):
    """`summary` allows one; there is none, since reasoning is told in full."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Strict):
    """`format` as in chat completions, but with the schema's fields beside its type. No template is told of
    `verbosity`."""

    shapes: ClassVar[dict[str, Schema]] = {"format": forms.TEXT_FORMAT}

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


SOMETHING: Schema = {
    "anyOf": [
        {"required": ["input"], "properties": {"input": {"anyOf": [TEXT, {"type": "array", "minItems": 1}]}}},
        *(
            {"required": [name], "properties": {name: TEXT}}
            for name in ("instructions", "previous_response_id")
        ),
    ]
}


class InputTokensRequest(Strict):
    """What of a request its prompt depends on."""

    column = "responses"
    shapes: ClassVar[dict[str, Schema]] = {
        "tools": {"items": TOOL},
        "tool_choice": forms.TOOL_CHOICE_FLAT,
        "chat_template_kwargs": forms.VARIABLES,
    }
    rules: ClassVar[tuple[Schema, ...]] = (SOMETHING, forms.DEMANDED)

    input: Input | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Label | None = None
    reasoning: EffortOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, either("a string or an object")] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # an input that is too long is refused all the same

    def check(self) -> None:
        if not (self.input or self.instructions or self.previous_response_id):
            raise InvalidRequest("input is empty", "input")
        check_text(self.instructions or "", "instructions")

    def offer(self) -> Offer:
        offer = Offer()
        for index, tool in enumerate(self.tools or []):
            add_tool(offer, tool, f"tools[{index}]")
        kind = self.tool_choice.get("type") if isinstance(self.tool_choice, dict) else None
        offer.check(kind if isinstance(kind, str) else None)
        return offer

    def chat(self, conversation: list[ChatMessage], offer: Offer) -> ChatRequest:
        instructions = (
            [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        )
        return ChatRequest.model_construct(
            messages=[*instructions, *conversation],
            model=self.model,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            tools=offer.functions,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
        )

    def _tool_choice(self) -> str | dict[str, Any] | None:
        """Returns the choice as chat completions have it, where a name is one level deeper. Raises
        Unsupported."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") == "allowed_tools":
            return choice
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            raise Unsupported(
                "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'name': ...}",
                "tool_choice",
            )
        return {"type": "function", "function": {"name": choice["name"]}}


class CompactRequest(InputTokensRequest):
    model: str  # the published specification requires it


class ResponsesRequest(InputTokensRequest, SamplingFields):
    shapes: ClassVar[dict[str, Schema]] = {
        "input": {"minLength": 1, "minItems": 1},
        "max_output_tokens": CLAMPED_TOKENS,
        "include": {"items": {"enum": sorted({SEALED_REASONING, *NOTHING_TO_INCLUDE})}},
        "structured_outputs": forms.STRUCTURED_OUTPUTS,
    }
    rules: ClassVar[tuple[Schema, ...]] = (needs("stream_options", "stream"),)

    input: Input
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of tools that the server runs: there are none
    store: bool | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    timeout: Timeout | None = None
    structured_outputs: dict[str, Any] | None = None
    include_reasoning: bool | None = None  # False: it is left out

    @property
    def needs_input(self) -> bool:
        return True

    @property
    def includes_sealed_reasoning(self) -> bool:
        return SEALED_REASONING in (self.include or [])

    def check(self) -> None:
        if self.needs_input and not self.input:
            raise InvalidRequest("input is empty", "input")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        InputTokensRequest.check(self)
        for name in self.include or []:
            if name in NOTHING_TO_INCLUDE:
                say_once(f"include {name!r}")
            elif name != SEALED_REASONING:
                raise Unsupported(f"include {SHORT.repr(name)} is not supported: leave it out", "include")

    def chat(self, conversation: list[ChatMessage], offer: Offer) -> ChatRequest:
        names = ("stream", "include_reasoning", "structured_outputs", "timeout", *SamplingFields.model_fields)
        fields = {name: getattr(self, name) for name in names}
        fields |= {"max_tokens": self.max_output_tokens, "response_format": self._format()}
        return InputTokensRequest.chat(self, conversation, offer).model_copy(update=fields)

    def _format(self) -> dict[str, Any] | None:
        text_format = None if self.text is None else self.text.format
        if text_format is None or text_format.get("type") != "json_schema":
            return text_format
        return {
            "type": "json_schema",
            "json_schema": {name: value for name, value in text_format.items() if name != "type"},
        }


def add_tool(offer: Offer, tool: dict[str, Any], place: str) -> None:
    """Adds the tool if it is a function. A function in a namespace has two names: its own, and with the
    namespace and a dot before it. Raises InvalidRequest."""
    match tool.get("type"):
        case "function":
            offer.add(
                {name: value for name, value in tool.items() if name not in ("type", "defer_loading")}, place
            )
        case "namespace":
            around, inside = checked_name(tool.get("name"), f"{place}.name"), tool.get("tools")
            if not isinstance(inside, list):
                raise InvalidRequest(f"{place}: a namespace needs a name, and a list of tools", f"{place}")
            for index, member in enumerate(inside):
                if (
                    not isinstance(member, dict)
                    or member.get("type") != "function"
                    or not isinstance(member.get("name"), str)
                ):
                    where = f"{place}.tools[{index}]"
                    raise Unsupported(
                        f"{where} must be a function with a name: only they are supported in a namespace",
                        where,
                    )
                whole = f"{around}.{checked_name(member['name'], f'{place}.tools[{index}].name')}"
                offer.members[whole] = (around, member["name"])
                add_tool(offer, member | {"name": whole}, f"{place}.tools[{index}]")
        case kind:
            offer.leave_out(kind, place)
