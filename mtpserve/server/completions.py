"""POST /v1/completions: one or several prompts, as text or tokens, each continued. Chat templates play no part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mtpserve.server.answer import Answer
from mtpserve.server.openai import CompletionRequest
from mtpserve.server.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionShape:
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        return None

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}


async def prompt_ids(service: Service, body: CompletionRequest) -> list[list[int]]:
    prompts = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            ids = await service.encode(prompt, "prompt", special=body.add_special_tokens is not False)
        else:
            ids = prompt
            service.check_ids(ids[: service.client.card.context_length], "prompt")
        service.check_length(ids, body.max_tokens, "prompt")
        prompts.append(ids)
    return prompts


async def completions(request: Request, body: CompletionRequest) -> Response:
    service: Service = request.app.state.service
    service.admit(body.model)
    body.check()
    service.check_ids(body.stop_token_ids or (), "stop_token_ids")
    sampling = body.sampling(service.tokenizer.defaults, body.max_tokens)
    answer = Answer(service, CompletionShape(), [], [], body.include_usage)
    answer.prompts = await prompt_ids(service, body)
    context = service.client.card.context_length
    for prompt in answer.prompts:
        max_tokens = min(DEFAULT_MAX_TOKENS, context - len(prompt)) if body.max_tokens is None else body.max_tokens
        answer.sampling.append(replace(sampling, max_tokens=max_tokens))
    return await answer.respond(request, body)
