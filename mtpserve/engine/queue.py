"""Who is served next: the requests that wait, in the order of arrival, and the order in which the policy would admit them.

    fcfs       in the order of arrival
    priority   lower priorities first, then in the order of arrival
    lpm        the longest matching prefix first: what is cached is used before it is evicted

Under lpm those that have run before and lost their pages come first, and a request is overtaken by a bounded number of later ones: after
that it is served first. Nobody starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from mtpserve.config import SchedulerConfig
from mtpserve.core.sequence import Sequence

RANK = attrgetter("rank")
LOOKS = 128  # requests whose prefixes are compared in a step, the oldest ones
LONG = 2  # steps that a prompt fills which is called long, unless the user says otherwise
EXPECTED = 0.1  # share of what requests may produce that they are expected to produce
MOST_OVERTAKEN = 64  # times, before nobody else may


@dataclass(frozen=True, slots=True)
class ServiceOrder:
    """How requests share what a step computes. The defaults set no limits."""

    longest_prefix: bool = False  # the policy lpm
    long_prompt: int | None = None  # with more tokens than this to compute a prompt is long; None: none is
    long_rows: int = 1 << 30  # that each long prompt gets in a step at most, while others live
    max_long: int = 1  # long prompts that get rows in one step
    reserved: float = 0.0  # share of the tokens that running requests may still produce for which admission leaves pages

    @staticmethod
    def of(config: SchedulerConfig, long_rows: int | None) -> ServiceOrder:
        """`long_rows`: unless the user gives a number for both, rows and length; None: as many as fit."""
        threshold, budget = config.long_prefill_token_threshold, config.step_tokens
        return ServiceOrder(
            config.scheduling_policy == "lpm",
            LONG * budget if threshold is None else threshold,
            threshold or long_rows or budget,
            config.max_long_partial_prefills,
            EXPECTED * config.schedule_conservativeness,
        )


UNLIMITED = ServiceOrder()


class Line:
    """`seqs` is always in the order of their ranks."""

    def __init__(self, longest_prefix: bool = False) -> None:
        self.seqs: list[Sequence] = []
        self._longest_prefix = longest_prefix

    def add(self, seq: Sequence) -> None:
        insort(self.seqs, seq, key=RANK)

    def remove(self, seq: Sequence) -> None:
        place = bisect_left(self.seqs, seq.rank, key=RANK)  # ranks are unique
        assert self.seqs[place] is seq
        del self.seqs[place]

    def seat(self, seq: Sequence) -> None:
        """It is served now; under lpm it may have overtaken others."""
        if self._longest_prefix:
            for other in self.seqs[:LOOKS]:
                if other is seq:
                    break
                other.overtaken += 1
        self.remove(seq)

    def order(self, matched: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """`matched`: tokens of a request that are in the cache. The line may change while this is read."""
        if not self._longest_prefix:
            yield from self.seqs[:LOOKS]
            return
        seqs = list(self.seqs)
        first = [seq for seq in seqs if seq.ran or seq.overtaken >= MOST_OVERTAKEN]
        yield from first
        named = {seq.id for seq in first}
        others = [seq for seq in seqs[:LOOKS] if seq.id not in named]
        yield from sorted(others, key=matched, reverse=True)  # stable: of equal ones the oldest
        yield from (seq for seq in seqs[LOOKS:] if seq.id not in named)
