"""The prefix cache's tiers below the device, in the engine's statistics: what each holds, and how fast pages
move to it and back."""

from __future__ import annotations

from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.server.http.rendering import Rendered

WAYS = {"host": ("save", "load"), "disk": ("spill", "fetch")}  # kinds of transfers: to the tier, and back


class Tier(Rendered):
    """Counted since the start. GB/s are means of one transfer; several may be under way at once. null: not
    known, or none yet."""

    pages: int | None  # in use; files are not counted
    pages_total: int | None
    loaded_pages: int  # that came back to the device from here
    write_gb_per_second: float | None
    read_gb_per_second: float | None
    failed_transfers: int


def tiers(stats: EngineStats) -> dict[str, Tier]:
    """Empty where the device is the only tier. The disk is in it once anything was moved there or back."""
    moved = stats.transfers_total.keys() | stats.failed_transfers_total.keys()
    there = [
        name for name, way in WAYS.items() if name in stats.tier_pages_total or not moved.isdisjoint(way)
    ]
    return {name: _tier(stats, name, *WAYS[name]) for name in there}


def _tier(stats: EngineStats, name: str, write_kind: str, read_kind: str) -> Tier:
    return Tier(
        stats.tier_pages.get(name),
        stats.tier_pages_total.get(name),
        stats.loaded_pages.get(name, 0),
        _speed(stats, write_kind),
        _speed(stats, read_kind),
        sum(stats.failed_transfers_total.get(kind, 0) for kind in (write_kind, read_kind)),
    )


def _speed(stats: EngineStats, kind: str) -> float | None:
    seconds = stats.transfer_seconds_total.get(kind, 0)
    return stats.transfer_bytes_total[kind] / seconds / 1e9 if seconds else None
