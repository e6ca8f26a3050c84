"""One answer to a conversation while it grows, for the routes that speak of chats in other words than OpenAI's chat completions."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mtpserve.core.request import Request
from mtpserve.core.sequence import Finish
from mtpserve.server.dialogue import prepared
from mtpserve.server.fields import refuse_constant
from mtpserve.server.openai.body import ChatRequest
from mtpserve.server.output import Output
from mtpserve.server.service import Service
from mtpserve.text.parsers.events import Arguments, CallBegin, Content, Event, Reasoning
from mtpserve.text.requests import request_of


@dataclass(slots=True)
class Block:
    """A part of an answer. The text of a call is its arguments; `call_id` and `name` are a call's alone."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call_id: str = ""
    name: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def arguments(self) -> dict[str, Any] | None:
        """None where the model did not come to their end, or wrote no JSON."""
        try:
            found = json.loads(self.text, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


@dataclass(slots=True)
class Turn:
    """The answer: blocks, in the order in which the model wrote them."""

    service: Service
    request: Request
    output: Output
    arrival: float  # perf_counter's
    timeout: float | None
    streaming: bool
    blocks: list[Block] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish: Finish | None = None
    at_most: int | None = None  # tokens that were asked for

    async def steps(self) -> AsyncGenerator[list[tuple[int, str]], None]:
        """What each step adds: the block's index, which may be that of a new one, and text. There is a block in the end."""
        generated = self.service.generate(self.request, self.arrival, self.timeout, streaming=self.streaming)
        async with contextlib.aclosing(generated) as pieces:
            async for piece in pieces:
                self.tokens += piece.tokens
                self.reasoning_tokens += self.output.count(piece.tokens)
                self.finish = piece.finish
                added = [self._add(event) for event in self.output.read(piece.text, piece.finish is not None)]
                if piece.finish is not None and not self.blocks:
                    added = [self._add(Content(""))]
                yield added

    def _add(self, event: Event) -> tuple[int, str]:
        text = ""
        match event:
            case Content(text):
                self._go_on("text")
            case Reasoning(text):
                self._go_on("reasoning")
            case CallBegin(_, id, name):
                self.blocks.append(Block("call", call_id=id, name=name))
            case Arguments(_, text):
                pass  # those of the call that began last
        self.blocks[-1].text += text
        return len(self.blocks) - 1, text

    def _go_on(self, kind: Literal["reasoning", "text"]) -> None:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))

    async def whole(self) -> None:
        async for _ in self.steps():
            pass

    def text(self, kind: Literal["reasoning", "text"]) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def called(self) -> bool:
        """Whether the answer ended in order to hear what tools say."""
        return self.output.called and self.finish is Finish.STOP

    @property
    def cut_short(self) -> bool:
        """Whether the context came to its end before as many tokens as were allowed."""
        return self.finish is Finish.LENGTH and self.at_most is not None and len(self.tokens) < self.at_most

    @property
    def stop_string(self) -> str | None:
        """The one that ended the answer."""
        found = self.service.matched(self.request.sampling, self.tokens) if self.finish is Finish.STOP else None
        return found if isinstance(found, str) else None


async def turn_of(service: Service, chat: ChatRequest, id: str, arrival: float, at_most: int | None = None) -> Turn:
    """Validates and encodes; `id` is what /abort_request takes. `at_most` is a limit of the output that the context may undercut."""
    asked = await prepared(service, chat)
    sampling, room = asked.sampling, service.client.card.context_length - len(asked.prompt)
    if at_most is not None:
        sampling = replace(sampling, max_tokens=min(at_most, room))
    request = request_of(asked.spelling, f"{id}-0", asked.prompt, sampling)
    output = Output(asked.plan, service.tokenizer, chat.shows_reasoning)
    return Turn(service, request, output, arrival, chat.timeout, bool(chat.stream), at_most=at_most)
