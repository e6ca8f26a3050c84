"""POST /v1/chat/completions: the messages, rendered by the model's own template, continued; tools and reasoning in OpenAI's layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.request import TokenLogprob
from mtpserve.core.sequence import Finish
from mtpserve.server.dialogue import prepared
from mtpserve.server.http.errors import renamed
from mtpserve.server.openai.answer import Answer, Prompt
from mtpserve.server.openai.body import ChatRequest
from mtpserve.server.openai.logprobs import TokenNames, chat_logprobs
from mtpserve.server.openai.objects import (
    AnswerMessage,
    ChatChoice,
    ChatLogprobs,
    ChatObject,
    Delta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from mtpserve.server.output import Output
from mtpserve.server.service import Service
from mtpserve.server.tools import OutputPlan
from mtpserve.text.parsers.events import Arguments, CallBegin, Content, Event, Reasoning
from mtpserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatShape:
    plan: OutputPlan
    include_reasoning: bool
    tokenizer: Tokenizer

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    choice = ChatChoice
    whole = ChatObject
    one_prompt = True

    def voice(self) -> ChatVoice:
        return ChatVoice(Output(self.plan, self.tokenizer, self.include_reasoning))

    def opening(self) -> dict[str, Any] | None:
        return {"delta": Delta("assistant", "")}

    def logprobs(
        self, tokenizer: TokenNames, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offsets: list[int], top: int
    ) -> ChatLogprobs:
        return chat_logprobs(tokenizer, tokens, [score for score in scores if score is not None], top)


@dataclass(slots=True)
class ChatVoice:
    output: Output

    def count(self, tokens: Sequence[int]) -> int:
        return self.output.count(tokens)

    def deltas(self, text: str, last: bool) -> list[dict[str, Any]]:
        return [{"delta": delta(event)} for event in self.output.read(text, last)]

    def silent(self) -> dict[str, Any]:
        return {"delta": Delta()}

    def whole(self, text: str) -> dict[str, Any]:
        content, reasoning = "", ""
        calls: list[ToolCall] = []
        for event in self.output.read(text, last=True):
            match event:
                case Content(piece):
                    content += piece
                case Reasoning(piece):
                    reasoning += piece
                case CallBegin(_, id, name):
                    calls.append(ToolCall(id, "function", FunctionCall(name, "")))
                case Arguments(index, piece):
                    calls[index].function.arguments += piece
        message = AnswerMessage("assistant", content or (None if calls or reasoning else ""))
        if self.output.plan.thinking is not None and self.output.include_reasoning:
            message.reasoning_content = message.reasoning = reasoning or None
        if calls:
            message.tool_calls = calls
        return {"message": message}

    def finish(self, finish: Finish | None) -> str | None:
        return "tool_calls" if self.output.called and finish is Finish.STOP else finish


def delta(event: Event) -> Delta:
    """An event as OpenAI's delta. Reasoning is spelled as DeepSeek, SGLang and older vLLMs do, and as newer vLLMs do."""
    match event:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text, reasoning=text)
        case CallBegin(index, id, name):
            return Delta(tool_calls=[ToolCallDelta(index=index, id=id, type="function", function=FunctionDelta(name=name, arguments=""))])
        case Arguments(index, text):
            return Delta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])
    return Delta()


async def chat(request: Request, body: ChatRequest) -> Response:
    """Continue a conversation, as OpenAI's chat completions."""
    arrival = perf_counter()
    service: Service = request.app.state.service
    with renamed({} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}):
        asked = await prepared(service, body)
    shape = ChatShape(asked.plan, body.shows_reasoning, service.tokenizer)
    return await Answer(service, shape, [Prompt(asked.prompt, asked.sampling)], asked.spelling, body, arrival).respond(request)
