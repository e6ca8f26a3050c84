"""The counters of one engine, and what a step yielded for a request as an event. What both mean is written in
core/request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from mtpserve.core.request import Finish, FirstTokenTimes, TokenEvent
from mtpserve.core.stats.engine_stats import STEP_TOKENS, EngineStats
from mtpserve.engine.steps import RequestOutput, ScheduledStep
from mtpserve.spec.counts import count_verification


def count(stats: EngineStats, output: RequestOutput) -> None:
    """Add one request's share of one step. A prompt counts once, with its first token, however often it was
    recomputed."""
    req = output.req
    stats.failed_requests_total += req.finish is Finish.ERROR
    if not output.tokens:
        return
    stats.generation_tokens_total += len(output.tokens)
    if req.num_output_tokens == len(output.tokens):
        stats.prompt_tokens_total += req.num_prompt_tokens
        stats.cached_prompt_tokens_total += req.cache.num_cached_tokens
    if output.proposal.tokens:
        count_verification(stats, output.proposal, output.num_accepted_tokens, len(output.tokens))


def count_step(stats: EngineStats, step: ScheduledStep | None, outputs: Sequence[RequestOutput]) -> None:
    """Add one step's tokens: those of prompts that it computed, and those that it generated; none that it
    rejected. None: it failed."""
    tokens = (
        sum(span.num_tokens for span in step.plan.spans)
        + sum(output.num_accepted_tokens for output in outputs)
        if step
        else 0
    )
    if tokens:
        stats.step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        stats.step_tokens_total += tokens


def event_of(output: RequestOutput, now: float) -> TokenEvent:
    """`now` is perf_counter's."""
    req = output.req
    times = None
    if output.tokens and req.num_output_tokens == len(output.tokens) and req.queue.start_time is not None:
        times = FirstTokenTimes(req.queue.start_time - req.queue.arrival_time, now - req.queue.start_time)
    return TokenEvent(
        req.id, output.tokens, output.num_accepted_tokens, output.proposal, req.finish, req.error,
        output.logprobs, output.prompt_logprobs, times,
        0 if times is None else req.cache.num_cached_tokens, req.cache.kv_offer,
    )  # fmt: skip
