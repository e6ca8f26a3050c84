"""What every route that continues a conversation shares: from its messages to a prompt and a plan for the output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import SamplingParams
from mtpserve.server.conversation import calls_in_text, for_template, in_turns, size_of
from mtpserve.server.openai import ChatRequest
from mtpserve.server.service import INLINE_BYTES, MAX_BYTES_PER_TOKEN, Service
from mtpserve.server.tools import OutputPlan, ToolUse, output_plan, planned, template_variables, tool_use
from mtpserve.text.requests import Spelling


def asked_tools(service: Service, body: ChatRequest) -> ToolUse:
    return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, service.formats)


async def rendered(service: Service, body: ChatRequest, use: ToolUse) -> str:
    """The conversation as the template writes it. Its size is bounded before the template's code runs over it."""
    messages = for_template(body.messages)
    size = size_of(messages) + len(json.dumps(use.shown or []))
    if max(size, len(messages)) > MAX_BYTES_PER_TOKEN * service.client.card.context_length:
        raise service.too_long(f"messages and tools have {size} characters", "messages")
    goes_on = bool(body.continue_final_message)
    variables = service.template_defaults | template_variables(body.chat_template_kwargs, body.reasoning_effort, service.tokenizer)

    def written(conversation: list[dict[str, Any]]) -> str:
        return service.tokenizer.render_chat(
            conversation,
            add_generation_prompt=body.add_generation_prompt is not False and not goes_on,
            continue_final_message=goes_on,
            tools=use.shown,
            variables=variables,
        )

    def render() -> str:
        refusals = []
        for attempt in spellings(messages):
            try:
                return written(attempt)
            except InvalidRequest as error:
                refusals.append(error)
        raise refusals[-1]

    return render() if size <= INLINE_BYTES else await asyncio.to_thread(render)


def spellings(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation as most templates take it, and as those do that refuse it so."""
    yield messages
    in_text = calls_in_text(messages)
    if in_text != messages:
        yield in_text
    for each in (messages, in_text):
        if (turns := in_turns(each)) != each:
            yield turns


@dataclass(frozen=True, slots=True)
class Prepared:
    prompt: list[int]
    sampling: SamplingParams
    spelling: Spelling
    plan: OutputPlan


async def prepared(service: Service, body: ChatRequest) -> Prepared:
    """Everything that can be wrong with a request is found here, before the engine hears of it."""
    service.admit(body.model)
    body.check()
    sampling = body.sampling(service.tokenizer.defaults, body.wanted_tokens)
    service.check_sampling(sampling)
    use = asked_tools(service, body)
    text = await rendered(service, body, use)
    begun = body.messages[-1].text() if body.continue_final_message else None
    plan = output_plan(use, text, service.formats, begun=begun, separate_reasoning=body.separate_reasoning is not False)
    sampling = planned(plan, sampling, service.tokenizer)
    spelling = await service.spelling(sampling)
    prompt = await service.encode(text, "messages", special=False)
    service.check_length(prompt, body.wanted_tokens, "messages")
    return Prepared(prompt, sampling, spelling, plan)
