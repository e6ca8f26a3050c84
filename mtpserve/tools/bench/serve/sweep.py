"""Runs at several loads, and the one beyond which more load costs more than it brings."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.exported import ServerCounters
from mtpserve.tools.bench.serve.measured import Measured
from mtpserve.tools.bench.serve.summary import Summary

LOADS = {"max-concurrency": "requests at once", "request-rate": "requests per second"}


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
    factor than latency, beyond it by a smaller one. None: it is at an end of the sweep, beyond which power
    may be larger, or there is none."""
    best = largest_power(points)
    return None if best in (None, 0, len(points) - 1) else best


def largest_power(points: Sequence[Point]) -> int | None:
    """None: fewer than three points, or no point completed anything."""
    powers = [power(point.summary) for point in points]
    if len(points) < 3 or not max(powers):
        return None
    return max(range(len(points)), key=lambda i: powers[i])


def sweep_of(options: Namespace) -> tuple[str | None, tuple[float, ...]]:
    """Returns the option that --sweep varies, and its values; None and one NaN without a sweep. Raises
    ConfigError."""
    if options.sweep is None:
        return None, (math.nan,)
    name, equals, values = options.sweep.partition("=")
    name, allowed = name.strip().replace("_", "-"), " or ".join(f"{load_name}=X,X,..." for load_name in LOADS)
    check(name in LOADS and bool(equals), "sweep", options.sweep, allowed)
    try:
        loads = tuple(float(value) for value in values.split(","))
    except ValueError:
        loads = ()
    are_integers = name == "request-rate" or all(load == int(load) for load in loads if math.isfinite(load))
    good = (
        bool(loads)
        and are_integers
        and all(load > 0 and (name == "request-rate" or load < math.inf) for load in loads)
    )
    check(
        good,
        "sweep",
        options.sweep,
        f"{allowed}, with {'whole ' if name == 'max-concurrency' else ''}numbers above 0",
    )
    if getattr(options, name.replace("-", "_")) not in (None, math.inf):
        raise ConfigError(f"--{name} is what --sweep {options.sweep} varies: give one of them")
    return name, loads
