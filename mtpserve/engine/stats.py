"""How a step changes the counters of one engine. What they mean is written in core/stats."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from mtpserve.core.plan import NOTHING_ALLOWED
from mtpserve.core.request import Finish, TokenEvent
from mtpserve.core.state.request_state import RequestState
from mtpserve.core.stats.engine_stats import STEP_TOKENS, EngineStats
from mtpserve.engine.steps import RequestEvent, ScheduledStep
from mtpserve.spec.counts import count_verification


def count(stats: EngineStats, req: RequestState, event: TokenEvent) -> None:
    """Add one request's share of one step. A prompt counts once, with its first token, however often it was
    recomputed."""
    stats.failed_requests_total += req.finish is Finish.ERROR and not is_own_fault(req)
    if not event.tokens:
        return
    stats.generation_tokens_total += len(event.tokens)
    if req.num_output_tokens == len(event.tokens):
        stats.prompt_tokens_total += req.num_prompt_tokens
        stats.cached_prompt_tokens_total += req.cache.num_cached_tokens
    if event.proposal.tokens:
        count_verification(stats, event.proposal, event.num_accepted_tokens, len(event.tokens))


def is_own_fault(req: RequestState) -> bool:
    """True if its constraints excluded every token: no failure that an operator could mend."""
    return (req.error or "").startswith(NOTHING_ALLOWED)


def count_step(stats: EngineStats, step: ScheduledStep | None, events: Sequence[RequestEvent]) -> None:
    """Add one step's tokens: those of prompts that it computed, and those that it generated; none that it
    rejected. None: it failed."""
    tokens = (
        sum(span.num_tokens for span in step.plan.spans)
        + sum(event.num_accepted_tokens for _, event in events)
        if step
        else 0
    )
    if tokens:
        stats.step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        stats.step_tokens_total += tokens
