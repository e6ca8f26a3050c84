"""The answer of /v1/responses while it grows: the response, what of it is stored, and its stream of
events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any

from msgspec import UNSET, UnsetType, structs

from mtpserve.core.errors import MTPServeError
from mtpserve.core.request import Finish
from mtpserve.server.chat.conversation import CalledFunction, ChatMessage, MessageToolCall
from mtpserve.server.chat.generation import Block, Choice, Generation
from mtpserve.server.chat.steps.step_output import StepOutput
from mtpserve.server.http.errors import describe, renamed
from mtpserve.server.openai.responses import response_objects as objects
from mtpserve.server.openai.responses.items import ResponseInput
from mtpserve.server.openai.responses.response_body import RENAMED, ResponsesRequest
from mtpserve.server.openai.responses.response_events import EventWriter
from mtpserve.server.openai.responses.response_input import SEAL
from mtpserve.server.openai.responses.store import ResponseStore, Stored

Members = dict[str, tuple[str, str]]  # as Offer has them


@dataclass(slots=True)
class ResponseAnswer:
    """One response while it grows. `only_prompt`: nothing is written, and all of it is that its prompt was
    computed."""

    id: str
    body: ResponsesRequest
    generation: Generation
    stores: Sequence[ResponseStore]  # that keep it
    input: ResponseInput
    members: Members
    only_prompt: bool = False
    stream_id: str | UnsetType = UNSET  # in all events, where the client gave one
    status: objects.Status = "in_progress"
    error: objects.ResponseError | None = None
    created: int = field(default_factory=lambda: int(time()))  # a date, not a duration
    completed: int | None = None

    def __post_init__(self) -> None:
        self.keep()

    @property
    def choice(self) -> Choice:
        return self.generation.choices[0]

    def keep(self) -> None:
        output = [assistant_message(self.choice)] if self.choice.blocks else []
        for store in self.stores:
            store.put(self.id, Stored(self.object(), [*self.input.conversation, *output], self.input.items))

    def finished(self) -> None:
        if self.only_prompt:
            self.choice.blocks.clear()
        full: objects.Status = "completed" if self.only_prompt else "incomplete"
        # None: the client left.
        endings: dict[Finish | None, objects.Status] = {
            Finish.LENGTH: full,
            Finish.ABORT: "cancelled",
            None: "cancelled",
        }
        self.status = endings.get(self.choice.finish, "completed")
        if self.status == "completed":
            self.completed = self.created + int(perf_counter() - self.generation.arrival)
        self.keep()

    def failed(self, error: MTPServeError) -> None:
        details = describe(error)[1].error
        self.status, self.error = "failed", objects.ResponseError(details.code, details.message)
        self.keep()

    def item(self, index: int) -> objects.AnyItem:
        """Returns an item. Only the last one can have been cut off."""
        is_last = index == len(self.choice.blocks) - 1
        whole = not is_last or (self.status in ("completed", "in_progress") and not self.choice.is_call_cut)
        written = item(self.choice.blocks[index], "completed" if whole else "incomplete", self.members)
        if isinstance(written, objects.ReasoningItem) and self.body.includes_sealed_reasoning:
            return structs.replace(written, encrypted_content=SEAL + written.content[0].text)
        return written

    def object(self) -> objects.ResponseObject:
        body, choice, going_on = self.body, self.choice, self.status == "in_progress"
        sampling = choice.request.sampling
        return objects.ResponseObject(
            id=self.id,
            object="response",
            created_at=self.created,
            completed_at=self.completed,
            status=self.status,
            background=False,
            error=self.error,
            incomplete_details=objects.Incomplete("max_output_tokens")
            if self.status == "incomplete"
            else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            model=choice.model,
            output=[] if going_on else [self.item(index) for index in range(len(choice.blocks))],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=objects.EffortUsed(None if body.reasoning is None else body.reasoning.effort, None),
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            service_tier="default",
            store=body.store is not False,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            temperature=sampling.temperature,
            text=objects.TextFormat((body.text and body.text.format) or {"type": "text"}),
            tool_choice=body.tool_choice or "auto",
            tools=[shown_tool(tool) for tool in body.tools or []],
            top_logprobs=0,
            top_p=sampling.top_p,
            truncation=body.truncation or "disabled",
            usage=None if going_on else self.usage(),
            user=body.user,
            metadata=body.metadata or {},
        )

    def usage(self) -> objects.ResponseUsage:
        prompt, output = len(self.choice.request.prompt), len(self.choice.tokens)
        details = objects.OutputDetails(self.choice.reasoning_tokens)
        return objects.ResponseUsage(
            prompt, objects.InputDetails(self.choice.cached_tokens), output, details, prompt + output
        )


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns the tool with all fields that OpenAI's clients expect of a function."""
    absent = {"description": None, "parameters": None, "strict": None}
    return absent | tool if tool.get("type") == "function" else tool


