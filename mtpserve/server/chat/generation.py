"""Answers while they grow, in no API's layout: each choice is a request to the engine, and its output as
blocks of text and calls.

Every generating route makes a Generation, and renders its choices whole or step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from mtpserve.core.kv_transfer import PageOffer
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.request import Finish, Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.state.weight_versions import WeightVersions
from mtpserve.server.chat.bodies import ChatRequest
from mtpserve.server.chat.constraints import apply_thinking_budget
from mtpserve.server.chat.conversation import INVALID_JSON, arguments_of
from mtpserve.server.chat.dialogue import render_prompt, tool_use_of
from mtpserve.server.chat.service import Service
from mtpserve.server.chat.steps.step_output import StepOutput
from mtpserve.server.chat.tools import OutputPlan, apply_output_plan, output_plan
from mtpserve.server.http.errors import renamed
from mtpserve.text.detokenizer import Stops
from mtpserve.text.experts import TokenExperts
from mtpserve.text.parsers.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from mtpserve.text.parsers.output import OutputParser
from mtpserve.text.parsers.reasoning import MAX_TAIL, Opening, ReasoningCount
from mtpserve.text.parsers.registry import REASONINGS
from mtpserve.text.parsers.stops import AnswerStops
from mtpserve.text.requests import Spelling, request_of
from mtpserve.text.tokenizer import Tokenizer

MERGED_STEPS = 16  # steps of several choices that may wait to be written


class OutputReader:
    """One choice's text as the events that the client asked for. It leaves out further calls if the client
    wants one, and calls of tools that the client offers but does not allow here."""

    def __init__(self, plan: OutputPlan, tokenizer: Tokenizer, include_reasoning: bool) -> None:
        self.parses = plan.thinking is not None or plan.calls is not None  # otherwise all text is content
        self.returns_reasoning = include_reasoning and plan.thinking is not None
        self._include_reasoning, self._use = include_reasoning, plan.use
        self._refused_calls: set[int] = set()  # of tools that the client does not allow here
        self._tokenizer = tokenizer
        self.ends_inside_call = False  # no more text came; in some formats a call may end so
        self._plan, self._calls_alone = plan, plan.calls_alone
        self._parser = plan.parser()
        self._counter = None if plan.thinking is None else ReasoningCount(plan.thinking, plan.opening)

    def count(self, tokens: Sequence[int]) -> int:
        """How many of the next tokens are reasoning."""
        if self._counter is None:
            return 0
        return sum(
            self._counter.add(self._tokenizer.token_bytes(token).decode(errors="replace")) for token in tokens
        )

    def stops(self, sampling: SamplingParams) -> Stops | None:
        """Returns where the stop strings of its choice count; None: in all of the text."""
        if not self.parses or not sampling.stop:
            return None
        plan = self._plan
        return AnswerStops(
            OutputParser(plan.thinking, plan.opening, plan.calls),
            sampling.stop,
            sampling.include_stop,
            begins_with_answer=plan.thinking is None or plan.opening is Opening.NONE,
        )

    def read(self, text: str, last: bool) -> list[Event]:
        events, rest = self._parser.feed(text), self._parser.finish() if last else []
        self.ends_inside_call = any(isinstance(event, CallEnd) for event in rest)
        return [event for event in events + rest if self._is_included(event)]

    def _is_included(self, event: Event) -> bool:
        if isinstance(event, CallBegin) and not self._use.allows(event.name):
            self._refused_calls.add(event.index)
        if isinstance(event, CallBegin | Arguments):
            return (event.index == 0 or self._use.several) and event.index not in self._refused_calls
        if isinstance(event, Content):
            return not self._calls_alone
        return isinstance(event, Reasoning) and self._include_reasoning


@dataclass(slots=True)
class Block:
    """A stretch of an answer. A call's text is its arguments; `call_id` and `name` are a call's alone."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call_id: str = ""
    name: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    num_streamed: int = 0  # characters that a stream has taken

    def take(self) -> str:
        """Returns the text since the last call, for a stream."""
        text = self.text[self.num_streamed :]
        self.num_streamed = len(self.text)
        return text

    def arguments(self) -> dict[str, Any]:
        """The call's arguments. What the model did not complete, or is no JSON object, is INVALID_JSON's
        text."""
        return arguments_of(self.text)


