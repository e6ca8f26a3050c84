"""POST /v1/chat/completions: the messages, rendered by the model's own template, continued; tools and
reasoning in OpenAI's layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.request import TokenLogprob
from mtpserve.core.sampling import SamplingParams
from mtpserve.server.chat.bodies import ChatRequest
from mtpserve.server.chat.generation import create_generation
from mtpserve.server.chat.service import Served
from mtpserve.server.http.errors import renamed
from mtpserve.server.openai import objects
from mtpserve.server.openai.answer import Answer, ChoiceWriter, Fields, id_of
from mtpserve.server.openai.logprobs import chat_logprobs


@dataclass(slots=True)
class ChatWriter(ChoiceWriter):
    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    one_prompt = True
    opening: ClassVar[Fields | None] = {"delta": objects.Delta("assistant", "")}
    empty_delta: ClassVar[Fields] = {"delta": objects.Delta()}
    choice_type = objects.ChatChoice
    answer_type = objects.ChatObject

    def output(self) -> Fields:
        choice = self.choice
        content, reasoning = choice.text(), choice.text("reasoning")
        calls = [
            objects.ToolCall(call.call_id, "function", objects.FunctionCall(call.name, call.text))
            for call in choice.calls
        ]
        message = objects.AnswerMessage("assistant", content or (None if calls or reasoning else ""))
        if choice.reader is not None and choice.reader.returns_reasoning:
            message.reasoning_content = message.reasoning = reasoning or None
        if calls:
            message.tool_calls = calls
        return {"message": message}

    def deltas(self, echo: str) -> Iterator[Fields]:
        for index, block in self.choice.unfinished_blocks(self.opened):
            begins, self.opened, text = index >= self.opened, index + 1, block.take()
            match block.kind:
                case "text" if text:
                    yield {"delta": objects.Delta(content=text)}
                case "reasoning" if text:
                    field = self.choice.service.server_config.reasoning_field
                    yield {"delta": reasoning_delta(text, field)}
                case "call":
                    number = sum(before.kind == "call" for before in self.choice.blocks[:index])
                    if begins:
                        yield {
                            "delta": call_delta(number, name=block.name, id=block.call_id, type="function")
                        }
                    if text:
                        yield {"delta": call_delta(number, text)}

    def logprobs(
        self, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offsets: list[int], top: int
    ) -> objects.ChatLogprobs:
        return chat_logprobs(self.names, tokens, [score for score in scores if score is not None], top)


def reasoning_delta(text: str, field: str) -> objects.Delta:
    """`field`: the value of --reasoning-field."""
    return objects.Delta(
        reasoning_content=UNSET if field == "reasoning" else text,
        reasoning=UNSET if field == "reasoning_content" else text,
    )


def call_delta(number: int, arguments: str = "", name: str | UnsetType = UNSET, **head: Any) -> objects.Delta:
    function = objects.FunctionDelta(name=name, arguments=arguments)
    return objects.Delta(tool_calls=[objects.ToolCallDelta(index=number, function=function, **head)])


async def chat(request: Request, service: Served, body: ChatRequest) -> Response:
    """Answer a conversation, by OpenAI's chat completions API."""
    arrival = perf_counter()
    id = id_of(body, ChatWriter)
    # then `max_tokens` does not count, and must be one all the same
    if body.max_completion_tokens is not None:
        clamps = service.clamps(body.truncate_prompt_tokens)
        service.check_sampling(SamplingParams(max_tokens=body.max_tokens), clamps)
    with renamed({} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}):
        generation = await create_generation(service, body, id, arrival)
    return await Answer(id, body, generation, ChatWriter).respond(request)
