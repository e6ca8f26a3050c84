"""POST /v1/messages: Anthropic's API, with tools and thinking."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

from msgspec import UNSET, UnsetType, structs
from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.request import Finish
from mtpserve.server.anthropic.messages_body import CountRequest, MessagesRequest
from mtpserve.server.chat.dialogue import render_prompt, tool_use_of
from mtpserve.server.chat.generation import Block, Choice, Generation, create_generation
from mtpserve.server.chat.service import Served
from mtpserve.server.chat.steps.step_output import StepOutput
from mtpserve.server.http.errors import renamed
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.http.sse import NamedEventStream, unless_gone

RENAMED = {
    "stop": "stop_sequences", ".function.parameters": ".input_schema", ".function": "",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}  # fmt: skip
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(Rendered, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Rendered, tag_field="type", tag="thinking"):
    """The signature means nothing here, but clients drop a block that ends without one."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Rendered, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Rendered):
    """A prompt has as many tokens as the first three together. Nothing is written to the cache on request: it
    keeps every prompt, with `cache_control` or without."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageObject(Rendered):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnyBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(Rendered):
    input_tokens: int


class MessageDelta(Rendered):
    """What a block's text adds, by its type; or, without one, how the message ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Rendered):
    type: str
    message: MessageObject | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnyBlock | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


def content_block(block: Block) -> AnyBlock:
    match block.kind:
        case "text":
            return TextBlock(block.text)
        case "reasoning":
            return ThinkingBlock(block.text, block.id)
        case "call":
            return ToolUseBlock(block.call_id, block.name, block.arguments())


def opening_block(block: Block) -> AnyBlock:
    """The block as its `content_block_start` has it: the deltas bring all but a call's names."""
    if block.kind == "reasoning":
        return ThinkingBlock("")
    return content_block(replace(block, text=""))


def delta(block: Block, text: str) -> MessageDelta:
    match block.kind:
        case "text":
            return MessageDelta("text_delta", text=text)
        case "reasoning":
            return MessageDelta("thinking_delta", thinking=text)
        case "call":
            return MessageDelta("input_json_delta", partial_json=text)


@dataclass(slots=True)
class MessageAnswer:
    id: str
    generation: Generation
    at_most: int  # tokens that were asked for
    eager: frozenset[str] = frozenset()  # tools whose input is streamed as the model writes it
    opened: int = 0  # blocks, in events

    @property
    def choice(self) -> Choice:
        return self.generation.choices[0]

    def object(self) -> MessageObject:
        choice = self.choice
        cached = choice.cached_tokens
        usage = MessageUsage(len(choice.request.prompt) - cached, cached, 0, len(choice.tokens))
        blocks, matched = [content_block(block) for block in choice.blocks], choice.matched_stop
        stop = matched if isinstance(matched, str) else None
        return MessageObject(
            self.id, "message", "assistant", choice.model, blocks, self.stop_reason(stop), stop, usage
        )

    def stop_reason(self, stop: str | None) -> StopReason | None:
        """`stop` is the stop string that ended the answer."""
        choice = self.choice
        match choice.finish:
            case None:
                return None
            case Finish.LENGTH:
                return "max_tokens" if len(choice.tokens) >= self.at_most else "model_context_window_exceeded"
        return "tool_use" if choice.ends_with_calls else "end_turn" if stop is None else "stop_sequence"

    async def events(self) -> AsyncGenerator[list[MessageEvent], None]:
        """Anthropic's: the message opens, its blocks open and close one after the other, and it closes with
        what ended it."""
        start: MessageObject | None = self.object()
        async with contextlib.aclosing(self.generation.stream()) as batches:
            async for steps in batches:
                deltas = [event for step in steps for event in self._step_events(step)]
                opening = [] if start is None else [MessageEvent("message_start", message=self._first(start))]
                if events := [*opening, *deltas]:
                    yield events
                start = None
        done = self.object()
        end = MessageDelta(stop_reason=done.stop_reason, stop_sequence=done.stop_sequence)
        yield [
            *self._closing_events(),
            MessageEvent("message_delta", delta=end, usage=done.usage),
            MessageEvent("message_stop"),
        ]

    def _first(self, start: MessageObject) -> MessageObject:
        """Returns `start` with the usage that the first token brings: how much of the prompt was cached."""
        return structs.replace(start, usage=structs.replace(self.object().usage, output_tokens=0))

    def _step_events(self, step: StepOutput) -> Iterator[MessageEvent]:
        self.generation.add(step)
        for index, block in self.choice.unfinished_blocks(self.opened):
            if index == self.opened:
                yield from self._closing_events()
                self.opened += 1
                yield MessageEvent("content_block_start", index=index, content_block=opening_block(block))
            if block.kind == "call" and block.name not in self.eager:
                # It says that the call goes on: clients give up on streams that are silent for long.
                yield MessageEvent("content_block_delta", index=index, delta=delta(block, ""))
            elif text := block.take():
                yield MessageEvent("content_block_delta", index=index, delta=delta(block, text))

    def _closing_events(self) -> Iterator[MessageEvent]:
        """What ends the block that is open, if one is. A call's input comes here, in one piece, as in
        Anthropic's API: clients mend JSON that is none, and run what they make of it."""
        if not self.opened:
            return
        index = self.opened - 1
        block = self.choice.blocks[index]
        if block.kind == "reasoning":
            signature = MessageDelta("signature_delta", signature=block.id)
            yield MessageEvent("content_block_delta", index=index, delta=signature)
        if block.kind == "call" and block.name not in self.eager and block.take():
            text = json.dumps(block.arguments(), ensure_ascii=False)
            yield MessageEvent("content_block_delta", index=index, delta=delta(block, text))
        yield MessageEvent("content_block_stop", index=index)


async def messages(request: Request, service: Served, body: MessagesRequest) -> Response:
    """Answer a conversation, by Anthropic's Messages API."""
    arrival = perf_counter()
    id = body.rid or f"msg_{uuid.uuid4().hex}"
    offer = body.offer()
    with renamed(RENAMED | offer.places):
        answer = MessageAnswer(
            id,
            await create_generation(service, body.chat(offer), id, arrival, at_most=body.max_tokens),
            body.max_tokens,
            frozenset(tool.name for tool in body.tools or [] if tool.name and tool.eager_input_streaming),
        )
    headers = answer.generation.headers
    if body.stream:
        return NamedEventStream(answer.events(), service.server_config.sse_keep_alive_interval, headers)
    await unless_gone(request.receive, answer.generation.run())
    return JSON(answer.object(), headers=headers)


async def count_tokens(service: Served, body: CountRequest) -> Response:
    """Count the prompt tokens of a Messages request, without running it."""
    service.check_model(body.model)
    if not body.messages:
        raise InvalidRequest("messages is empty", "messages")
    offer = body.offer()
    with renamed(RENAMED | offer.places):
        chat = body.chat(offer)
        tokens = await service.encode_chat(
            await render_prompt(service, chat, tool_use_of(service, chat, prompt_only=True))
        )
    return JSON(CountedTokens(len(tokens)))
