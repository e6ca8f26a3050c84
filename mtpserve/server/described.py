"""What the routes answer, for the OpenAPI document alone: the answers themselves are made where their values are known.

A field with a default is not in every answer. The events of streams are not described.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Triple = tuple[float | None, int, str | None]  # a log-probability, a token, its text


class Described(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


# -- OpenAI's generating routes ---------------------------------------------------------------------------------------------------


class TokenDetails(Described):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class SpeculativeUsage(Described):
    steps: int
    draft_tokens: int
    accepted_tokens: int


class UsageObject(Described):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: TokenDetails
    speculative: SpeculativeUsage


class PromptLogprob(Described):
    logprob: float
    rank: int
    decoded_token: str


class Proposed(Described):
    token: int
    text: str
    parent: int
    source: str
    accepted: bool


class TraceStep(Described):
    tokens: list[int]
    texts: list[str]
    proposed: list[Proposed]


class AnyChoice(Described):
    """`stop_reason` (vLLM's word) and `matched_stop` (SGLang's) are of choices that stopped; token ids come where they are asked for."""

    index: int
    finish_reason: str
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []
    spec_trace: list[TraceStep] = []


class CompletionLogprobs(Described):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(AnyChoice):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(Described):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject


class TokenScore(Described):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenScore):
    top_logprobs: list[TokenScore]


class ChatLogprobs(Described):
    content: list[ScoredToken]
    refusal: None


class CalledWith(Described):
    name: str
    arguments: str


class ToolCallObject(Described):
    id: str
    type: Literal["function"]
    function: CalledWith


class AnswerMessage(Described):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallObject] = []


class ChatChoice(AnyChoice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Described):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject


class InputDetails(Described):
    cached_tokens: int


class OutputDetails(Described):
    reasoning_tokens: int


class ResponseUsage(Described):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OutputItem(Described):
    """`role` is of messages, `summary` of reasoning, `content` of both; `call_id`, `name` and `arguments` are of calls."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    summary: list[str] = []
    content: list[dict[str, Any]] = []
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ResponseError(Described):
    code: str
    message: str


class ResponseObject(Described):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(Described):
    id: str
    object: Literal["response"]
    deleted: bool


# -- Anthropic's ------------------------------------------------------------------------------------------------------------------


class MessageBlock(Described):
    """`text` is of texts, `thinking` and `signature` of reasoning, the others are of calls."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}


class MessageUsage(Described):
    input_tokens: int
    output_tokens: int


class MessageObject(Described):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(Described):
    input_tokens: int


# -- SGLang's, and tokens ---------------------------------------------------------------------------------------------------------


class FinishReason(Described):
    """`length` is of the type length, `matched` of the type stop."""

    type: str
    length: int = 0
    matched: int | str | None = None


class MetaInfo(Described):
    """Behind `spec_…` is what speculation did, where anything was drafted; the others come with `return_logprob`."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    spec_verify_ct: int = 0
    spec_accept_length: float = 0
    spec_accept_rate: float = 0
    spec_num_correct_drafts: int = 0
    spec_num_proposed_drafts: int = 0
    spec_correct_drafts_histogram: list[int] = []
    input_token_logprobs: list[Triple] = []
    output_token_logprobs: list[Triple] = []
    input_top_logprobs: list[list[Triple] | None] = []
    output_top_logprobs: list[list[Triple] | None] = []


class Generated(Described):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class Tokenized(Described):
    """Lists of each for a list of texts."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] = []


class Detokenized(Described):
    prompt: str | list[str]
    text: str | list[str]


class ParsedCall(Described):
    tool_index: int
    name: str
    parameters: str


class ParsedCalls(Described):
    normal_text: str
    calls: list[ParsedCall]


class SeparatedReasoning(Described):
    reasoning_text: str
    text: str


class Aborted(Described):
    aborted: int


class Flushed(Described):
    success: bool
    message: str
