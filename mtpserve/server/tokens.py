"""POST /tokenize and /detokenize: text to tokens and back, in the fields of both peers; GET /tokenizer_info.
Nothing reaches the engine."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.chat import forms
from mtpserve.server.chat.bodies import NOT_BOTH_ENDS, ChatRequest
from mtpserve.server.chat.conversation import Messages
from mtpserve.server.chat.dialogue import render_prompt, tool_use_of
from mtpserve.server.chat.service import Served
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.schema.base import MAX_PROMPTS, Effort, Strict, Texts, Tokens
from mtpserve.server.schema.fields import either
from mtpserve.server.schema.shapes import TOKEN, Schema, one_of, present

OF_MESSAGES = ("continue_final_message", "chat_template_kwargs", "tools", "tool_choice", "reasoning_effort")
TOKENS: Schema = {"type": "array", "items": TOKEN}


class TokenizeRequest(Strict):
    """A text, several texts, or a conversation as the chat template writes it, with tools or without."""

    shapes: ClassVar[dict[str, Schema]] = {
        "prompt": {"maxItems": MAX_PROMPTS},
        "messages": {"minItems": 1},
        "tools": forms.TOOLS,
        "tool_choice": forms.TOOL_CHOICE,
        "chat_template_kwargs": forms.VARIABLES,
    }
    rules: ClassVar[tuple[Schema, ...]] = (
        one_of("prompt", "messages"),
        NOT_BOTH_ENDS,
        forms.DEMANDED,
        {
            "anyOf": [
                present("messages"),
                {"properties": {name: {"enum": [None, False, "", [], {}]} for name in OF_MESSAGES}},
            ]
        },
    )

    model: str | None = None
    prompt: Annotated[str | Texts | None, either("a string or a list of strings")] = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, either("a string or an object")] = None
    reasoning_effort: Effort | None = None
    chat_template: None = None  # a template is code: it is the server's
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    shapes: ClassVar[dict[str, Schema]] = {
        "tokens": {"anyOf": [TOKENS, {"type": "array", "items": TOKENS, "maxItems": MAX_PROMPTS}]}
    }

    model: str | None = None
    tokens: Annotated[Tokens | list[Tokens], either("a list of token ids, or a list of such lists")]
    skip_special_tokens: bool | None = None


class Tokenized(Rendered):
    """Lists of each for a list of texts."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str | list[str]] | UnsetType = UNSET


class Detokenized(Rendered):
    """The text under vLLM's name and under SGLang's; lists for a list of lists."""

    prompt: str | list[str]
    text: str | list[str]


def one_or_many(values: list[Any], several: bool) -> Any:
    return values if several else values[0]


def check_count(count: int, field: str) -> None:
    if count > MAX_PROMPTS:
        raise InvalidRequest(f"{field} has {count} entries, at most {MAX_PROMPTS} are allowed", field)


async def tokenize(service: Served, body: TokenizeRequest) -> Response:
    """Turn a text or a conversation into token ids. Answers `count` and `tokens`; for a list of texts, a
    list of each."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    if body.messages is not None:
        chat = ChatRequest.model_construct(
            **{name: getattr(body, name) for name in ("messages", "add_generation_prompt", *OF_MESSAGES)}
        )
        chat.check()
        written = await render_prompt(service, chat, tool_use_of(service, chat, prompt_only=True))
        lists = [await service.encode_chat(written, special=bool(body.add_special_tokens))]
    else:
        for name in OF_MESSAGES:
            if getattr(body, name):
                raise InvalidRequest(f"{name} needs messages: a prompt has no template", name)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        check_count(len(texts), "prompt")
        lists = [
            await service.encode(text, "prompt", special=body.add_special_tokens is not False)
            for text in texts
        ]
    several = isinstance(body.prompt, list)
    counts = one_or_many([len(ids) for ids in lists], several)
    answer = Tokenized(one_or_many(lists, several), counts, service.client.card.context_length)
    if body.return_token_strs:
        strings = [[service.tokenizer.piece(id) for id in ids] for ids in lists]
        answer.token_strs = one_or_many(strings, several)
    return JSON(answer)


async def detokenize(service: Served, body: DetokenizeRequest) -> Response:
    """Turn token ids into text. The text has vLLM's name and SGLang's."""
    service.check_model(body.model)
    several = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: Any = body.tokens if several else [body.tokens]
    check_count(len(lists), "tokens")
    for ids in lists:
        service.check_ids(ids, "tokens")
    skip = body.skip_special_tokens is not False
    texts = [
        await asyncio.to_thread(service.tokenizer.decode, ids, skip_special_tokens=skip) for ids in lists
    ]
    text = one_or_many(texts, several)
    return JSON(Detokenized(text, text))


async def tokenizer_info(service: Served) -> Response:
    """The tokenizer's configuration and the chat template, in vLLM's form. 404 unless the server was
    started to show them."""
    if not service.server_config.enable_tokenizer_info_endpoint:
        raise HTTPException(
            404, "not offered: the server was launched without --enable-tokenizer-info-endpoint"
        )
    return JSON(service.tokenizer.info())
