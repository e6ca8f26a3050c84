"""The way from a conversation to its prompt: templates, tools, and what the template needs of both."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.chat.bodies import ChatRequest
from mtpserve.server.chat.conversation import for_template, in_turns, size_of
from mtpserve.server.chat.service import INLINE_BYTES, MAX_BYTES_PER_TOKEN, Service
from mtpserve.server.chat.tools import ToolUse, call_format, parse_tools, template_variables
from mtpserve.text.control import RenderedChat
from mtpserve.text.parsers.tools import instructions


def tool_use_of(service: Service, body: ChatRequest, prompt_only: bool = False) -> ToolUse:
    return parse_tools(body.tools, body.tool_choice, body.parallel_tool_calls, service.formats, prompt_only)


async def render_prompt(service: Service, body: ChatRequest, use: ToolUse) -> RenderedChat:
    """The conversation as the template writes it. Its size is bounded before the template's code runs over
    it."""
    messages = for_template(body.messages)
    size = size_of(messages) + len(json.dumps(use.template_tools or []))
    if max(size, len(messages)) > MAX_BYTES_PER_TOKEN * service.client.card.context_length:
        raise service.too_long(f"messages and tools have {size} characters", "messages")
    goes_on = bool(body.continue_final_message)
    variables = service.template_defaults | template_variables(
        body.template_kwargs, body.effort, service.tokenizer
    )

    tools = use.template_tools

    def render_messages(conversation: list[dict[str, Any]]) -> RenderedChat:
        return service.tokenizer.render_chat(
            conversation,
            add_generation_prompt=body.add_generation_prompt is not False and not goes_on,
            continue_final_message=goes_on,
            tools=service.template_needs.adapt_tools(tools) if tools else tools,
            variables=variables,
            arranged=partial(adapt_messages, service, use),
        )

    def render() -> RenderedChat:
        try:
            return render_messages(messages)
        except InvalidRequest:
            if (turns := in_turns(messages)) == messages:
                raise
            return render_messages(turns)

    return render() if size <= INLINE_BYTES else await asyncio.to_thread(render)


def adapt_messages(
    service: Service, use: ToolUse, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """What the template needs of the messages, once there are tools or calls; and the tools, where it does
    not render them."""
    if not tools and not any("tool_calls" in message for message in messages):
        return messages
    needs = service.template_needs
    example = call_format(use, service.formats).example
    adapted_messages = needs.adapt_messages(messages, example)
    if needs.tools_told or not tools:
        return adapted_messages
    text = instructions(tools, example)
    if adapted_messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *adapted_messages]
    return [
        {**adapted_messages[0], "content": f"{adapted_messages[0]['content']}\n\n{text}"},
        *adapted_messages[1:],
    ]
