"""Answers while they grow, in no API's layout: each choice is a request to the engine, and its output as blocks of text and calls.

Every generating route makes a Generation, and renders its choices whole or step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mtpserve.core.request import Finish, Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.server.dialogue import asked_tools, rendered
from mtpserve.server.fields import refuse_constant
from mtpserve.server.openai.body import ChatRequest
from mtpserve.server.service import Service, StepOutput
from mtpserve.server.tools import OutputPlan, output_plan, planned
from mtpserve.text.parsers.events import Arguments, CallBegin, Content, Event, Reasoning
from mtpserve.text.parsers.reasoning import ReasoningCount
from mtpserve.text.requests import Spelling, request_of
from mtpserve.text.tokenizer import Tokenizer

MERGED_STEPS = 64  # of several choices, waiting to be written
Added = list[tuple[int, str]]  # what a step adds: a block's index, which may be that of a new one, and text


class OutputReader:
    """One choice's text as the events that the client asked for. Where one call is wanted, further ones are left out."""

    def __init__(self, plan: OutputPlan, tokenizer: Tokenizer, include_reasoning: bool) -> None:
        self.tells_reasoning = include_reasoning and plan.thinking is not None
        self._include_reasoning, self._several, self._tokenizer = include_reasoning, plan.use.several, tokenizer
        self._parser = plan.parser()
        self._counter = None if plan.thinking is None else ReasoningCount(plan.thinking, plan.opening)

    def count(self, tokens: Sequence[int]) -> int:
        """How many of the next tokens are reasoning."""
        if self._counter is None:
            return 0
        return sum(self._counter.add(self._tokenizer.token_bytes(token).decode(errors="replace")) for token in tokens)

    def read(self, text: str, last: bool) -> list[Event]:
        events = self._parser.feed(text) + (self._parser.finish() if last else [])
        return [event for event in events if self._wanted(event)]

    def _wanted(self, event: Event) -> bool:
        if isinstance(event, CallBegin | Arguments):
            return event.index == 0 or self._several
        return isinstance(event, Content) or (isinstance(event, Reasoning) and self._include_reasoning)


@dataclass(slots=True)
class Block:
    """A part of an answer. The text of a call is its arguments; `call_id` and `name` are a call's alone."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call_id: str = ""
    name: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def arguments(self) -> dict[str, Any] | None:
        """None where the model did not complete them, or wrote no JSON object."""
        try:
            value = json.loads(self.text, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


@dataclass(slots=True)
class Choice:
    """One output: blocks, in the order in which the model wrote them. Without a reader all of the text is one block."""

    service: Service
    request: Request
    reader: OutputReader | None = None
    blocks: list[Block] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish: Finish | None = None

    def add(self, step: StepOutput) -> Added:
        """Pieces of one block that follow each other are one. An answer that was read has a block in the end, which may be empty."""
        self.tokens += step.tokens
        self.finish = step.finish
        events: list[Event] = [Content(step.text)] if step.text else []
        if self.reader is not None:
            self.reasoning_tokens += self.reader.count(step.tokens)
            events = self.reader.read(step.text, step.finish is not None)
            if not events and not self.blocks and step.finish is not None:
                events = [Content("")]
        added: Added = []
        for event in events:
            new, text = self._add(event)
            if added and not new:
                added[-1] = (added[-1][0], added[-1][1] + text)
            else:
                added.append((len(self.blocks) - 1, text))
        return added

    def _add(self, event: Event) -> tuple[bool, str]:
        """→ whether a block begins, and the text."""
        before, text = len(self.blocks), ""
        match event:
            case Content(text):
                self._continue("text")
            case Reasoning(text):
                self._continue("reasoning")
            case CallBegin(_, id, name):
                self.blocks.append(Block("call", call_id=id, name=name))
            case Arguments(_, text):
                pass  # those of the call that began last
        self.blocks[-1].text += text
        return len(self.blocks) > before, text

    def _continue(self, kind: Literal["reasoning", "text"]) -> None:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))

    def text(self, kind: Literal["reasoning", "text"] = "text") -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    @property
    def called(self) -> bool:
        """Whether the answer ended so that tools can answer."""
        return self.finish is Finish.STOP and bool(self.calls)

    @property
    def matched(self) -> int | str | None:
        """What ended an output that stopped: a token, or a stop string."""
        return self.service.matched(self.request.sampling, self.tokens) if self.finish is Finish.STOP else None


@dataclass(slots=True)
class Generation:
    """The choices of one answer, generated together. `arrival` is perf_counter's."""

    service: Service
    choices: list[Choice]
    arrival: float
    timeout: float | None
    streaming: bool
    scores_only: bool = False  # the one token that the engine needs to score a prompt is thrown away

    async def steps(self) -> AsyncGenerator[tuple[int, StepOutput, Added], None]:
        """Each step's choice, its output, and what it adds to the choice's blocks."""
        streams = [self.service.generate(choice.request, self.arrival, self.timeout, streaming=self.streaming) for choice in self.choices]
        async with contextlib.aclosing(merge(streams)) as outputs:
            async for index, step in outputs:
                if self.scores_only:
                    step = StepOutput("", [], step.finish and Finish.LENGTH, prompt_logprobs=step.prompt_logprobs)
                yield index, step, self.choices[index].add(step)

    async def whole(self) -> None:
        async for _ in self.steps():
            pass


