"""A step as the engine sees it: what was planned for whom, and what it gave each request."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from mtpserve.core.plan import StepPlan
from mtpserve.core.request import Proposal, TokenLogprob
from mtpserve.core.state.request_state import RequestState


class ScheduledStep(NamedTuple):
    """A plan, and whose its spans are: by the time of the result, their seats may be others'."""

    plan: StepPlan
    reqs: list[RequestState]


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step gave one request, surplus after a stop already dropped. `req.finish` says whether it goes
    on."""

    req: RequestState
    tokens: list[int]
    num_accepted_tokens: int = 0  # accepted ones: the first of `tokens`
    proposal: Proposal = Proposal()  # what the step verified
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
