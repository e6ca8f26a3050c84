"""Tiers below a simulated device: how long pages take between device, host memory and disk, and what the disk
has. Which pages move, engine/pages/kv_connector says, as it does for a real device; no byte moves.

Each way is a link of its own on which pages follow each other: to the host, to the device, to the disk, from
the disk.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mtpserve.cache.keys import Key
from mtpserve.core.plan import Transfer, Transferred


class SimulatedDisk:
    """engine.pages.host.Disk of so many pages, the least recently used of which are deleted first."""

    def __init__(self, pages: int) -> None:
        self._pages, self._files = pages, OrderedDict[tuple[int, Key], None]()

    def has(self, group: int, key: Key) -> bool:
        return (group, key) in self._files

    def remove(self, group: int, key: Key) -> None:
        self._files.pop((group, key), None)

    def clear(self) -> None:
        self._files.clear()

    def write(self, group: int, key: Key) -> bool:
        self._files[group, key] = None
        self._files.move_to_end((group, key))
        if len(self._files) > self._pages:
            self._files.popitem(last=False)
        return True

    def read(self, group: int, key: Key) -> bool:
        if (group, key) not in self._files:
            return False
        self._files.move_to_end((group, key))
        return True


@dataclass(frozen=True, slots=True)
class PageTimes:
    """Seconds of one page on its way."""

    host: float
    disk: float


class SimulatedTransfers:
    """runtime/paging.Transfers in simulated time."""

    def __init__(self, times: PageTimes, disk: SimulatedDisk | None = None) -> None:
        self._seconds = {"save": times.host, "load": times.host, "spill": times.disk, "fetch": times.disk}
        self._free_at = dict.fromkeys(self._seconds, 0.0)  # the links
        self._disk = disk
        self._moving: list[tuple[float, int, Transfer]] = []  # a heap, by their ends

    @property
    def next_end(self) -> float | None:
        return self._moving[0][0] if self._moving else None

    def start(self, transfers: Sequence[Transfer], now: float) -> None:
        for transfer in transfers:
            end = self._free_at[transfer.kind] = (
                max(now, self._free_at[transfer.kind]) + self._seconds[transfer.kind]
            )
            heapq.heappush(self._moving, (end, transfer.number, transfer))

    def ended(self, now: float) -> list[Transferred]:
        over = list[Transferred]()
        while self._moving and self._moving[0][0] <= now:
            transfer = heapq.heappop(self._moving)[2]
            over.append(Transferred(transfer, self._outcome(transfer), self._seconds[transfer.kind], 0))
        return over

    def _outcome(self, transfer: Transfer) -> bool:
        if self._disk is None or transfer.kind in ("save", "load"):
            return True
        return (self._disk.write if transfer.kind == "spill" else self._disk.read)(
            transfer.group, transfer.key
        )
