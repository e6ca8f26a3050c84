"""What /v1/responses answers: the response, its items, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from mtpserve.server.http.rendering import Rendered

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class OutputText(Rendered, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningText(Rendered, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Rendered, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Rendered, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: list[str]  # empty: reasoning is told in full
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET  # where the request includes it; it is not encrypted


class CallItem(Rendered, tag_field="type", tag="function_call", kw_only=True):
    id: str
    status: Status
    call_id: str
    namespace: str | UnsetType = UNSET
    name: str
    arguments: str


AnyItem = MessageItem | ReasoningItem | CallItem


class InputText(Rendered, tag_field="type", tag="input_text"):
    text: str


class ListedMessage(Rendered, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText]  # the latter is the assistant's


class CallOutputItem(Rendered, tag_field="type", tag="function_call_output"):
    id: str
    status: Status
    call_id: str
    output: str | list[InputText]


ListedItem = ListedMessage | ReasoningItem | CallItem | CallOutputItem


class ItemList(Rendered):
    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CompactionItem(Rendered, tag_field="type", tag="compaction"):
    id: str
    encrypted_content: str


class CompactionObject(Rendered):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[CompactionItem]
    usage: ResponseUsage


class InputTokens(Rendered):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputDetails(Rendered):
    cached_tokens: int
    cache_write_tokens: int = 0  # nothing is written on request: the cache keeps every prompt


class OutputDetails(Rendered):
    reasoning_tokens: int


class ResponseUsage(Rendered):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Rendered):
    code: str | None
    message: str


class Incomplete(Rendered):
    reason: Literal["max_output_tokens"]


class EffortUsed(Rendered):
    effort: str | None
    summary: None


class TextFormat(Rendered):
    format: dict[str, Any]


class ResponseObject(Rendered):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[AnyItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: EffortUsed
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: Literal["default"]
    store: bool
    presence_penalty: float
    frequency_penalty: float
    temperature: float
    text: TextFormat
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0]
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(Rendered):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseEvent(Rendered):
    type: str
    sequence_number: int
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: AnyItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[str] | UnsetType = UNSET
    response: ResponseObject | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET  # over a WebSocket