def assistant_message(choice: Choice) -> ChatMessage:
    """The answer as the conversation goes on from it, calls that were cut off or are no JSON among them:
    their results may follow."""
    calls = [
        MessageToolCall(id=block.call_id, function=CalledFunction(name=block.name, arguments=block.text))
        for block in choice.calls
    ]
    reasoning = choice.text("reasoning") or None
    return ChatMessage(
        role="assistant", content=choice.text(), reasoning_content=reasoning, tool_calls=calls or None
    )


def item(block: Block, status: objects.Status, members: Members) -> objects.AnyItem:
    id = item_id(block)
    match block.kind:
        case "text":
            return objects.MessageItem(id, status, "assistant", [objects.OutputText(block.text)])
        case "reasoning":
            return objects.ReasoningItem(id, status, [], [objects.ReasoningText(block.text)])
        case "call":
            around, name = members.get(block.name, (UNSET, block.name))
            return objects.CallItem(
                id=id, status=status, call_id=block.call_id, namespace=around, name=name, arguments=block.text
            )


def item_id(block: Block) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.id


class AnswerWriter(EventWriter):
    """The events of an answer while it grows."""

    def __init__(self, answer: ResponseAnswer) -> None:
        super().__init__(answer.stream_id)
        self.answer = answer
        self.opened = 0

    def step_events(self, step: StepOutput) -> Iterator[objects.ResponseEvent]:
        self.answer.generation.add(step)
        if self.answer.only_prompt:
            return
        for index, block in self.answer.choice.unfinished_blocks(self.opened):
            growing = item(block, "in_progress", self.answer.members)
            if index == self.opened:
                yield from self.closing_events()
                self.opened += 1
                yield from self.item_opened(index, growing)
            if text := block.take():
                yield from self.text_added(index, growing, text)

    def closing_events(self) -> Iterator[objects.ResponseEvent]:
        """What ends the item that is open, if one is."""
        if self.opened:
            yield from self.item_closed(self.opened - 1, self.answer.item(self.opened - 1))


async def events(answer: ResponseAnswer) -> AsyncGenerator[list[objects.ResponseEvent], None]:
    """A request that is refused before its first token gets a status code instead."""
    writer, started = AnswerWriter(answer), False
    with renamed(RENAMED):  # the engine may refuse what the route could not see
        try:
            async with contextlib.aclosing(answer.generation.stream()) as batches:
                async for steps in batches:
                    opening = [] if started else writer.opening_events(answer.object())
                    started = True
                    if batch := [*opening, *(event for step in steps for event in writer.step_events(step))]:
                        yield batch
            answer.finished()
            yield [*writer.closing_events(), writer.closing_event(answer.object())]
        except MTPServeError as error:
            answer.failed(error)
            if not started:
                raise
            yield [writer.closing_event(answer.object())]
        finally:
            if answer.status == "in_progress":
                answer.finished()
