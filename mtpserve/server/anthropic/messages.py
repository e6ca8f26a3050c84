"""POST /v1/messages: Anthropic's API, with tools and thinking."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sequence import Finish
from mtpserve.server.anthropic.body import CountRequest, MessagesRequest
from mtpserve.server.dialogue import asked_tools, rendered
from mtpserve.server.http.errors import JSON, renamed
from mtpserve.server.http.sse import NamedEventStream, unless_gone
from mtpserve.server.service import Service
from mtpserve.server.turn import Block, Turn, turn_of

RENAMED = {
    "stop": "stop_sequences", ".function.parameters": ".input_schema", ".function": "", "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}  # fmt: skip
STOP_REASONS = {Finish.LENGTH: "max_tokens", Finish.ABORT: "end_turn"}
DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json")}


def shown(block: Block) -> dict[str, Any]:
    """The input of a call that was cut off is empty: `stop_reason` then says why it must not be run."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments() or {}}


def stop_reason(turn: Turn) -> str | None:
    if turn.finish is None:
        return None
    if turn.called:
        return "tool_use"
    if turn.cut_short:
        return "model_context_window_exceeded"
    return "stop_sequence" if turn.stop_string is not None else STOP_REASONS.get(turn.finish, "end_turn")


def message_object(id: str, turn: Turn) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": turn.service.model,
        "content": [shown(block) for block in turn.blocks],
        "stop_reason": stop_reason(turn),
        "stop_sequence": turn.stop_string,
        "usage": {"input_tokens": len(turn.request.prompt), "output_tokens": len(turn.tokens)},
    }


async def events(id: str, turn: Turn) -> AsyncGenerator[dict[str, Any], None]:
    """Anthropic's: the message opens, its blocks open and close one after the other, and it closes with what ended it."""
    begun, opened = False, 0
    async with contextlib.aclosing(turn.steps()) as steps:
        async for added in steps:
            if not begun:
                begun = True
                start = message_object(id, turn) | {"content": [], "stop_reason": None, "stop_sequence": None}
                yield {"type": "message_start", "message": start | {"usage": start["usage"] | {"output_tokens": 0}}}
            for index, text in added:
                block = turn.blocks[index]
                if index == opened:
                    if opened:
                        yield {"type": "content_block_stop", "index": opened - 1}
                    opened += 1
                    empty = Block(block.kind, call_id=block.call_id, name=block.name)
                    yield {"type": "content_block_start", "index": index, "content_block": shown(empty)}
                if text:
                    kind, field = DELTAS[block.kind]
                    yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}
    yield {"type": "content_block_stop", "index": opened - 1}
    done = message_object(id, turn)
    yield {"type": "message_delta", "delta": {name: done[name] for name in ("stop_reason", "stop_sequence")}, "usage": done["usage"]}
    yield {"type": "message_stop"}


async def messages(request: Request, body: MessagesRequest) -> Response:
    """Continue a conversation, as Anthropic's messages."""
    arrival = perf_counter()
    service: Service = request.app.state.service
    id = body.rid or f"msg_{uuid.uuid4().hex}"
    offer = body.offer()
    with renamed(RENAMED | offer.places):
        turn = await turn_of(service, body.chat(offer), id, arrival, at_most=body.max_tokens)
    if body.stream:
        return NamedEventStream(events(id, turn), service.server_config.sse_keep_alive_interval)
    await unless_gone(request.receive, turn.whole())
    return JSON(message_object(id, turn))


async def count_tokens(request: Request, body: CountRequest) -> Response:
    """The tokens that such a conversation has as a prompt."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if not body.messages:
        raise InvalidRequest("messages is empty", "messages")
    offer = body.offer()
    with renamed(RENAMED | offer.places):
        chat = body.chat(offer)
        tokens = await service.encode_chat(await rendered(service, chat, asked_tools(service, chat)))
    return JSON({"input_tokens": len(tokens)})
