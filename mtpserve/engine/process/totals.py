"""Statistics of several engines as those of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from mtpserve.core.request import DraftHealth, EngineStats

WORST = ("suspended", "weak", "unmeasured", "ok", "off")
GAUGES = (
    "running", "waiting", "waiting_for_pages", "pages_used", "pages_cached", "pages_total", "tier_pages",
    "tier_pages_total",
    "leased_pages", "depths", "draft_health",
)  # fmt: skip


def total(all_stats: Seq[EngineStats]) -> EngineStats:
    """Counters and gauges are added; the depths are the first engine's that has any, the draft model's health
    is the worst one's."""
    totals = EngineStats(depths=next((stats.depths for stats in all_stats if stats.depths is not None), None))
    for one in fields(EngineStats):
        if one.name not in ("depths", "draft_health"):
            setattr(totals, one.name, summed([getattr(stats, one.name) for stats in all_stats]))
    worst = min(
        (stats.draft_health for stats in all_stats),
        key=lambda health: WORST.index(health.state),
        default=DraftHealth(),
    )
    totals.draft_health = replace(
        worst, faults_total=sum(stats.draft_health.faults_total for stats in all_stats)
    )
    return totals


def counters(stats: EngineStats) -> EngineStats:
    """What an engine that is gone has counted, without what it was doing."""
    fresh = EngineStats()
    return replace(stats, **{name: getattr(fresh, name) for name in GAUGES})


def summed(values: list[Any]) -> Any:
    """Numbers; lists place by place, dictionaries key by key."""
    if values and isinstance(values[0], dict):
        keys: Iterable[str] = dict.fromkeys(key for value in values for key in value)
        return {key: sum(value.get(key, 0) for value in values) for key in keys}
    if values and isinstance(values[0], list):
        return [sum(place) for place in zip_longest(*values, fillvalue=0)]
    return sum(values)
