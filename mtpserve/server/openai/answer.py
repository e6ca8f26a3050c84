"""The answer to a generation request, whole or in chunks, in OpenAI's layout."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import time
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.sampling import SamplingParams
from mtpserve.core.sequence import Finish
from mtpserve.server.http.rendering import JSON
from mtpserve.server.http.sse import EventStream, unless_gone
from mtpserve.server.openai.body import GenerationRequest
from mtpserve.server.openai.choice import Choice, Shape, Wanted
from mtpserve.server.openai.logprobs import ById, Offsets
from mtpserve.server.openai.objects import ChatObject, Chunk, ChunkChoice, CompletionObject
from mtpserve.server.openai.usage import Usage
from mtpserve.server.service import Piece, Service, merge
from mtpserve.text.requests import Spelling, request_of


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    sampling: SamplingParams
    echo: str | None = None  # the text that goes in front of every choice


@dataclass(slots=True)
class Answer:
    """`prompts`, `n` times each, become the choices 0, 1, …: first all of the first prompt's."""

    service: Service
    shape: Shape
    prompts: list[Prompt]
    spelling: Spelling
    body: GenerationRequest
    arrival: float  # perf_counter's
    scores_only: bool = False  # max_tokens 0: the one token that the engine needs to score a prompt is thrown away
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.body.rid or self.body.request_id or f"{self.shape.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time())  # a date, not a duration

    def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        streams = []
        for number, prompt in enumerate(self.prompts):
            first = None
            for choice in range(self.body.choices):
                id = f"{self.id}-{number * self.body.choices + choice}"
                sampling = self.service.for_choice(prompt.sampling, choice)
                request = request_of(self.spelling, id, prompt.tokens, sampling, same_prompt_as=first)
                streams.append(self.service.generate(request, self.arrival, self.body.timeout, streaming=bool(self.body.stream)))
                first = first or id
        return merge(streams)

    def _choices(self) -> list[Choice]:
        tokenizer, body = self.service.tokenizer, self.body
        wanted = Wanted(body.top_logprobs_wanted, body.prompt_logprobs, bool(body.return_spec_trace), bool(body.return_token_ids))
        spelling = ById(tokenizer) if body.return_tokens_as_token_ids else tokenizer
        choices = []
        for prompt in self.prompts:
            for _ in range(body.choices):
                offsets = Offsets(tokenizer, prompt.echo or "", prompt.sampling.skip_special_tokens)
                stopped = partial(self._stopped, prompt.sampling)
                choices.append(Choice(self.shape, tokenizer, prompt.tokens, wanted, offsets, spelling, stopped, prompt.echo))
        return choices

    def _stopped(self, sampling: SamplingParams, tokens: Sequence[int]) -> dict[str, Any]:
        """What ended an output that stopped, in vLLM's word, for which the model's own end is nothing, and in SGLang's."""
        matched = self.service.matched(sampling, tokens)
        asked = isinstance(matched, str) or matched in sampling.stop_token_ids
        return {"stop_reason": matched if asked else None, "matched_stop": matched}

    def _usage(self) -> Usage:
        return Usage(sum(len(prompt.tokens) for prompt in self.prompts))

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.service.model}

    def _prompt_ids(self) -> dict[str, Any]:
        """Where they do not stand in the choices."""
        return {"prompt_token_ids": self.prompts[0].tokens} if self.body.return_token_ids and self.shape.one_prompt else {}

    def _shown(self, piece: Piece) -> Piece:
        if not self.scores_only:
            return piece
        return Piece("", [], piece.finish and Finish.LENGTH, prompt_logprobs=piece.prompt_logprobs)

    async def whole(self) -> CompletionObject | ChatObject:
        choices, usage = self._choices(), self._usage()
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                piece = self._shown(piece)
                usage.add(piece, choices[index].add(piece))
        listed = [self.shape.choice(index=index, **choice.whole()) for index, choice in enumerate(choices)]
        fields = self._head() | self._prompt_ids() | {"object": self.shape.object}
        answer: CompletionObject | ChatObject = self.shape.whole(choices=listed, usage=usage.object(), **fields)
        return answer

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Chunks for each step that completed some text; the last one of a choice has its finish_reason, the very last one the usage."""
        head, body = self._head() | {"object": self.shape.chunk_object}, self.body
        choices, usage = self._choices(), self._usage()

        def chunk(index: int, content: dict[str, Any]) -> Chunk:
            made = Chunk(**head, choices=[ChunkChoice(index, **content)])
            if body.include_usage or body.usage_in_every_chunk:
                made.usage = usage.object() if body.usage_in_every_chunk else None
            return made

        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                piece, choice = self._shown(piece), choices[index]
                usage.add(piece, choice.add(piece))
                contents = choice.deltas()
                if not choice.opened:
                    choice.opened = True
                    if (opening := self.shape.opening()) is not None:
                        begun = chunk(index, opening)
                        yield replace(begun, **self._prompt_ids()) if index == 0 else begun
                for content in contents:
                    yield chunk(index, content)
        if body.include_usage:
            yield Chunk(**head, choices=[], usage=usage.object())

    async def respond(self, request: Request) -> Response:
        if self.body.stream:
            return EventStream(self.chunks(), self.service.server_config.sse_keep_alive_interval)
        return JSON(await unless_gone(request.receive, self.whole()))
