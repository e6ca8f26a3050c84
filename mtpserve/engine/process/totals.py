"""Statistics of several engines as those of one. How each field is combined is said where it is declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtpserve.core.stats.engine_stats import METRICS, EngineStats


def total(all_stats: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(
        **{
            name: metric.total([getattr(stats, name) for stats in all_stats])
            for name, metric in METRICS.items()
        }
    )


def counters(stats: EngineStats) -> EngineStats:
    """What an engine that is gone has counted, without what it was doing."""
    fresh = EngineStats()
    gauges = [name for name, metric in METRICS.items() if metric.kind in ("gauge", "state")]
    return replace(stats, **{name: getattr(fresh, name) for name in gauges})
