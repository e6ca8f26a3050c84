"""Pages in host memory that another node may read, under the name of the request that computed them, until it
has read them or the lease ends. For the engine's thread, which offers them, and for those that serve readers.

    offer ──→ open ──release, by the reader──→ ended ──take_ended, by the engine──→ its blocks are free
                └────its time is over────────→

A reader that comes too late, or is too slow, reads a block that holds another page by then: so each page is
sent with a checksum that was taken while its lease was open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from threading import Condition
from time import monotonic

from mtpserve.cache.keys import Key

Place = tuple[int, Key]  # a page: its group and key
MOST_ENDED = 4096  # names of leases that have ended: who asks for one need not wait


@dataclass(slots=True)
class Lease:
    pages: dict[Place, int]  # the block of each
    ends: float


class Leases:
    """`seconds`: how long each lasts."""

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self._changed = Condition()
        self._open: dict[str, Lease] = {}
        self._coming: set[str] = set()  # their pages are still being copied to host memory
        self._ended: list[dict[Place, int]] = []
        self._names: dict[str, None] = {}  # names of ended leases, the oldest first
        self.offered = self.expired = 0  # leases
        self.sent_pages = self.sent_bytes = 0
        self.sent_seconds = 0.0

    # --------------------------------------------------------------------------------- of the engine's thread

    def expect(self, name: str) -> None:
        with self._changed:
            self._coming.add(name)

    def refuse(self, name: str) -> None:
        """Refuses pages that will not be computed: who waits for them need not."""
        with self._changed:
            self._remember(name)
            self._changed.notify_all()

    def offer(self, name: str, pages: Mapping[Place, int]) -> None:
        """Complete blocks, which the caller leaves as they are until `take_ended` gives them back."""
        with self._changed:
            self._coming.discard(name)
            if (before := self._open.get(name)) is not None:
                self._ended.append(before.pages)
            self._open[name] = Lease(dict(pages), self.clock() + self.seconds)
            self.offered += 1
            self._changed.notify_all()

    def take_ended(self) -> list[dict[Place, int]]:
        """The pages of the leases that have ended since the last call."""
        with self._changed:
            now = self.clock()
            for name in [name for name, lease in self._open.items() if lease.ends <= now]:
                self._end(name)
                self.expired += 1
            ended, self._ended = self._ended, []
        return ended

    def withdraw(self, keys: Collection[Key]) -> None:
        """What these pages hold is not to be relied on."""
        with self._changed:
            for name in [
                name for name, lease in self._open.items() if any(key in keys for _, key in lease.pages)
            ]:
                self._end(name)

    @property
    def is_open(self) -> bool:
        """True if some lease has not ended."""
        with self._changed:
            return bool(self._open or self._ended)

    @property
    def open_pages(self) -> int:
        with self._changed:
            return sum(len(lease.pages) for lease in self._open.values())

    # ------------------------------------------------------------------------------------ of readers' threads

    def find(self, name: str, waits: bool, seconds: float) -> dict[Place, int] | None:
        """The pages of a lease, after at most so many seconds if they are coming, or if the caller `waits`
        for a name that is not known yet. None: there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._settled(name, waits), seconds)
            lease = self._open.get(name)
            return None if lease is None or lease.ends <= self.clock() else dict(lease.pages)

    def holds(self, name: str, places: Iterable[Place]) -> bool:
        """True if the blocks still hold these pages."""
        with self._changed:
            lease = self._open.get(name)
            return (
                lease is not None
                and lease.ends > self.clock()
                and all(page_id in lease.pages for page_id in places)
            )

    def release(self, name: str, pages: int, size: int, seconds: float) -> None:
        """A reader needs it no more: it has read so many pages and bytes."""
        with self._changed:
            if name in self._open:
                self._end(name)
            self.sent_pages, self.sent_bytes, self.sent_seconds = (
                self.sent_pages + pages, self.sent_bytes + size, self.sent_seconds + seconds
            )  # fmt: skip

    def _settled(self, name: str, waits: bool) -> bool:
        is_registered = name in self._open or name in self._names
        return is_registered if waits or name in self._coming else True

    def _end(self, name: str) -> None:
        self._ended.append(self._open.pop(name).pages)
        self._remember(name)

    def _remember(self, name: str) -> None:
        self._names[name] = None
        if len(self._names) > MOST_ENDED:
            del self._names[next(iter(self._names))]
