"""What the counters did lately: rates over the last seconds, for gauges that say how it goes now.

Counters of their own answer that better, by PromQL's `rate`; these gauges are for whoever looks without Prometheus, and for boards
that were made for peers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from mtpserve.core.request import EngineStats

WINDOW_S = 10.0
SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    tokens: int
    drafts: int
    draft_tokens: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Of speculation None until the first draft was verified; while nothing is verified they stay what they were."""

    tokens_per_second: float
    accept_length: float | None
    accept_rate: float | None


class Recent:
    """A window of at least WINDOW_S seconds that ends now. Many may ask: a question changes nobody else's answer.

    samples   | s0 | s1 | s2 | … | now        s0: the youngest that is at least WINDOW_S old, or the first of all
              └──── the window ────┘
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._samples = deque([Sample(clock(), 0, 0, 0, 0)])
        self._length: float | None = None
        self._rate: float | None = None

    def rates(self, stats: EngineStats) -> Rates:
        now = Sample(
            self._clock(), stats.generation_tokens_total, stats.drafts_total, stats.draft_tokens_total, stats.accepted_tokens_total
        )
        samples = self._samples
        while len(samples) > 1 and samples[1].at <= now.at - WINDOW_S:
            samples.popleft()
        then = samples[0]
        if now.at - samples[-1].at >= SAMPLE_S:
            samples.append(now)
        if now.drafts > then.drafts:
            self._length = 1 + (now.accepted - then.accepted) / (now.drafts - then.drafts)
            self._rate = (now.accepted - then.accepted) / (now.draft_tokens - then.draft_tokens)
        seconds = now.at - then.at
        return Rates((now.tokens - then.tokens) / seconds if seconds > 0 else 0.0, self._length, self._rate)
