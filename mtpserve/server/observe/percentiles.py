"""Percentiles of latencies from a histogram's counts.

A histogram knows of a value only between which two bounds it lies. Inside of that bucket values are taken as
evenly spread, as Prometheus' `histogram_quantile` does; the true percentile lies between the bucket's bounds,
which are reported with it.

bounds    0 ─────── 0.1 ─────── 0.2 ─────── 0.4 ────── ∞
counts        6      │     3     │     1     │    0
                     └─────▲─────┘
                       p75 of 10: the 7.5th value, half-way up the second bucket's three
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from mtpserve.server.http.rendering import Rendered

SHARES = (0.5, 0.9, 0.99)


class Percentile(Rendered):
    """A latency in seconds. Above the last bound only that bound is known: `seconds` is the bound, and
    `high` is null."""

    seconds: float
    low: float  # the true value is not below this,
    high: float | None  # and not above this


class Percentiles(Rendered):
    """Percentiles of `count` values; null if there are none."""

    count: int
    p50: Percentile | None
    p90: Percentile | None
    p99: Percentile | None


class Latency(Rendered):
    since_start: Percentiles
    recent: Percentiles


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> Percentile | None:
    """`bounds`: the upper ones, rising; `counts`: of each bucket, and one more of what is above the last;
    `share` in (0, 1]."""
    sums = list(accumulate(counts))
    rank = share * sums[-1]
    if rank == 0:
        return None
    at = bisect_left(sums, rank)
    low = bounds[at - 1] if at else 0.0
    if at == len(bounds):
        return Percentile(low, low, None)
    inside = (rank - (sums[at] - counts[at])) / counts[at]
    return Percentile(low + inside * (bounds[at] - low), low, bounds[at])


def percentiles(bounds: Sequence[float], counts: Sequence[int]) -> Percentiles:
    return Percentiles(sum(counts), *(percentile(bounds, counts, share) for share in SHARES))