@dataclass(slots=True)
class Choice:
    """One output: blocks, in the order in which the model wrote them. Without a reader all of the text is one
    block."""

    service: Service
    request: Request
    reader: OutputReader | None = None
    blocks: list[Block] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the prefix cache had
    finish: Finish | None = None
    matched_stop: int | str | None = None  # the token or the stop string that ended an output that stopped
    scores_only: bool = False  # the one token that the engine needs to score a prompt is thrown away
    offer: PageOffer | None = None  # its prompt's pages, where another node is to get them
    weight_versions: WeightVersions = field(default_factory=WeightVersions)
    logprob: float = 0.0  # the sum over the tokens, where the request has log-probabilities
    experts: TokenExperts = field(default_factory=TokenExperts)  # where the request wants them

    def add(self, step: StepOutput) -> None:
        """Extends the blocks. An answer that was read has a block in the end, which may be empty."""
        self.weight_versions.add(step.weight_version, len(self.tokens))
        self.tokens += step.tokens
        self.experts.add(step.routed_experts)
        if step.logprobs:
            self.logprob += sum(score.logprob for score in step.logprobs)
        self.cached_tokens += step.num_cached_tokens
        self.finish, self.offer, self.matched_stop = step.finish, step.offer, step.matched_stop
        if self.reader is None or not self.reader.parses:
            if step.text:
                self._extend("text", step.text)
        else:
            self.reasoning_tokens += self.reader.count(step.tokens)
            for event in self.reader.read(step.text, step.finish is not None):
                self._add(event)
        if self.reader is not None and step.finish is not None and not self.blocks:
            self._extend("text", "")

    @property
    def model(self) -> str:
        """The name of what answers: the adapter's, or the model's own."""
        return self.service.model if self.request.lora is None else self.request.lora.lora_name

    @property
    def weight_version(self) -> str:
        """Returns the version of the weights that chose its last token."""
        versions = self.weight_versions.switches
        return versions[-1][0] if versions else self.service.weight_version

    @property
    def stops(self) -> Stops | None:
        """Returns where its stop strings count, from its beginning; None: in all of the text."""
        return None if self.reader is None else self.reader.stops(self.request.sampling)

    def _add(self, event: Event) -> None:
        match event:
            case Content(text):
                self._extend("text", text)
            case Reasoning(text):
                self._extend("reasoning", text)
            case CallBegin(_, id, name):
                self.blocks.append(Block("call", call_id=id, name=name))
            case Arguments(_, text):
                self._extend("call", text)  # arguments of the call that began last
            case _:
                raise TypeError(f"{type(event).__name__} is in no block")

    def _extend(self, kind: Literal["reasoning", "text", "call"], text: str) -> None:
        """Continues the last block if it is of this kind, and otherwise begins one."""
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        self.blocks[-1].text += text

    def unfinished_blocks(self, num_opened: int) -> Iterator[tuple[int, Block]]:
        """Yields the blocks, with their index, that may have more text than a stream has taken: of
        `num_opened` blocks in the stream the last one, and those that it has not opened."""
        first = max(num_opened - 1, 0)
        return enumerate(self.blocks[first:], first)

    def routed_experts(self, start: int = 0) -> str | UnsetType:
        """Returns them in SGLang's form, from token `start` on; UNSET where the request wants none."""
        sizes = self.service.client.card.experts
        if sizes is None or not self.request.sampling.return_routed_experts:
            return UNSET
        return self.experts.int32(sizes, len(self.request.prompt) + len(self.tokens), start)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of a token; an output without tokens is the least likely."""
        return self.logprob / len(self.tokens) if self.tokens else -math.inf

    def text(self, kind: Literal["reasoning", "text"] = "text") -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    @property
    def is_call_cut(self) -> bool:
        """True if the text ended before the arguments of its last call did."""
        return (
            self.reader is not None
            and self.reader.ends_inside_call
            and bool(self.calls)
            and INVALID_JSON in self.calls[-1].arguments()
        )

    @property
    def ends_with_calls(self) -> bool:
        """True if the answer ended so that tools can answer."""
        return self.finish is Finish.STOP and bool(self.calls) and not self.is_call_cut


@dataclass(slots=True)
class Generation:
    """The choices of one answer, generated together. `arrival` is perf_counter's. `asked_tokens` is the
    client's limit of a choice, `max_tokens` the one that fits."""

    service: Service
    choices: list[Choice]
    arrival: float
    timeout: float | None
    streaming: bool
    asked_tokens: int | None = None
    max_tokens: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What the answer's headers say of it: a limit that was lowered, as `asked->given`."""
        if self.asked_tokens == self.max_tokens:
            return {}
        return {"x-max-tokens-clamped": f"{self.asked_tokens}->{self.max_tokens}"}

    def stream(self) -> AsyncGenerator[list[StepOutput], None]:
        """The steps of all choices as they come, for `add`. Closing it early ends the requests."""
        streams = [
            self.service.generate(
                choice.request,
                self.arrival,
                self.timeout,
                streaming=self.streaming,
                index=index,
                stops=choice.stops,
            )
            for index, choice in enumerate(self.choices)
        ]
        return streams[0] if len(streams) == 1 else merge(streams)  # one needs neither a task nor a queue

    def add(self, step: StepOutput) -> StepOutput:
        """Extends the step's choice. Returns what the client gets of the step."""
        choice = self.choices[step.index]
        if choice.scores_only:
            step = step.without_output()
        choice.add(step)
        return step

    async def run(self) -> None:
        """Generates all choices to their end."""
        async for steps in self.stream():
            for step in steps:
                self.add(step)


