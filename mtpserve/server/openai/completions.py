"""POST /v1/completions: one or several prompts, as text or tokens, each continued. Chat templates play no
part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.request import TokenLogprob
from mtpserve.server.chat.bodies import CompletionRequest
from mtpserve.server.chat.generation import Choice, Generation, requests_of
from mtpserve.server.chat.service import Served
from mtpserve.server.openai.answer import Answer, ChoiceWriter, Fields, id_of
from mtpserve.server.openai.logprobs import completion_logprobs
from mtpserve.server.openai.objects import CompletionChoice, CompletionLogprobs, CompletionObject

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(slots=True)
class CompletionWriter(ChoiceWriter):
    prefix = "cmpl"
    chunk_object = "text_completion"
    one_prompt = False
    empty_delta: ClassVar[Fields] = {"text": ""}
    choice_type = CompletionChoice
    answer_type = CompletionObject

    def output(self) -> Fields:
        return {"text": (self.echo or "") + self.choice.text()}

    def deltas(self, echo: str) -> list[Fields]:
        text = echo + "".join(block.take() for block in self.choice.blocks)
        return [{"text": text}] if text else []

    def logprobs(
        self, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offsets: list[int], top: int
    ) -> CompletionLogprobs:
        return completion_logprobs(self.names, tokens, scores, offsets, top)


async def completions(request: Request, service: Served, body: CompletionRequest) -> Response:
    """Complete one or several prompts, by OpenAI's completions API."""
    arrival = perf_counter()
    service.admit(body.model)
    body.check()
    sampling = body.sampling(service.tokenizer.defaults, body.max_tokens or None)
    if body.echo and body.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    service.check_sampling(sampling)
    spelling, id = await service.spelling(sampling), id_of(body, CompletionWriter)
    context, skip = service.client.card.context_length, sampling.skip_special_tokens
    choices: list[Choice] = []
    echoes: list[str | None] = []
    handover = service.handover(body)
    for number, prompt in enumerate(body.prompts):
        if isinstance(prompt, str):
            ids = await service.encode(prompt, "prompt", special=body.add_special_tokens is not False)
        else:
            ids = prompt
            service.check_ids(ids if body.truncate_prompt_tokens else ids[:context], "prompt")
        whole, ids = (
            len(ids),
            service.truncate(ids, body.truncate_prompt_tokens, body.max_tokens, body.keeps_first),
        )
        service.check_length(ids, body.max_tokens, "prompt")
        max_tokens = (
            min(DEFAULT_MAX_TOKENS, context - len(ids))
            if body.max_tokens is None
            else max(body.max_tokens, 1)
        )
        echo = None
        if body.echo:  # a text as the client wrote it, not as it comes back from the tokenizer
            written = isinstance(prompt, str) and len(ids) == whole
            by_id = not isinstance(prompt, str)  # then special tokens are the client's own
            echo = (
                str(prompt)
                if written
                else service.tokenizer.decode(ids, skip_special_tokens=skip and not by_id)
            )
        params = replace(sampling, max_tokens=max_tokens)
        requests = requests_of(
            service, spelling, id, ids, params, body.generated, first=len(choices), salt=body.salt,
            lora=service.lora_of(body.model),
        )  # fmt: skip
        choices += [
            Choice(service, handover.of(choice_request, number), scores_only=body.max_tokens == 0)
            for choice_request in requests
        ]
        echoes += [echo] * body.generated
    generation = Generation(service, choices, arrival, body.timeout, bool(body.stream))
    return await Answer(id, body, generation, CompletionWriter, echoes).respond(request)
