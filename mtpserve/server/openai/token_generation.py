"""POST /inference/v1/generate, vLLM's route for trainers: token ids in, token ids out, no text."""

from __future__ import annotations

import uuid
from dataclasses import replace
from time import perf_counter
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.request import TokenLogprob
from mtpserve.server.chat.bodies import CHOICES, CompletionRequest, SamplingFields
from mtpserve.server.chat.generation import Choice, Generation, requests_of
from mtpserve.server.chat.service import Served
from mtpserve.server.http.errors import Unsupported, renamed
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.http.sse import unless_gone
from mtpserve.server.openai.completions import DEFAULT_MAX_TOKENS
from mtpserve.server.openai.logprobs import ById, chat_logprobs, prompt_scores
from mtpserve.server.openai.objects import ChatLogprobs, PromptLogprobs
from mtpserve.server.schema.base import RequestId, Salted, Tokens
from mtpserve.server.schema.shapes import PROMPT, SAMPLING, Schema

OUTER = ("model", "priority", "request_id", "cache_salt", "extra_key")


class TokenSampling(SamplingFields):
    """vLLM's `SamplingParams`, under the names that completions have, too."""

    column = "completions"
    shapes: ClassVar[dict[str, Schema]] = {"n": CHOICES, "max_tokens": SAMPLING["max_tokens"]}

    n: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None


class TokenRequest(Salted):
    shapes: ClassVar[dict[str, Schema]] = {"token_ids": PROMPT, "stream": {"enum": [None, False]}}

    token_ids: Tokens
    sampling_params: TokenSampling
    model: str | None = None
    request_id: RequestId | None = None
    priority: int | None = None
    # vLLM's fields that ask for what this route does not do
    stream: bool | None = None
    features: None = None
    kv_transfer_params: None = None

    def completion(self) -> CompletionRequest:
        """The same as a request for a completion. Raises InvalidRequest."""
        if self.stream:
            raise Unsupported("stream is not supported by this route: leave it out", "stream")
        outer = {name: value for name in OUTER if (value := getattr(self, name)) is not None}
        body = CompletionRequest.model_validate(
            {"prompt": self.token_ids, **self.sampling_params.model_dump(exclude_none=True), **outer}
        )
        body.check()
        return body


class TokenChoice(Rendered, kw_only=True):
    """Tokens in `logprobs` are named by their ids."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    routed_experts: str | None = None  # with --enable-return-routed-experts: a .npy file in base64
    finish_reason: str | None


class TokenAnswer(Rendered, kw_only=True):
    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: PromptLogprobs | None = None


async def generate_tokens(request: Request, service: Served, body: TokenRequest) -> Response:
    """Continue a prompt of token ids, by vLLM's API for trainers."""
    arrival = perf_counter()
    service.admit(body.model)
    with renamed({"prompt": "token_ids"}):
        completion = body.completion()
        sampling = completion.sampling(service.tokenizer.defaults, completion.max_tokens)
        service.check_sampling(sampling)
        context, ids = service.client.card.context_length, body.token_ids
        service.check_ids(ids[:context], "prompt")
        service.check_length(ids, sampling.max_tokens, "prompt")
    sizes = service.client.card.experts
    sampling = replace(sampling, return_routed_experts=sizes is not None)
    spelling, id = await service.spelling(sampling), body.request_id or uuid.uuid4().hex
    limit = sampling.max_tokens or min(DEFAULT_MAX_TOKENS, context - len(ids))
    requests = requests_of(
        service,
        spelling,
        id,
        ids,
        replace(sampling, max_tokens=limit),
        completion.choices,
        salt=completion.salt,
    )
    choices = [Choice(service, choice_request) for choice_request in requests]
    generation = Generation(service, choices, arrival, None, False)
    scores: list[list[TokenLogprob]] = [[] for _ in choices]
    scored: list[list[TokenLogprob]] = [[] for _ in choices]

    async def run() -> TokenAnswer:
        async for steps in generation.stream():
            for step in map(generation.add, steps):
                scores[step.index] += step.logprobs or []
                scored[step.index] += step.prompt_logprobs or []
        top, names = sampling.logprobs, ById(service.tokenizer)
        return TokenAnswer(
            request_id=id,
            choices=[
                TokenChoice(
                    index=index,
                    token_ids=choice.tokens,
                    logprobs=None if top is None else chat_logprobs(names, choice.tokens, scores[index], top),
                    routed_experts=None
                    if sizes is None
                    else choice.experts.npy(sizes, len(ids) + len(choice.tokens)),
                    finish_reason=choice.finish,
                )
                for index, choice in enumerate(choices)
            ],
            prompt_logprobs=None
            if sampling.prompt_logprobs is None
            else prompt_scores(service.tokenizer, ids, scored[0], sampling.prompt_logprobs),
        )

    return JSON(await unless_gone(request.receive, run()))
