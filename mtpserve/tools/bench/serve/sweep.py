"""Runs at several loads, and the one beyond which more load costs more than it brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtpserve.tools.bench.exported import ServerCounters
from mtpserve.tools.bench.serve.measured import Measured
from mtpserve.tools.bench.serve.summary import Summary


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep. `load`: requests per second, or requests at once; infinite: all at once."""

    load: float
    summary: Summary
    server: ServerCounters | None = None
    requests: tuple[Measured, ...] = ()


def power(summary: Summary) -> float:
    """Kleinrock's: output tokens per second per second of mean latency. 0 where nothing was completed."""
    return (
        summary.output_throughput / summary.e2e.mean
        if summary.e2e is not None and summary.e2e.mean > 0
        else 0.0
    )


def knee(points: Sequence[Point]) -> int | None:
    """The point with the largest power (L. Kleinrock, "Power and deterministic rules of thumb for
    probabilistic problems in computer communications", ICC 1979): up to there throughput grows by a larger
    factor than latency, beyond it by a smaller one. None: fewer than three points, or no point completed
    anything."""
    powers = [power(point.summary) for point in points]
    if len(points) < 3 or not max(powers):
        return None
    return max(range(len(points)), key=lambda i: powers[i])
