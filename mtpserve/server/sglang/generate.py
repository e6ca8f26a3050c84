"""POST /generate as SGLang has it: a prompt's whole state in each answer, `text` growing from chunk to chunk
of a stream."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from mtpserve.core.request import Finish, TokenLogprob
from mtpserve.core.sampling import SamplingParams
from mtpserve.server.chat.generation import Choice, Generation, requests_of
from mtpserve.server.chat.service import Served, Service
from mtpserve.server.chat.steps.step_output import StepOutput
from mtpserve.server.http.errors import renamed
from mtpserve.server.http.rendering import JSON, Rendered, finite
from mtpserve.server.http.sse import EventStream, unless_gone
from mtpserve.server.sglang.generate_body import DEFAULT_MAX_TOKENS, NativeRequest, Wanted

RENAMED = {
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed",
    "logprobs": "top_logprobs_num",
    "structured_outputs": "structural_tag",
}  # fmt: skip


class FinishReason(Rendered):
    """`length` is of the type length, `matched` of the type stop."""

    type: str
    length: int | UnsetType = UNSET
    matched: int | str | UnsetType | None = UNSET


class TokenVersions(Rendered):
    """The output tokens from `start` up to `end` were chosen under these weights."""

    version: str
    start: int
    end: int


# a log-probability, a token, and its text where the request wants it
Triple = tuple[float | None, int, str | None]


class MetaInfo(Rendered, kw_only=True):
    """`spec_…` is there once anything was drafted; the log-probabilities come with `return_logprob`."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    weight_version: str  # of the last tokens
    weight_versions: list[TokenVersions]
    spec_verify_ct: int | UnsetType = UNSET
    spec_accept_length: float | UnsetType = UNSET
    spec_accept_rate: float | UnsetType = UNSET
    spec_num_correct_drafts: int | UnsetType = UNSET
    spec_num_proposed_drafts: int | UnsetType = UNSET
    spec_correct_drafts_histogram: list[int] | UnsetType = UNSET
    input_token_logprobs: list[Triple] | UnsetType = UNSET
    output_token_logprobs: list[Triple] | UnsetType = UNSET
    input_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    # with `finish_reason`: int32 in base64, [prompt and output but for the last token, layers, experts]
    routed_experts: str | UnsetType = UNSET


class Generated(Rendered):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET  # in the chunks of several


@dataclass(slots=True)
class NativeChoice:
    """One choice in SGLang's layout."""

    id: str
    choice: Choice
    prompt_options: Wanted
    texts: bool  # texts of tokens stand beside their log-probabilities
    arrival: float  # perf_counter's
    first_routed: int = 0  # the first token whose experts are answered
    scores: list[TokenLogprob] = field(default_factory=list)
    # a prompt's first token has none
    prompt_scores: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    proposed: int = 0
    correct: list[int] = field(default_factory=list)  # drafts accepted, one number for each verification

    def add(self, step: StepOutput) -> None:
        self.scores += step.logprobs or []
        self.prompt_scores += step.prompt_logprobs or []
        if step.proposal.tokens:
            self.proposed += len(step.proposal.tokens)
            self.correct.append(len(step.accepted_nodes))

    def object(self) -> Generated:
        versions = self.choice.weight_versions.spans(len(self.choice.tokens))
        meta = MetaInfo(
            id=self.id,
            finish_reason=None if self.choice.finish is None else self._reason(self.choice.finish),
            prompt_tokens=len(self.choice.request.prompt),
            completion_tokens=len(self.choice.tokens),
            cached_tokens=self.choice.cached_tokens,
            e2e_latency=perf_counter() - self.arrival,
            weight_version=self.choice.weight_version,
            weight_versions=[TokenVersions(*span) for span in versions],
        )
        self._add_speculation(meta)
        self._add_logprobs(meta)
        if self.choice.finish is not None:
            meta.routed_experts = self.choice.routed_experts(self.first_routed)
        return Generated(self.choice.text(), list(self.choice.tokens), meta)  # they go on growing

    def _reason(self, finish: Finish) -> FinishReason:
        if finish is Finish.LENGTH:
            return FinishReason("length", length=len(self.choice.tokens))
        if finish is Finish.STOP:
            return FinishReason("stop", matched=self.choice.matched_stop)
        return FinishReason(finish.value)

    def _add_speculation(self, meta: MetaInfo) -> None:
        """Adds the figures of verifications that had drafts; nothing if none had. Tokens of steps without
        drafts count in none of them."""
        if not self.correct:
            return
        meta.spec_verify_ct = len(self.correct)
        meta.spec_accept_length = (len(self.correct) + sum(self.correct)) / len(self.correct)
        meta.spec_accept_rate = sum(self.correct) / self.proposed
        meta.spec_num_correct_drafts = sum(self.correct)
        meta.spec_num_proposed_drafts = self.proposed
        meta.spec_correct_drafts_histogram = [
            self.correct.count(count) for count in range(max(self.correct) + 1)
        ]

    def _add_logprobs(self, meta: MetaInfo) -> None:
        prompt_options, prompt = self.prompt_options, self.choice.request.prompt
        if not prompt_options.logprobs:
            return
        start = prompt_options.scored_from if prompt_options.scores(prompt) else len(prompt)
        of_prompt = list(zip(prompt[start:], self.prompt_scores[start:], strict=False))
        of_output = list(zip(self.choice.tokens, self.scores, strict=False))
        meta.input_token_logprobs = [
            self._triple(token, None if score is None else score.logprob) for token, score in of_prompt
        ]
        meta.output_token_logprobs = [self._triple(token, score.logprob) for token, score in of_output]
        if top := prompt_options.top_logprobs:
            meta.input_top_logprobs = [self._top(score, top) for _, score in of_prompt]
            meta.output_top_logprobs = [self._top(score, top) for _, score in of_output]

    def _top(self, score: TokenLogprob | None, top: int) -> list[Triple] | None:
        return None if score is None else [self._triple(id, logprob) for id, logprob in score.top[:top]]

    def _triple(self, token: int, logprob: float | None) -> Triple:
        text = self.choice.service.tokenizer.token_text(token) if self.texts else None
        return None if logprob is None else finite(logprob), token, text


