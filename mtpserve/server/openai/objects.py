"""What /v1/completions and /v1/chat/completions answer, whole and in chunks; with vLLM's and SGLang's fields
beside OpenAI's."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from mtpserve.server.http.rendering import Rendered
from mtpserve.server.openai.usage import TraceStep, UsageObject
from mtpserve.server.schema.kv_transfer import KVTransferAnswer


class PromptLogprob(Rendered):
    logprob: float
    rank: int
    decoded_token: str


class CompletionLogprobs(Rendered):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenScore(Rendered):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenScore):
    top_logprobs: list[TokenScore]


class ChatLogprobs(Rendered):
    content: list[ScoredToken]
    refusal: None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Rendered, kw_only=True):
    """`stop_reason` (vLLM's word) and `matched_stop` (SGLang's) say what ended a choice that stopped. Fields
    that the client does not want are null in whole answers, and left out of chunks, as in vLLM."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    spec_trace: list[TraceStep] | UnsetType = UNSET
    finish_reason: str | None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None


class AnswerMetadata(Rendered):
    """The field is SGLang's."""

    weight_version: str  # of the weights that the answer ended with


class SGLangFields(Rendered):
    """`routed_experts` as in SGLang's `meta_info`, of the choice; a list with those of several."""

    routed_experts: str | list[str]


class CompletionObject(Rendered, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    metadata: AnswerMetadata
    kv_transfer_params: KVTransferAnswer | UnsetType = UNSET
    sglext: SGLangFields | UnsetType = UNSET


class FunctionCall(Rendered):
    name: str
    arguments: str


class ToolCall(Rendered):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(Rendered):
    """Reasoning is under the name that DeepSeek, SGLang and older vLLMs have for it, and under that of newer
    vLLMs."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Rendered, kw_only=True):
    """A chat choice: a completion's, but the prompt's token ids and scores are beside the choices."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None
    spec_trace: list[TraceStep] | UnsetType = UNSET
    finish_reason: str | None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None


class ChatObject(Rendered, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    choices: list[ChatChoice]
    usage: UsageObject
    metadata: AnswerMetadata
    kv_transfer_params: KVTransferAnswer | UnsetType = UNSET
    sglext: SGLangFields | UnsetType = UNSET


class FunctionDelta(Rendered, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Rendered, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Rendered):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Rendered):
    """`text` is a completion's, `delta` a chat's. `stop_reason` and `matched_stop` are in a choice's last
    chunk."""

    index: int
    logprobs: CompletionLogprobs | ChatLogprobs | None = None
    finish_reason: str | None = None
    text: str | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    spec_trace: list[TraceStep] | UnsetType = UNSET
    stop_reason: int | str | UnsetType | None = UNSET
    matched_stop: int | str | UnsetType | None = UNSET


class Chunk(Rendered):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageObject | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metadata: AnswerMetadata | UnsetType = UNSET  # in a choice's last chunk
    sglext: SGLangFields | UnsetType = UNSET
