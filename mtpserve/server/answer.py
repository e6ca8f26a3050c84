"""The answer to a generation request, whole or in chunks, in OpenAI's layout. What differs between the endpoints is the Shape."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.sampling import SamplingParams
from mtpserve.core.sequence import Finish
from mtpserve.server.errors import JSON
from mtpserve.server.openai import GenerationRequest
from mtpserve.server.service import Piece, Service, merge
from mtpserve.server.sse import EventStream, unless_gone


class Shape(Protocol):
    """How one endpoint spells a choice."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, text: str) -> dict[str, Any]: ...
    def opening(self) -> dict[str, Any] | None:
        """What a choice's first chunk holds before any text."""
        ...

    def delta(self, text: str) -> dict[str, Any]: ...


@dataclass(slots=True)
class Answer:
    """`prompts` and their sampling become the choices 0, 1, …"""

    service: Service
    shape: Shape
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    include_usage: bool
    arrival: float = field(default_factory=perf_counter)
    id: str = ""
    created: int = 0

    def __post_init__(self) -> None:
        self.id = f"{self.shape.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time())  # a date, not a duration

    def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        return merge(
            [
                self.service.generate(f"{self.id}-{index}", prompt, sampling, self.arrival)
                for index, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True))
            ]
        )

    def _head(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.service.model}

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    async def whole(self) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in self.prompts]
        finishes: list[Finish | None] = [None] * len(self.prompts)
        tokens = 0
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                texts[index].append(piece.text)
                finishes[index] = piece.finish
                tokens += piece.tokens
        choices = [
            {"index": index, **self.shape.choice("".join(text)), "logprobs": None, "finish_reason": finish}
            for index, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        return {**self._head(self.shape.object), "choices": choices, "usage": self._usage(tokens)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """A chunk per step that completed some text; the last one of a choice has its finish_reason, the very last one the usage."""
        head = self._head(self.shape.chunk_object)
        tail: dict[str, Any] = {"usage": None} if self.include_usage else {}
        opened: set[int] = set()
        tokens = 0

        def chunk(index: int, content: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
            return {**head, "choices": [{"index": index, **content, "logprobs": None, "finish_reason": finish}], **tail}

        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                tokens += piece.tokens
                if index not in opened:
                    opened.add(index)
                    if (opening := self.shape.opening()) is not None:
                        yield chunk(index, opening, None)
                if piece.text or piece.finish is not None:
                    yield chunk(index, self.shape.delta(piece.text), piece.finish)
        if self.include_usage:
            yield {**head, "choices": [], "usage": self._usage(tokens)}

    async def respond(self, request: Request, body: GenerationRequest) -> Response:
        if body.stream:
            return EventStream(self.chunks())
        return JSON(await unless_gone(request.receive, self.whole()))
