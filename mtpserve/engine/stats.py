"""The counters of one engine, and what a step yielded for a request as an event. What both mean is written in core/request."""

from __future__ import annotations

from mtpserve.core.request import EngineStats, Finish, FirstTokenTimes, TokenEvent
from mtpserve.engine.scheduler import Outcome
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
