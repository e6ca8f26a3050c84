"""The counters of one engine. What they mean is written at core.request.EngineStats; the server reports them."""

from __future__ import annotations

from mtpserve.core.request import EngineStats, Finish
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
