"""The last ten minutes, a sample every two seconds, kept by the server: charts survive a reload of the page
that draws them.

Samples are differences of the engine's counters, and of the counts of the latencies' histograms. Where no
task takes them (an app in another server), they are taken when somebody asks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic

from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.server.http.rendering import Rendered
from mtpserve.server.observe.histogram import LoopHistogram
from mtpserve.server.observe.observed import cached_share
from mtpserve.server.observe.percentiles import Latency, percentiles

EVERY_S = 2.0
KEPT_S = 600.0
RECENT_S = 300.0  # the window of recent latencies
EARLY_S = 0.5  # a sample that is asked for is taken so much before its time

Counts = dict[str, tuple[int, ...]]  # a histogram's, by its name


class HistoryObject(Rendered):
    """Columns: element i of each is sample i, the oldest first. Rates are of the time since the sample
    before; null: nothing to say, since nothing was verified, cached or decoded in that time."""

    interval_s: float
    kept_s: float
    now: float  # seconds since the server began, as all of `at`
    at: list[float]
    tokens_per_second: list[float]
    running: list[int]
    waiting: list[int]
    pages_used: list[int]
    pages_total: list[int]
    accept_length: list[float | None]  # tokens per verification
    cached_share: list[float | None]  # share of prompt tokens
    depth: list[float | None]  # mean of the steps with decoding requests


@dataclass(frozen=True, slots=True)
class Sample:
    at: float  # seconds since the server began
    tokens_per_second: float
    running: int
    waiting: int
    pages_used: int
    pages_total: int
    accept_length: float | None
    cached_share: float | None
    depth: float | None
    latencies: Counts


def mean_depth(now: EngineStats, before: EngineStats) -> float | None:
    """Mean depth of the steps since `before`; None: there were none."""
    earlier = before.steps_per_depth + [0] * (len(now.steps_per_depth) - len(before.steps_per_depth))
    steps = [count - then for count, then in zip(now.steps_per_depth, earlier, strict=True)]
    return sum(depth * count for depth, count in enumerate(steps)) / sum(steps) if sum(steps) else None


class RecentHistory:
    """A ring of samples. Reading it changes nothing for other readers."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        latencies: Mapping[str, LoopHistogram],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._stats, self._latencies, self._clock, self._began = stats, latencies, clock, clock()
        self._samples: deque[Sample] = deque(maxlen=round(KEPT_S / EVERY_S) + 1)
        self._before, self._last_sample = EngineStats(), 0.0
        self._started: Counts = {
            name: (0,) * (len(histogram.bounds) + 1) for name, histogram in latencies.items()
        }

    def sample(self) -> None:
        """Takes one, if the last is old enough."""
        now = self._now()
        seconds = now - self._last_sample
        if seconds < EVERY_S - EARLY_S:
            return
        stats, before = self._stats(), self._before
        self._samples.append(
            Sample(
                now,
                (stats.generation_tokens_total - before.generation_tokens_total) / seconds,
                stats.running,
                stats.waiting,
                stats.pages_used,
                stats.pages_total,
                stats.accept_length(before),
                cached_share(stats, before),
                mean_depth(stats, before),
                self._counts(),
            )
        )
        # The lists are the engine's own where it is in this process: they go on counting.
        self._before, self._last_sample = replace(stats, steps_per_depth=list(stats.steps_per_depth)), now

    async def keep(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.sample()

    def since(self, at: float) -> HistoryObject:
        """The samples after that time."""
        last = [sample for sample in self._samples if sample.at > at]
        return HistoryObject(
            EVERY_S,
            KEPT_S,
            self._now(),
            [sample.at for sample in last],
            [sample.tokens_per_second for sample in last],
            [sample.running for sample in last],
            [sample.waiting for sample in last],
            [sample.pages_used for sample in last],
            [sample.pages_total for sample in last],
            [sample.accept_length for sample in last],
            [sample.cached_share for sample in last],
            [sample.depth for sample in last],
        )

    def latencies(self) -> dict[str, Latency]:
        """Since the start, and since the youngest sample that is RECENT_S old, if there is one."""
        now, due = self._counts(), self._now() - RECENT_S
        then = next(
            (sample.latencies for sample in reversed(self._samples) if sample.at <= due), self._started
        )
        by_name = {}
        for name, histogram in self._latencies.items():
            recent = [count - earlier for count, earlier in zip(now[name], then[name], strict=True)]
            by_name[name] = Latency(
                percentiles(histogram.bounds, now[name]), percentiles(histogram.bounds, recent)
            )
        return by_name

    def _now(self) -> float:
        return self._clock() - self._began

    def _counts(self) -> Counts:
        return {name: histogram.counts() for name, histogram in self._latencies.items()}