def requests_of(
    service: Service, spelling: Spelling, id: str, prompt: list[int], sampling: SamplingParams, count: int,
    first: int = 0,
    salt: str = "", lora: LoRARequest | None = None
) -> list[Request]:  # fmt: skip
    """Returns a request for each choice of a prompt. Their ids are the client's, a dash, and the numbers from
    `first` on."""
    if sampling.thinking_token_budget is not None:  # the prompt was not rendered from a conversation
        name = service.formats.reasoning
        thinking = None if name is None else REASONINGS.get(name)
        tail = service.tokenizer.decode(prompt[-MAX_TAIL:], skip_special_tokens=False)
        opening = Opening.NONE if thinking is None else thinking.opening(tail)
        sampling = apply_thinking_budget(sampling, thinking, opening, service.tokenizer)
    requests = [
        request_of(
            spelling, f"{id}-{first + choice}", prompt, service.for_choice(sampling, choice), salt, lora
        )
        for choice in range(count)
    ]
    return (
        [replace(request, choices=0 if number else count) for number, request in enumerate(requests)]
        if count > 1
        else requests
    )


async def create_generation(
    service: Service, body: ChatRequest, id: str, arrival: float, at_most: int | None = None
) -> Generation:
    """Continues a conversation. All checks of a request are made here, before the engine gets it.

    `id` is what /abort_request takes. `at_most` bounds the output where the context may bound it further.
    """
    service.admit(body.model)
    body.check()
    wanted_tokens, clamps = body.wanted_tokens, service.clamps(body.truncate_prompt_tokens)
    sampling = body.sampling(service.chat_sampling.defaults(body.names_sampling), wanted_tokens)
    with renamed({"logprobs": "top_logprobs"}):
        service.check_sampling(sampling, clamps)
    use = tool_use_of(service, body)
    chat = await render_prompt(service, body, use)
    message_prefix = body.messages[-1].text() if body.continue_final_message else None
    plan = output_plan(
        use,
        chat.text,
        service.formats,
        message_prefix=message_prefix,
        separate_reasoning=body.separate_reasoning is not False,
    )
    if plan.calls is not None and (plan.use.forced or sampling.grammar is not None):
        # tools' schemas are compiled
        sampling = await asyncio.to_thread(apply_output_plan, plan, sampling, service.tokenizer)
    else:
        sampling = apply_output_plan(plan, sampling, service.tokenizer)
    spelling = await service.spelling(sampling)
    prompt = service.truncate(
        await service.encode_chat(chat), body.truncate_prompt_tokens, wanted_tokens, body.keeps_first
    )
    service.check_length(prompt, None if clamps else wanted_tokens, "messages")
    asked_tokens = wanted_tokens if at_most is None else at_most
    if asked_tokens is not None:
        room = service.client.card.context_length - len(prompt)
        sampling = replace(sampling, max_tokens=min(asked_tokens, room))
    lora = service.lora_of(body.model)
    requests = requests_of(service, spelling, id, prompt, sampling, body.choices, salt=body.salt, lora=lora)
    handover = service.handover(body)
    readers = [OutputReader(plan, service.tokenizer, body.shows_reasoning) for _ in requests]
    choices = [
        Choice(service, handover.of(request, 0), reader)
        for request, reader in zip(requests, readers, strict=True)
    ]
    return Generation(
        service, choices, arrival, body.timeout, bool(body.stream), asked_tokens, sampling.max_tokens
    )


async def merge(
    streams: list[AsyncGenerator[list[StepOutput], None]],
) -> AsyncGenerator[list[StepOutput], None]:
    """The outputs of all streams as they come. The first error ends them all."""
    queue: asyncio.Queue[list[StepOutput] | Exception | None] = asyncio.Queue(MERGED_STEPS)

    async def pump(stream: AsyncGenerator[list[StepOutput], None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for steps in stream:
                    await queue.put(steps)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