def requests_of(
    service: Service, spelling: Spelling, id: str, prompt: list[int], sampling: SamplingParams, count: int, first: int = 0
) -> list[Request]:
    """For each choice of a prompt. Their ids are the client's, a dash, and the numbers from `first` on."""
    requests: list[Request] = []
    for choice in range(count):
        same = requests[0].id if requests else None
        own = service.for_choice(sampling, choice)
        requests.append(request_of(spelling, f"{id}-{first + choice}", prompt, own, same_prompt_as=same))
    return requests


async def continued(service: Service, body: ChatRequest, id: str, arrival: float, at_most: int | None = None) -> Generation:
    """A conversation, continued. All checks of a request are made here, before the engine gets it.

    `id` is what /abort_request takes. `at_most` bounds the output where the context may bound it further.
    """
    service.admit(body.model)
    body.check()
    sampling = body.sampling(service.tokenizer.defaults, body.wanted_tokens)
    service.check_sampling(sampling)
    use = asked_tools(service, body)
    chat = await rendered(service, body, use)
    begun = body.messages[-1].text() if body.continue_final_message else None
    plan = output_plan(use, chat.text, service.formats, begun=begun, separate_reasoning=body.separate_reasoning is not False)
    sampling = planned(plan, sampling, service.tokenizer)
    spelling = await service.spelling(sampling)
    prompt = service.truncated(await service.encode_chat(chat), body.truncate_prompt_tokens, body.wanted_tokens)
    service.check_length(prompt, body.wanted_tokens, "messages")
    if at_most is not None:
        sampling = replace(sampling, max_tokens=min(at_most, service.client.card.context_length - len(prompt)))
    requests = requests_of(service, spelling, id, prompt, sampling, body.choices)
    choices = [Choice(service, request, OutputReader(plan, service.tokenizer, body.shows_reasoning)) for request in requests]
    return Generation(service, choices, arrival, body.timeout, bool(body.stream))


async def merge(streams: list[AsyncGenerator[StepOutput, None]]) -> AsyncGenerator[tuple[int, StepOutput], None]:
    """The outputs of all streams as they come, each with its stream's index. The first error ends them all."""
    if len(streams) == 1:  # without a task and a queue
        async with contextlib.aclosing(streams[0]) as stream:
            async for step in stream:
                yield 0, step
        return
    queue: asyncio.Queue[tuple[int, StepOutput | Exception | None]] = asyncio.Queue(MERGED_STEPS)

    async def pump(index: int, stream: AsyncGenerator[StepOutput, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for step in stream:
                    await queue.put((index, step))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
