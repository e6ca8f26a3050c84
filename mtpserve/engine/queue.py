"""Who is served next: the requests that wait, in the order of arrival, and the order in which the policy
would admit them.

    fcfs       in the order of arrival
    priority   lower priorities first, then in the order of arrival
    lpm        the longest matching prefix first: what is cached is used before it is evicted

Under lpm those that have run before and lost their pages come first, and a request is overtaken by a bounded
number of later ones: after that it is served first. Nobody starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from mtpserve.config import SchedulerConfig
from mtpserve.core.state.request_state import RequestState

QUEUE_KEY = attrgetter("queue.key")
MAX_PREFIX_LOOKUPS = 128  # requests whose prefixes are compared in a step, the oldest ones
LONG_PROMPT_STEPS = 2  # steps that a prompt fills which is called long, unless the user says otherwise
EXPECTED_OUTPUT_FRACTION = 0.1  # share of what requests may produce that they are expected to produce
MAX_OVERTAKEN = 64  # times, before nobody else may


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """How requests share what a step computes. The defaults set no limits."""

    longest_prefix: bool = False  # the policy lpm
    long_prompt_tokens: int | None = None  # a prompt is long with more to compute; None: none is
    long_chunk_tokens: int = 1 << 30  # that each long prompt gets in a step at most, while others live
    max_long_prompts: int = 1  # long prompts that get rows in one step
    # share of the tokens that running requests may still produce for which admission leaves pages
    reserved_fraction: float = 0.0

    @staticmethod
    def of(config: SchedulerConfig, long_rows: int | None) -> SchedulingPolicy:
        """`long_chunk_tokens`: unless the user gives a number for both, rows and length; None: as many as
        fit."""
        threshold, budget = config.long_prefill_token_threshold, config.step_tokens
        return SchedulingPolicy(
            config.scheduling_policy == "lpm",
            LONG_PROMPT_STEPS * budget if threshold is None else threshold,
            threshold or long_rows or budget,
            config.max_long_partial_prefills,
            EXPECTED_OUTPUT_FRACTION * config.schedule_conservativeness,
        )


UNLIMITED = SchedulingPolicy()


class WaitingQueue:
    """`reqs` is always in the order of their ranks."""

    def __init__(self, longest_prefix: bool = False) -> None:
        self.reqs: list[RequestState] = []
        self._longest_prefix = longest_prefix

    def add(self, req: RequestState) -> None:
        insort(self.reqs, req, key=QUEUE_KEY)

    def remove(self, req: RequestState) -> None:
        index = bisect_left(self.reqs, req.queue.key, key=QUEUE_KEY)  # ranks are unique
        assert self.reqs[index] is req
        del self.reqs[index]

    def admit(self, req: RequestState) -> None:
        """It is served now; under lpm it may have overtaken others."""
        if self._longest_prefix:
            for other in self.reqs[:MAX_PREFIX_LOOKUPS]:
                if other is req:
                    break
                other.queue.num_overtaken += 1
        self.remove(req)

    def order(self, matched: Callable[[RequestState], int]) -> Iterator[RequestState]:
        """`matched`: tokens of a request that are in the cache. The line may change while this is read."""
        if not self._longest_prefix:
            yield from self.reqs[:MAX_PREFIX_LOOKUPS]
            return
        reqs = list(self.reqs)
        first = [req for req in reqs if req.queue.has_run or req.queue.num_overtaken >= MAX_OVERTAKEN]
        yield from first
        named = {req.id for req in first}
        others = [req for req in reqs[:MAX_PREFIX_LOOKUPS] if req.id not in named]
        yield from sorted(others, key=matched, reverse=True)  # stable: of equal ones the oldest
        yield from (req for req in reqs[MAX_PREFIX_LOOKUPS:] if req.id not in named)
