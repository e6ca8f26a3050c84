"""POST /v1/completions: one or several prompts, as text or tokens, each continued. Chat templates play no part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.request import TokenLogprob
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.sequence import Finish
from mtpserve.server.openai.answer import Answer, Prompt
from mtpserve.server.openai.body import CompletionRequest
from mtpserve.server.openai.logprobs import TokenNames, completion_logprobs
from mtpserve.server.openai.objects import CompletionChoice, CompletionLogprobs, CompletionObject
from mtpserve.server.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionVoice:
    def count(self, tokens: Sequence[int]) -> int:
        return 0

    def deltas(self, text: str, last: bool) -> list[dict[str, Any]]:
        return [{"text": text}] if text else []

    def silent(self) -> dict[str, Any]:
        return {"text": ""}

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def finish(self, finish: Finish | None) -> str | None:
        return finish


class CompletionShape:
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"
    choice = CompletionChoice
    whole = CompletionObject
    one_prompt = False

    def voice(self) -> CompletionVoice:
        return CompletionVoice()

    def opening(self) -> dict[str, Any] | None:
        return None

    def logprobs(
        self, tokenizer: TokenNames, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offsets: list[int], top: int
    ) -> CompletionLogprobs:
        return completion_logprobs(tokenizer, tokens, scores, offsets, top)


async def prompts_of(service: Service, body: CompletionRequest, sampling: SamplingParams) -> list[Prompt]:
    context = service.client.card.context_length
    prompts = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            ids = await service.encode(prompt, "prompt", special=body.add_special_tokens is not False)
        else:
            ids = prompt
            service.check_ids(ids if body.truncate_prompt_tokens else ids[:context], "prompt")
        whole, ids = len(ids), service.truncated(ids, body.truncate_prompt_tokens, body.max_tokens)
        service.check_length(ids, body.max_tokens, "prompt")
        max_tokens = min(DEFAULT_MAX_TOKENS, context - len(ids)) if body.max_tokens is None else max(body.max_tokens, 1)
        echo = None
        if body.echo:  # a text as the client wrote it, not as it comes back from the tokenizer
            decode = service.tokenizer.decode
            echo = (
                prompt if isinstance(prompt, str) and len(ids) == whole else decode(ids, skip_special_tokens=sampling.skip_special_tokens)
            )
        prompts.append(Prompt(ids, replace(sampling, max_tokens=max_tokens), echo))
    return prompts


async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue one or several prompts, as OpenAI's completions."""
    arrival = perf_counter()
    service: Service = request.app.state.service
    service.admit(body.model)
    body.check()
    sampling = body.sampling(service.tokenizer.defaults, body.max_tokens or None)
    if body.echo and body.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    service.check_sampling(sampling)
    spelling = await service.spelling(sampling)
    prompts = await prompts_of(service, body, sampling)
    return await Answer(service, CompletionShape(), prompts, spelling, body, arrival, scores_only=body.max_tokens == 0).respond(request)
