"""Pages that were computed for another node: they stay in host memory until it has read them, or until their
lease ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import Key
from mtpserve.cache.leases import Leases, Place
from mtpserve.core.kv_transfer import PageOffer
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.engine.pages.host import HostMemory


class Exporter(NamedTuple):
    """The address at which other nodes reach this one, and the engine's id."""

    engine: str
    host: str
    port: int


@dataclass(slots=True)
class Coming:
    """Pages of which some are still being saved, in these groups and blocks."""

    pages: dict[Place, int]
    saving: set[tuple[int, int]]


class KVSender:
    def __init__(self, host: HostMemory, pages: PageGroups, leases: Leases, exporter: Exporter) -> None:
        self._host, self._pages, self._leases, self._exporter = host, pages, leases, exporter
        self._coming: dict[str, Coming] = {}

    def add(self, name: str, keys: Sequence[Key]) -> PageOffer:
        """A request has ended whose prompt has these whole pages: those that are there are kept. A lack of
        host memory is one of pages: the other node computes what is missing."""
        offer = PageOffer(*self._exporter, name, len(keys))
        if name in self._coming:
            return offer  # another choice of the same prompt has it
        places = [
            (group, keys[column])
            for group, columns in enumerate(self._pages.required_columns(len(keys)))
            for column in columns
        ]
        pages = dict[Place, int]()
        # Those that are in host memory first: room for the others would be made at their expense.
        for inside in (True, False):
            for group, key in places:
                if (group, key) not in pages and (key in self._host.groups[group].blocks) is inside:
                    self._keep(group, key, pages)
        self._leases.expect(name)
        self._coming[name] = Coming(
            pages, self._host.saving & {(group, block) for (group, _), block in pages.items()}
        )
        self._offer(name)
        return offer

    def refuse(self, name: str) -> None:
        """A request has not come to its prompt's end."""
        self._leases.refuse(name)

    def _keep(self, group: int, key: Key, pages: dict[Place, int]) -> None:
        host = self._host.groups[group]
        page = self._pages.groups[group].allocator.find(key)
        if key in host.blocks or (page is not None and self._host.save(group, page, key)):
            pages[group, key] = block = host.blocks[key]
            host.pins[block] += 1

    def saved(self, group: int, block: int, good: bool) -> None:
        for name, coming in list(self._coming.items()):
            if (group, block) not in coming.saving:
                continue
            coming.saving.remove((group, block))
            for page_id in [
                page_id
                for page_id, its in coming.pages.items()
                if not good and (page_id[0], its) == (group, block)
            ]:
                self._host.release(*page_id, coming.pages.pop(page_id))
            self._offer(name)

    def _offer(self, name: str) -> None:
        if not self._coming[name].saving:
            self._leases.offer(name, self._coming.pop(name).pages)

    def collect(self) -> None:
        """Blocks whose lease has ended are free for others."""
        for pages in self._leases.take_ended():
            for (group, key), block in pages.items():
                self._host.release(group, key, block)

    def withdraw(self, keys: Collection[Key]) -> None:
        self._leases.withdraw(keys)

    @property
    def open(self) -> bool:
        """Leases will end, though nothing else happens."""
        return self._leases.is_open

    def report(self, stats: EngineStats) -> None:
        self.collect()
        leases = self._leases
        stats.leased_pages, stats.leases_total, stats.expired_leases_total = (
            leases.open_pages,
            leases.offered,
            leases.expired,
        )
        self._host.moved["send"], self._host.bytes["send"] = leases.sent_pages, leases.sent_bytes
        self._host.seconds["send"] = leases.sent_seconds
