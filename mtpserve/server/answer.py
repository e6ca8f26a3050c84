"""The answer to a generation request, whole or in chunks, in OpenAI's layout. What differs between the endpoints is the Shape."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, time
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.request import TokenLogprob
from mtpserve.core.sampling import SamplingParams
from mtpserve.server.errors import JSON
from mtpserve.server.logprobs import prompt_scores
from mtpserve.server.openai import GenerationRequest
from mtpserve.server.service import Piece, Service, merge
from mtpserve.server.sse import EventStream, unless_gone
from mtpserve.server.usage import Usage, trace_of
from mtpserve.text.requests import request_of
from mtpserve.text.tokenizer import Tokenizer

SEEDS = 1 << 63


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
    def logprobs(
        self, tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offset: int
    ) -> dict[str, Any]: ...


@dataclass(slots=True)
class Answer:
    """`prompts` and their sampling, `n` times each, become the choices 0, 1, …: first all of the first prompt's.

    With a seed, a prompt's choice j is sampled with seed + j. `echo` puts the prompt in front of every text.
    """

    service: Service
    shape: Shape
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    body: GenerationRequest
    echo: bool = False
    scores_only: bool = False  # max_tokens 0: the one token that the engine needs to score a prompt is thrown away
    arrival: float = field(default_factory=perf_counter)
    id: str = ""
    created: int = 0

    def __post_init__(self) -> None:
        self.id = f"{self.shape.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time())  # a date, not a duration

    def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        streams = []
        for number, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True)):
            first = None
            for choice in range(self.body.choices):
                id = f"{self.id}-{number * self.body.choices + choice}"
                seed = None if sampling.seed is None else (sampling.seed + choice + SEEDS) % (2 * SEEDS) - SEEDS
                request = request_of(self.service.tokenizer, id, prompt, replace(sampling, seed=seed), same_prompt_as=first)
                streams.append(self.service.generate(request, self.arrival))
                first = first or id
        return merge(streams)

    def _choices(self) -> list[Choice]:
        return [Choice(self, prompt) for prompt in self.prompts for _ in range(self.body.choices)]

    def _usage(self) -> Usage:
        return Usage(sum(map(len, self.prompts)))

    def _head(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.service.model}

    async def whole(self) -> dict[str, Any]:
        choices, usage = self._choices(), self._usage()
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                usage.add(self._shown(piece))
                choices[index].add(self._shown(piece))
        listed = [{"index": index, **choice.whole()} for index, choice in enumerate(choices)]
        return {**self._head(self.shape.object), "choices": listed, "usage": usage.body()}

    def _shown(self, piece: Piece) -> Piece:
        return replace(piece, text="", tokens=[], logprobs=None) if self.scores_only else piece

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """A chunk per step that completed some text; the last one of a choice has its finish_reason, the very last one the usage."""
        head, body = self._head(self.shape.chunk_object), self.body
        choices, usage = self._choices(), self._usage()

        def chunk(index: int, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
            tail = {"usage": usage.body() if body.usage_in_every_chunk else None} if body.stream_options is not None else {}
            tail = tail if body.include_usage or body.usage_in_every_chunk else {}
            return {**head, "choices": [{"index": index, "logprobs": None, **content, "finish_reason": finish}], **tail}

        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                piece, choice = self._shown(piece), choices[index]
                usage.add(piece)
                if not choice.opened:
                    choice.opened = True
                    if (opening := self.shape.opening()) is not None:
                        yield chunk(index, opening, None)
                choice.add(piece)
                content = choice.delta()
                if content is not None or piece.finish is not None:
                    yield chunk(index, content or self.shape.delta(""), piece.finish)
        if body.include_usage:
            yield {**head, "choices": [], "usage": usage.body()}

    async def respond(self, request: Request, body: GenerationRequest) -> Response:
        if body.stream:
            return EventStream(self.chunks())
        return JSON(await unless_gone(request.receive, self.whole()))


@dataclass(slots=True)
class Choice:
    """One choice while it grows. `delta` gives what came since the last one, `whole` all of it."""

    answer: Answer
    prompt: list[int]
    pieces: list[Piece] = field(default_factory=list)
    shown: int = 0  # pieces that earlier chunks held
    written: int = 0  # characters of the tokens whose log-probabilities were shown
    opened: bool = False
    echoed: bool = False

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)

    def delta(self) -> dict[str, Any] | None:
        """None while there is nothing to show: text inside a character, or held back for a stop string, takes its log-probabilities
        along when it comes."""
        new = self.pieces[self.shown :]
        last = new[-1].finish is not None
        scored = any(piece.logprobs for piece in new)
        told = self.answer.body.return_spec_trace and any(piece.tokens for piece in new)
        if not (last or scored or told or any(piece.text for piece in new) or self._echoes(new)):
            return None
        self.shown = len(self.pieces)
        return {**self.answer.shape.delta(self._text(new)), **self._extras(new)}

    def whole(self) -> dict[str, Any]:
        text = self._text(self.pieces)
        extras = self._extras(self.pieces)
        finish = self.pieces[-1].finish if self.pieces else None
        return {**self.answer.shape.choice(text), "logprobs": None, **extras, "finish_reason": finish}

    def _echoes(self, pieces: list[Piece]) -> bool:
        """The prompt goes with the first tokens: its scores are complete by then."""
        return self.answer.echo and not self.echoed and any(piece.tokens or piece.finish is not None for piece in pieces)

    def _text(self, pieces: list[Piece]) -> str:
        text = "".join(piece.text for piece in pieces)
        return self.answer.service.tokenizer.decode(self.prompt) + text if self._echoes(pieces) else text

    def _extras(self, pieces: list[Piece]) -> dict[str, Any]:
        tokenizer, sampling = self.answer.service.tokenizer, self.answer.sampling[0]
        echoes = self._echoes(pieces)
        found: dict[str, Any] = {}
        prompt_scored = [score for piece in self.pieces for score in piece.prompt_logprobs or []]
        if sampling.logprobs is not None:
            tokens = [token for piece in pieces for token in piece.tokens]
            scores: list[TokenLogprob | None] = [score for piece in pieces for score in piece.logprobs or []]
            if echoes:
                tokens, scores = [*self.prompt, *tokens], [None, *prompt_scored, *scores]
            if tokens:
                found["logprobs"] = self.answer.shape.logprobs(tokenizer, tokens, scores, self.written)
                self.written += sum(len(tokenizer.token_text(token)) for token in tokens)
        if self.answer.body.prompt_logprobs is not None and any(piece.prompt_logprobs or piece.finish for piece in pieces):
            finished = len(prompt_scored) == len(self.prompt) - 1
            if finished and not self.echoed:
                found["prompt_logprobs"] = prompt_scores(tokenizer, self.prompt, prompt_scored)
        if self.answer.body.return_spec_trace:
            found["spec_trace"] = [trace_of(piece) for piece in pieces if piece.tokens]
        self.echoed = self.echoed or echoes or "prompt_logprobs" in found
        return found
