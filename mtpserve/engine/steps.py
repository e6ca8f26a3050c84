"""A step as the engine sees it: what was planned for whom, and what it gave each request."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from mtpserve.core.plan import StepPlan
from mtpserve.core.request import FirstTokenTimes, Proposal, TokenEvent, TokenLogprob
from mtpserve.core.state.request_state import RequestState

NO_PROPOSAL = Proposal()


class ScheduledStep(NamedTuple):
    """A plan, and whose its spans are: by the time of the result, their seats may be others'."""

    plan: StepPlan
    reqs: list[RequestState]


# What one step gave one request, surplus after a stop already dropped.
RequestEvent = tuple[RequestState, TokenEvent]


def event_of(
    req: RequestState,
    tokens: list[int],
    num_accepted_tokens: int = 0,
    proposal: Proposal = NO_PROPOSAL,
    logprobs: list[TokenLogprob] | None = None,
    prompt_logprobs: list[TokenLogprob] | None = None,
    routed_experts: list[bytes] | None = None,
) -> RequestEvent:
    """`tokens` were committed, the first `num_accepted_tokens` of them accepted proposals; the step verified
    `proposal`; `routed_experts`: of the last computed tokens. `req.finish` says whether the request goes
    on."""
    times, queue = None, req.queue
    if tokens and req.num_output_tokens == len(tokens) and queue.start_time is not None:
        times = FirstTokenTimes(queue.start_time - queue.arrival_time, perf_counter() - queue.start_time)
    return req, TokenEvent(
        req.id, tokens, num_accepted_tokens, proposal, req.finish, req.error, logprobs, prompt_logprobs,
        times, 0 if times is None else req.cache.num_cached_tokens, req.cache.kv_offer,
        (req.num_computed_tokens - len(routed_experts), routed_experts) if routed_experts else None,
    )  # fmt: skip
