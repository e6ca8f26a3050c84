"""The answers of completions and chat completions, whole or in chunks. What differs between the two is in
their own modules."""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType, structs
from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.errors import RequestFailed
from mtpserve.core.request import TokenLogprob
from mtpserve.server.chat.bodies import GenerationRequest
from mtpserve.server.chat.generation import Choice, Generation
from mtpserve.server.chat.steps.step_output import StepOutput
from mtpserve.server.http.rendering import JSON
from mtpserve.server.http.sse import EventStream, unless_gone
from mtpserve.server.openai.logprobs import ById, Offsets, TokenNames, prompt_scores
from mtpserve.server.openai.objects import (
    AnswerMetadata,
    ChatChoice,
    ChatLogprobs,
    ChatObject,
    Chunk,
    ChunkChoice,
    CompletionChoice,
    CompletionLogprobs,
    CompletionObject,
    SGLangFields,
)
from mtpserve.server.openai.usage import Trace, Usage, UsageObject
from mtpserve.server.schema.kv_transfer import kv_transfer_fields

Fields = dict[str, Any]  # the fields of a choice's Struct


@dataclass(slots=True)
class ChoiceWriter(ABC):
    """One choice in OpenAI's layout. `chunks` gives what came since the last ones, `object` all of it; one of
    the two is used.

    `echo` is the prompt's text where it goes in front of the output, with the prompt's scores if
    log-probabilities are wanted.
    """

    index: int
    choice: Choice
    body: GenerationRequest
    echo: str | None = None
    opened: int = 0  # blocks, in chunks
    started: bool = False  # in chunks: the choice's first one is written
    # of the whole answer, which no choice has
    prompt_fields: Fields = field(default_factory=dict)
    names: TokenNames = field(init=False)
    _offsets: Offsets = field(init=False)
    _trace: Trace = field(init=False)
    _text_alone: bool = field(init=False)  # no chunk has anything beside its text
    _steps: list[StepOutput] = field(default_factory=list)  # not shown yet
    _scored: list[TokenLogprob] = field(default_factory=list)  # the prompt's tokens from the second on
    _prompt_written: bool = False

    prefix: ClassVar[str]  # the prefix of the answer's id
    chunk_object: ClassVar[str]
    # whose token ids and scores, where the request wants them, are beside the choices, not in them
    one_prompt: ClassVar[bool]
    opening: ClassVar[Fields | None] = None  # what a choice's first chunk has before any text
    empty_delta: ClassVar[Fields]  # what a chunk without text has
    choice_type: ClassVar[type[CompletionChoice] | type[ChatChoice]]
    answer_type: ClassVar[type[CompletionObject] | type[ChatObject]]

    def __post_init__(self) -> None:
        tokenizer = self.choice.service.tokenizer
        override, general = (
            self.body.return_tokens_as_token_ids,
            self.choice.service.server_config.return_tokens_as_token_ids,
        )
        self.names = ById(tokenizer) if (general if override is None else override) else tokenizer
        self._offsets = Offsets(tokenizer, self.echo or "", self.choice.request.sampling.skip_special_tokens)
        self._trace = Trace(tokenizer)
        body, scored = (
            self.body,
            self.body.top_logprobs_wanted is not None or self.body.prompt_logprobs is not None,
        )
        self._text_alone = not (
            scored or body.return_token_ids or body.return_spec_trace or self.echo is not None
        )

    @abstractmethod
    def output(self) -> Fields:
        """Returns the whole output."""

    @abstractmethod
    def deltas(self, echo: str) -> Iterable[Fields]:
        """Takes what the blocks have gained; each item becomes a chunk. `echo` goes in front."""

    @abstractmethod
    def logprobs(
        self, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offsets: list[int], top: int
    ) -> CompletionLogprobs | ChatLogprobs: ...

    def add(self, step: StepOutput) -> None:
        if not self._text_alone:
            self._steps.append(step)
            self._scored += step.prompt_logprobs or []

    def chunks(self) -> list[ChunkChoice]:
        """The last one has the finish_reason. Empty while there is nothing to show: scores of the prompt
        alone, tokens that end inside a character, or text that may become something else than text."""
        finish = self.choice.finish
        if finish is None and not (self._text_alone or self._has_content()):
            return []
        echo = self.echo if self.echo and self._writes_prompt() else ""
        deltas, fields = list(self.deltas(echo)), self._take_fields()
        if not deltas and (finish or fields):
            deltas = [{**self.empty_delta}]
        if deltas:
            deltas[0] |= fields
            if finish is not None:
                deltas[-1] |= {"finish_reason": self._finish_reason()} | self._stop_fields()
        return [ChunkChoice(self.index, **delta) for delta in deltas]

    def _has_content(self) -> bool:
        """True if a chunk has more to show than text that the parser has let through."""
        body, steps = self.body, self._steps
        has_output = any(step.text or step.logprobs for step in steps)
        has_trace = (body.return_spec_trace or body.return_token_ids) and any(step.tokens for step in steps)
        return (
            has_output
            or has_trace
            or (self._writes_prompt() and (self.echo is not None or body.prompt_logprobs is not None))
        )

    def object(self) -> CompletionChoice | ChatChoice:
        fields = self._take_fields()
        if self.one_prompt and "prompt_logprobs" in fields:
            self.prompt_fields["prompt_logprobs"] = fields.pop("prompt_logprobs")
        fields = self.output() | fields | self._stop_fields()
        return self.choice_type(index=self.index, finish_reason=self._finish_reason(), **fields)

    def _finish_reason(self) -> str | None:
        return "tool_calls" if self.choice.ends_with_calls else self.choice.finish

    def _stop_fields(self) -> Fields:
        """What ended an output that stopped, in vLLM's word, for which the model's own end is nothing, and in
        SGLang's."""
        stop = self.choice.matched_stop
        by_client = isinstance(stop, str) or stop in self.choice.request.sampling.stop_token_ids
        return {"stop_reason": stop if by_client else None, "matched_stop": stop}

    def _writes_prompt(self) -> bool:
        """The prompt's part goes with the first tokens: its scores are complete by then."""
        is_ready = any(step.tokens or step.finish is not None for step in self._steps)
        return is_ready and not self._prompt_written

    def _take_fields(self) -> Fields:
        """What the steps since the last call have beside their text."""
        fields: Fields = {}
        if self._text_alone:
            return fields
        writes_prompt, body, prompt = self._writes_prompt(), self.body, self.choice.request.prompt
        steps, self._steps = self._steps, []
        self._prompt_written = self._prompt_written or writes_prompt
        if (top := body.top_logprobs_wanted) is not None:
            tokens = [token for step in steps for token in step.tokens]
            scores: list[TokenLogprob | None] = [score for step in steps for score in step.logprobs or []]
            if writes_prompt and self.echo is not None:
                tokens, scores = [*prompt, *tokens], [None, *self._prompt_scored(), *scores]
            if tokens:
                fields["logprobs"] = self.logprobs(tokens, scores, self._offsets.take(tokens), top)
        if body.prompt_logprobs is not None and writes_prompt:
            tokenizer = self.choice.service.tokenizer
            fields["prompt_logprobs"] = prompt_scores(
                tokenizer, prompt, self._prompt_scored(), body.prompt_logprobs
            )
        if body.return_token_ids:
            fields["token_ids"] = [token for step in steps for token in step.tokens]
            if writes_prompt and not self.one_prompt:
                fields["prompt_token_ids"] = prompt
        if body.return_spec_trace:
            fields["spec_trace"] = [self._trace.step(step) for step in steps if step.tokens]
        return fields

    def _prompt_scored(self) -> list[TokenLogprob]:
        prompt = self.choice.request.prompt
        if len(self._scored) != len(prompt) - 1:
            raise RequestFailed(
                f"the engine scored {len(self._scored)} of {len(prompt) - 1} tokens of the prompt"
            )
        return self._scored


