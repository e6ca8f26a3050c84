"""Times at which requests are sent. They are drawn in advance, so that a slow server does not slow down its
clients."""

from __future__ import annotations

import math
from random import Random


def arrival_times(number: int, rate: float, burstiness: float, random: Random) -> tuple[float, ...]:
    """Seconds after the start, rising. The gaps are gamma distributed with the mean 1 / rate: burstiness 1 is
    a Poisson process, below it they come in bursts, above it more evenly. The last time is number / rate,
    whatever was drawn (as in vLLM's client): the rate of a short run is then the one that was asked for. An
    infinite rate: all at 0."""
    if math.isinf(rate):
        return (0.0,) * number
    gaps = [random.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(number)]
    total = math.fsum(gaps)
    scale = number / rate / total if total else 1.0
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return tuple(times)
