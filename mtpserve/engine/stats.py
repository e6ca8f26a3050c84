"""The counters of one engine, and what a step yielded for a request as an event. What both mean is written in core/request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from mtpserve.core.request import STEP_TOKENS, EngineStats, Finish, FirstTokenTimes, TokenEvent
from mtpserve.engine.steps import Outcome, Planned
from mtpserve.spec.counts import count_verification


def count(stats: EngineStats, outcome: Outcome) -> None:
    """Add one request's share of one step. A prompt counts once, with its first token, however often it was recomputed."""
    seq = outcome.seq
    stats.failed_requests_total += seq.finish is Finish.ERROR
    if not outcome.tokens:
        return
    stats.generation_tokens_total += len(outcome.tokens)
    if seq.output_len == len(outcome.tokens):
        stats.prompt_tokens_total += seq.prompt_len
        stats.cached_prompt_tokens_total += seq.cached
    if outcome.proposal.tokens:
        count_verification(stats, outcome.proposal, outcome.accepted, len(outcome.tokens))


def count_step(stats: EngineStats, planned: Planned | None, outcomes: Sequence[Outcome]) -> None:
    """Add one step's tokens: those of prompts that it computed, and those that it generated; none that it rejected. None: it failed."""
    tokens = sum(span.length for span in planned.plan.spans) + sum(outcome.accepted for outcome in outcomes) if planned else 0
    if tokens:
        stats.step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        stats.step_tokens_total += tokens


def event_of(outcome: Outcome, now: float) -> TokenEvent:
    """`now` is perf_counter's."""
    seq = outcome.seq
    times = None
    if outcome.tokens and seq.output_len == len(outcome.tokens) and seq.seated is not None:
        times = FirstTokenTimes(seq.seated - seq.arrived, now - seq.seated)
    return TokenEvent(
        seq.id, outcome.tokens, outcome.accepted, outcome.proposal, seq.finish, seq.error, outcome.logprobs, outcome.prompt_logprobs, times,
        0 if times is None else seq.cached, seq.offer,
    )  # fmt: skip