def params_of(service: Service, prompt_options: Wanted, body: NativeRequest) -> SamplingParams:
    """Raises InvalidRequest."""
    logprobs = prompt_options.top_logprobs if prompt_options.logprobs else None
    params = replace(
        prompt_options.sampling.params(service.tokenizer.defaults),
        logprobs=logprobs,
        priority=body.priority or 0,
        return_routed_experts=bool(body.return_routed_experts),
    )
    service.check_sampling(params)
    return params


async def choices_of(
    service: Service, body: NativeRequest, params: Sequence[SamplingParams], arrival: float
) -> list[NativeChoice]:
    """Returns one choice for each prompt and number, in this order. `params`: one for each prompt."""
    choices: list[NativeChoice] = []
    handover = service.handover(body)
    context = service.client.card.context_length
    for number, (prompt, sampling, prompt_options) in enumerate(
        zip(body.prompts, params, body.prompt_options(), strict=True)
    ):
        spelling, max_tokens = await service.spelling(sampling), sampling.max_tokens
        if isinstance(prompt, str):
            ids = await service.encode(prompt, body.field, special=True)
        else:
            ids = prompt
            service.check_ids(ids[:context], body.field)
        service.check_length(ids, max_tokens, body.field)
        limit = min(DEFAULT_MAX_TOKENS, context - len(ids)) if max_tokens is None else max_tokens
        one = replace(
            sampling,
            max_tokens=limit,
            prompt_logprobs=sampling.logprobs if prompt_options.scores(ids) else None,
        )
        rid = body.rid[number] if isinstance(body.rid, list) else body.rid
        id = rid or uuid.uuid4().hex
        id = f"{id}-{number}" if rid is not None and body.listed and not isinstance(body.rid, list) else id
        lora = body.lora_of(number, service.loras)
        requests = requests_of(service, spelling, id, ids, one, body.choices, salt=body.salt, lora=lora)
        scores_only, texts = prompt_options.sampling.scores_only, bool(body.return_text_in_logprobs)
        choices += [
            NativeChoice(
                id,
                Choice(service, handover.of(choice_request, number), scores_only=scores_only),
                prompt_options,
                texts,
                arrival,
                body.routed_experts_start_len or 0,
            )
            for choice_request in requests
        ]
    return choices


async def generate(request: Request, service: Served, body: NativeRequest) -> Response:
    """Complete one or several prompts, by SGLang's own API. The fields are SGLang's, and so are the
    answer and its `meta_info`."""
    arrival = perf_counter()
    service.check_alive()
    body.check()
    with renamed(RENAMED):
        params = [params_of(service, prompt_options, body) for prompt_options in body.prompt_options()]
        native_choices = await choices_of(service, body, params, arrival)
    generation = Generation(
        service, [native.choice for native in native_choices], arrival, body.timeout, bool(body.stream)
    )
    several = body.listed or body.choices > 1

    def add(step: StepOutput) -> NativeChoice:
        native = native_choices[step.index]
        native.add(generation.add(step))
        return native

    def chunk(step: StepOutput) -> Generated:
        generated = add(step).object()
        generated.index = step.index if several else UNSET
        return generated

    async def chunks() -> AsyncGenerator[list[Generated], None]:
        # The engine may refuse what the route could not see.
        with renamed(RENAMED):
            async with contextlib.aclosing(generation.stream()) as batches:
                async for steps in batches:
                    yield [chunk(step) for step in steps]

    async def answers() -> list[Generated]:
        async for steps in generation.stream():
            for step in steps:
                add(step)
        return [native.object() for native in native_choices]

    if body.stream:
        return EventStream(chunks(), service.server_config.sse_keep_alive_interval)
    with renamed(RENAMED):
        generated = await unless_gone(request.receive, answers())
    return JSON(generated if several else generated[0])