def sglang_fields(writers: Sequence[ChoiceWriter]) -> SGLangFields | UnsetType:
    """UNSET where the request wants none of them."""
    experts = [experts for writer in writers if (experts := writer.choice.routed_experts()) is not UNSET]
    return SGLangFields(experts if len(experts) > 1 else experts[0]) if experts else UNSET


def id_of(body: GenerationRequest, writer: type[ChoiceWriter]) -> str:
    return body.rid or body.request_id or f"{writer.prefix}-{uuid.uuid4().hex}"


class Answer:
    """`echoes` are the prompts' texts, one for each choice, where they go in front of the outputs."""

    def __init__(
        self,
        id: str,
        body: GenerationRequest,
        generation: Generation,
        writer: type[ChoiceWriter],
        echoes: Sequence[str | None] = (),
    ) -> None:
        self.body, self.generation, self.writer = body, generation, writer
        texts = echoes or [None] * len(generation.choices)
        self.writers = [
            writer(index, choice, body, echo)
            for index, (choice, echo) in enumerate(zip(generation.choices, texts, strict=True))
        ]
        self.usage = Usage(generation.choices, body.generated)
        created = int(time())  # a date, not a duration
        self._id: Fields = {"id": id, "created": created, "model": generation.choices[0].model}
        self._head: Fields = self._id | {"object": writer.chunk_object}
        self._with_usage = body.include_usage or generation.service.server_config.enable_force_include_usage
        self._usage_in_every_chunk = self._with_usage and body.continuous_usage
        self._no_usage = None if self._with_usage else UNSET
        # The prompt's fields stand here if they are not in the choices.
        prompt = generation.choices[0].request.prompt
        self._prompt_ids: Fields = (
            {"prompt_token_ids": prompt} if body.return_token_ids and writer.one_prompt else {}
        )

    def _add(self, output: StepOutput) -> ChoiceWriter:
        step = self.generation.add(output)
        self.usage.add(step)
        writer = self.writers[step.index]
        writer.add(step)
        return writer

    async def object(self) -> CompletionObject | ChatObject:
        async for steps in self.generation.stream():
            for step in steps:
                self._add(step)
        writers = self._best_writers()
        choices: Any = [writer.object() for writer in writers]
        offer = self.generation.choices[0].offer
        fields = self._id | self._prompt_ids | writers[0].prompt_fields | kv_transfer_fields(offer)
        fields |= {
            "metadata": AnswerMetadata(writers[0].choice.weight_version),
            "sglext": sglang_fields(writers),
        }
        return self.writer.answer_type(choices=choices, usage=self.usage.object(), **fields)

    def _best_writers(self) -> list[ChoiceWriter]:
        """Returns all choices, or the likeliest of each prompt, sorted and numbered anew."""
        generated, wanted = self.body.generated, self.body.choices
        if generated == wanted:
            return self.writers
        groups = [self.writers[first : first + generated] for first in range(0, len(self.writers), generated)]
        ranked = [sorted(group, key=lambda writer: -writer.choice.mean_logprob)[:wanted] for group in groups]
        writers = [writer for group in ranked for writer in group]
        for index, writer in enumerate(writers):
            writer.index = index
        return writers

    async def chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """Chunks for each step that completed some text; the last one of a choice has its finish_reason, the
        very last one the usage."""
        async with contextlib.aclosing(self.generation.stream()) as batches:
            async for steps in batches:
                if chunks := [chunk for step in steps for chunk in self._step_chunks(step)]:
                    yield chunks
        if self.body.return_routed_experts:
            yield [Chunk(**self._head, choices=[], sglext=sglang_fields(self.writers))]
        if self._with_usage:
            yield [Chunk(**self._head, choices=[], usage=self.usage.object())]

    def _step_chunks(self, step: StepOutput) -> list[Chunk]:
        writer = self.writers[step.index]
        opening = self._opening(writer)
        contents = self._add(step).chunks()
        usage, metadata = self._usage(), AnswerMetadata(writer.choice.weight_version)
        return [
            *opening,
            *(
                Chunk(
                    **self._head,
                    choices=[content],
                    usage=usage,
                    metadata=UNSET if content.finish_reason is None else metadata,
                )
                for content in contents
            ),
        ]

    def _opening(self, writer: ChoiceWriter) -> list[Chunk]:
        """A choice's chunk before any of its text, where it has one."""
        begins, writer.started = not writer.started, True
        if writer.opening is None or not begins:
            return []
        first = Chunk(
            **self._head, choices=[ChunkChoice(writer.index, **writer.opening)], usage=self._usage()
        )
        return [structs.replace(first, **(self._prompt_ids if writer.index == 0 else {}))]

    def _usage(self) -> UsageObject | UnsetType | None:
        return self.usage.object() if self._usage_in_every_chunk else self._no_usage

    async def respond(self, request: Request) -> Response:
        headers, config = self.generation.headers, self.generation.service.server_config
        if self.body.stream:
            return EventStream(self.chunks(), config.sse_keep_alive_interval, headers)
        return JSON(await unless_gone(request.receive, self.object()), headers=headers)
