"""The counters of one engine, and what a step yielded for a request as an event. What both mean is written in
core/request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from mtpserve.core.request import Finish, FirstTokenTimes, TokenEvent
from mtpserve.core.stats.engine_stats import STEP_TOKENS, EngineStats
from mtpserve.engine.steps import RequestOutput, ScheduledStep
from mtpserve.spec.counts import count_verification


def count(stats: EngineStats, outcome: RequestOutput) -> None:
    """Add one request's share of one step. A prompt counts once, with its first token, however often it was
    recomputed."""
    req = outcome.req
    stats.failed_requests_total += req.finish is Finish.ERROR
    if not outcome.tokens:
        return
    stats.generation_tokens_total += len(outcome.tokens)
    if req.num_output_tokens == len(outcome.tokens):
        stats.prompt_tokens_total += req.num_prompt_tokens
        stats.cached_prompt_tokens_total += req.cache.num_cached_tokens
    if outcome.proposal.tokens:
        count_verification(stats, outcome.proposal, outcome.num_accepted_tokens, len(outcome.tokens))


def count_step(stats: EngineStats, planned: ScheduledStep | None, outcomes: Sequence[RequestOutput]) -> None:
    """Add one step's tokens: those of prompts that it computed, and those that it generated; none that it
    rejected. None: it failed."""
    tokens = (
        sum(span.num_tokens for span in planned.plan.spans)
        + sum(outcome.num_accepted_tokens for outcome in outcomes)
        if planned
        else 0
    )
    if tokens:
        stats.step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        stats.step_tokens_total += tokens


def event_of(outcome: RequestOutput, now: float) -> TokenEvent:
    """`now` is perf_counter's."""
    req = outcome.req
    times = None
    if outcome.tokens and req.num_output_tokens == len(outcome.tokens) and req.queue.start_time is not None:
        times = FirstTokenTimes(req.queue.start_time - req.queue.arrival_time, now - req.queue.start_time)
    return TokenEvent(
        req.id, outcome.tokens, outcome.num_accepted_tokens, outcome.proposal, req.finish, req.error,
        outcome.logprobs,
        outcome.prompt_logprobs, times, 0 if times is None else req.cache.num_cached_tokens, req.cache.kv_offer,
    )  # fmt: skip
