"""Conversations in OpenAI's form, as a caller of `LLM.chat` has them, to what chat templates take. The server
has its own in server/chat/conversation.py, which also reads what other programs' clients send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mtpserve.core.errors import InvalidRequest
from mtpserve.text.requests import check_text
from mtpserve.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages with their contents as text and the arguments of tool calls as objects. Raises
    InvalidRequest with the place of what is wrong."""
    if not messages:
        raise InvalidRequest("messages must have at least one message, got []", "messages")
    return [template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def template_message(message: Message, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{place} must be a dict with role and content, got {message!r:.80}", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{place}.role must be one of {', '.join(ROLES)}, got {role!r:.80}", "messages")
    rendered = dict(message) | {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content"), f"{place}.content"),
    }
    if calls := message.get("tool_calls"):
        rendered["tool_calls"] = [
            template_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return rendered


def text_of(content: Any, place: str) -> str:
    """Returns a text as it is, and the texts of a list of parts as lines."""
    if content is None:
        return ""
    if isinstance(content, str):
        check_text(content, place)
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{place} must be a text or a list of parts, got {content!r:.80}", "messages")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{place}: parts of type {kind!r:.80} are not supported, only text is", "messages"
            )
    return "\n".join(text_of(part["text"], place) for part in content)


def template_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{place} must have a function with a name, got {call!r:.80}", "messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise InvalidRequest(
                f"{place}.function.arguments must be JSON, got {function['arguments']!r:.80}", "messages"
            ) from error
    return dict(call) | {"type": "function", "function": dict(function) | {"arguments": arguments}}


def conversations_of(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Returns a list of conversations: one, or several as they are."""
    several = len(messages) > 0 and not isinstance(messages[0], Mapping)
    return list(messages) if several else [messages]  # type: ignore[arg-type, list-item]


def chat_prompts(
    tokenizer: Tokenizer,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any] | None,
) -> list[list[int]]:
    """Returns the prompt of each conversation as tokens. `variables`: of the template. Raises
    InvalidRequest."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt=False", "continue_final_message"
        )
    if not tokenizer.has_chat_template:
        raise InvalidRequest("this model has no chat template: use generate", "messages")
    if tools and not tokenizer.template_mentions("tools"):
        raise InvalidRequest(
            "tools: the model's chat template has no place for them; describe them in a system message",
            "tools",
        )
    return [
        tokenizer.encode_chat(
            tokenizer.render_chat(
                for_template(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=[dict(tool) for tool in tools] if tools else None,
                variables=variables,
            )
        )
        for conversation in conversations_of(messages)
    ]
