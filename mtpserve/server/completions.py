"""POST /v1/completions: one or several prompts, as text or tokens, each continued. Chat templates play no part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.request import TokenLogprob
from mtpserve.server.answer import Answer
from mtpserve.server.logprobs import completion_logprobs
from mtpserve.server.openai import CompletionRequest
from mtpserve.server.service import Service
from mtpserve.text.tokenizer import Tokenizer

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

    def logprobs(self, tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
        return completion_logprobs(tokenizer, tokens, scores, offset)


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
    sampling = body.sampling(service.tokenizer.defaults, body.max_tokens or None)
    if body.echo and body.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    service.check_sampling(sampling)
    answer = Answer(service, CompletionShape(), [], [], body, echo=bool(body.echo), scores_only=body.max_tokens == 0)
    answer.prompts = await prompt_ids(service, body)
    context = service.client.card.context_length
    for prompt in answer.prompts:
        max_tokens = min(DEFAULT_MAX_TOKENS, context - len(prompt)) if body.max_tokens is None else max(body.max_tokens, 1)
        answer.sampling.append(replace(sampling, max_tokens=max_tokens))
    return await answer.respond(request, body)
