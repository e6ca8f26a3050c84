"""Pages that outlive the device's pool: which ones are in host memory or on disk, and which are on their way.

    device ──save, before somebody else gets the page──→ host ──spill──→ disk
           ←──load, beside the steps────────────────────      ←─fetch──

Pages are found by key in all of them.

It counts; what moves the bytes is runtime/paging. With a disk, pages are written through as they become
complete, a few with each step, so that what is often used outlives the process, too. In host memory the least
recently used are dropped first.

A request that finds pages below the device waits until they are loaded; others run meanwhile. The loading
itself holds them, as a request would: afterwards they are cached as if they had just been used.

Another node is one more place from which pages come to host memory (kv_receiver.py), and for which they are
kept there (kv_sender.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import Key
from mtpserve.core.plan import Transfer, Transferred
from mtpserve.core.state.cache_state import BlockList
from mtpserve.core.state.request_state import RequestState as Live
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.engine.pages.host import Disk, HostMemory
from mtpserve.engine.pages.kv_receiver import KVReceiver
from mtpserve.engine.pages.kv_sender import KVSender

THROUGH = 8  # pages that a plan writes through to the disk
WAITING = 4096  # pages that wait for it; of more the oldest are left to eviction


@dataclass(slots=True)
class Missing:
    """A page that is loaded."""

    group: int
    column: int
    key: Key
    block: int
    cold: bool  # it is on disk alone


@dataclass(slots=True)
class Loading:
    """Pages on their way to the device, for all requests that wait for them."""

    number: int
    keys: Sequence[Key]
    blocks: list[BlockList]  # pages of the device, with those that were there already
    missing: list[Missing]
    open: set[int]  # numbers of its transfers
    fetched: bool = False
    good: bool = True


class KVConnector(HostMemory):
    """`blocks`: in host memory, of each group of `pages`."""

    def __init__(self, pages: PageGroups, blocks: Sequence[int], disk: Disk | None = None) -> None:
        super().__init__(pages, blocks, disk)
        self.on_close: Callable[[], None] = lambda: None
        self.receiver: KVReceiver | None = None  # from other nodes
        self.sender: KVSender | None = None  # for them
        self.loadings: list[Loading] = []
        self._through: deque[tuple[int, int, Key]] = deque(maxlen=WAITING)
        self._spilling: dict[int, tuple[int, Key]] = {}  # group and key by number
        self._void: set[int] = set()  # numbers of spills that must not be found
        self._loads = 0
        self.loaded: dict[str, int] = defaultdict(int)  # pages by the tier from which they came
        self.dropped = 0  # pages for which host memory had no place

    @property
    def pending(self) -> bool:
        """Something has to be moved, or is under way."""
        pulling = self.receiver is not None and self.receiver.pending
        return bool(
            self._outgoing or self._through or self.saving or self._spilling or self.loadings or pulling
        )

    @property
    def holders(self) -> list[list[BlockList]]:
        """Lists that hold pages of the device, besides those of requests."""
        return [loading.blocks for loading in self.loadings]

    def take_outgoing(self) -> list[Transfer]:
        """What the next plan has to move."""
        if self.sender is not None:
            self.sender.collect()
        for _ in range(min(THROUGH, len(self._through))):
            group, page, key = self._through.popleft()
            # Another page may have the key by now, or none.
            if self._pages.groups[group].allocator.find(key) == page and not self.save(group, page, key):
                # All blocks are on their way to the disk.
                self._through.appendleft((group, page, key))
                break
        transfers, self._outgoing = self._outgoing, []
        return transfers

    # ---------------------------------------------------------------------------------------------- downwards

    def evicted(self, group: int, page: int, key: Key) -> None:
        """The device gives this page to somebody else."""
        if not self.save(group, page, key):
            self.dropped += 1
            self._report_gone(group, key)

    def completed(self, blocks: Sequence[BlockList], keys: Sequence[Key], first: int, end: int) -> None:
        """A request's pages of these columns have got their keys."""
        if self._disk is None:
            return
        for group, one in enumerate(blocks):
            self._through += [
                (group, one.pages[column - one.first], keys[column])
                for column in range(max(first, one.first), min(end, one.end))
            ]

    def forget(self) -> None:
        """Empty them all. What is under way comes to nothing."""
        for host in self.groups:
            for key in list(host.blocks):
                host.drop(key)
        for loading in self.loadings:
            loading.good = False
        self._through.clear()
        self._void |= self._spilling.keys()
        if self.receiver is not None:
            self.receiver.forget()
        if self._disk is not None:
            self._disk.clear()

    def distrust(self, keys: Sequence[Key]) -> None:
        """What these pages hold may not be numbers."""
        wrong = set(keys)
        for group, host in enumerate(self.groups):
            for key in wrong & host.blocks.keys():
                host.drop(key)
            if self._disk is not None:
                for key in wrong:
                    self._disk.remove(group, key)
        self._void |= {number for number, (_, key) in self._spilling.items() if key in wrong}
        for loading in self.loadings:
            loading.good &= wrong.isdisjoint(loading.keys)
        if self.sender is not None:
            self.sender.withdraw(wrong)

    # ------------------------------------------------------------------------------------------------ upwards

    def bring(self, keys: Sequence[Key], columns: int) -> int | None:
        """A request finds so many columns on the device, not all. → the number of the loading that brings
        more: it waits for that."""
        for loading in self.loadings:
            if any(page.key == keys[columns] for page in loading.missing):
                return loading.number
        num_columns = self._pages.matched(keys, lookup=self.has_page)
        return self._start(keys[:num_columns]) if num_columns > columns else None

    def is_loading(self, number: int) -> bool:
        return any(loading.number == number for loading in self.loadings)

    def _start(self, keys: Sequence[Key]) -> int | None:
        """Load what the device lacks of these columns. None: there is no room."""
        required_columns = self._pages.required_columns(len(keys))
        targets = [
            (group, column)
            for group, columns in enumerate(required_columns)
            for column in columns
            if not self._pages.has_page(group, keys[column])
        ]
        missing = self._blocks(targets, keys)
        if missing is None:
            return None
        blocks = self._pages.gather(keys, required_columns)
        if blocks is None:
            self._unpin(missing)
            return None
        self._loads += 1
        loading = Loading(self._loads, keys, blocks, missing, set())
        self.loadings.append(loading)
        loading.open = {
            self.move("fetch", page.group, page.block, key=page.key) for page in missing if page.cold
        }
        if not loading.open:
            self._load(loading)
        return loading.number

    def _blocks(self, targets: Sequence[tuple[int, int]], keys: Sequence[Key]) -> list[Missing] | None:
        """Pinned: those that hold the pages, and empty ones for those on disk. None: there are too few."""
        missing = list[Missing]()
        for group, column in targets:
            host, key = self.groups[group], keys[column]
            if (block := host.blocks.get(key)) is not None:
                host.blocks.move_to_end(key)
                host.pins[block] += 1
                missing.append(Missing(group, column, key, block, cold=False))
        places = {(page.group, page.column) for page in missing}
        for group, column in targets:
            if (group, column) in places:
                continue
            new_block = self.take(group)
            if new_block is None:
                self._unpin(missing)
                return None
            self.groups[group].pins[new_block] += 1
            missing.append(Missing(group, column, keys[column], new_block, cold=True))
        return missing

    def _load(self, loading: Loading) -> None:
        loading.fetched = True
        for page in loading.missing:
            one = loading.blocks[page.group]
            loading.open.add(
                self.move("load", page.group, page.block, one.pages[page.column - one.first], page.key)
            )

    def _unpin(self, missing: Sequence[Missing]) -> None:
        for page in missing:
            self.release(page.group, page.key, page.block)

    # ------------------------------------------------------------------------------------------------- booked

    def commit(self, ended: Sequence[Transferred]) -> None:
        for result in ended:
            moved = result.transfer
            self.count(result)
            if moved.kind == "pull" and self.receiver is not None:
                self.receiver.commit(result)
            elif moved.kind == "save":
                self._saved(moved, result.good)
            elif moved.kind == "spill":
                self._spilled(moved, result.good)
            else:
                loading = next(one for one in self.loadings if moved.number in one.open)
                self._book_part(loading, moved, result.good)

    def _saved(self, moved: Transfer, good: bool) -> None:
        group, block, key = moved.group, moved.block, moved.key
        self.saving.remove((group, block))
        if not good:
            self._avoid(moved)
        elif (
            self._disk is not None
            and self.groups[group].blocks.get(key) == block
            and not self._disk.has(group, key)
        ):
            self.groups[group].pins[block] += 1
            self._spilling[self.move("spill", group, block, key=key)] = group, key
        self.release(group, key, block)
        if self.sender is not None:
            self.sender.saved(group, block, good)

    def _spilled(self, moved: Transfer, good: bool) -> None:
        self.release(moved.group, moved.key, moved.block)
        del self._spilling[moved.number]
        if moved.number in self._void and self._disk is not None:
            self._void.discard(moved.number)
            self._disk.remove(moved.group, moved.key)
        elif good:
            self._bad.pop((moved.group, moved.key), None)

    @property
    def is_sending(self) -> bool:
        """True while pages are kept for other nodes."""
        return self.sender is not None and self.sender.open

    def report(self, stats: EngineStats, waiting_requests: Sequence[Live]) -> None:
        """`waiting_requests`: the requests that have no seat."""
        pulls = self.receiver if self.receiver is not None and self.receiver.pending else None
        late = (
            self.is_loading(req.cache.kv_load) or (pulls is not None and pulls.open(req))
            for req in waiting_requests
        )
        stats.waiting_for_pages = sum(late) if self.loadings or pulls is not None else 0
        if self.sender is not None:
            self.sender.report(stats)
        if self.receiver is not None:
            stats.failed_pulls_total = self.receiver.failed
        stats.loaded_pages, stats.dropped_pages_total = self.loaded, self.dropped
        stats.tier_pages = {"host": sum(len(host.blocks) for host in self.groups)}
        stats.tier_pages_total = {"host": sum(len(host.pins) for host in self.groups)}
        stats.transfers_total, stats.failed_transfers_total = self.moved, self.failed
        stats.transfer_bytes_total, stats.transfer_seconds_total = self.bytes, self.seconds

    def _book_part(self, loading: Loading, moved: Transfer, good: bool) -> None:
        loading.open.remove(moved.number)
        if not good:
            loading.good = False
            self._avoid(moved)
        if loading.open:
            return
        if loading.good and not loading.fetched:
            self._load(loading)
        else:
            self._end(loading)

    def _end(self, loading: Loading) -> None:
        self.loadings.remove(loading)
        if loading.good:
            for page in loading.missing:
                self.loaded["disk" if page.cold else "host"] += 1
                if page.cold:
                    self.groups[page.group].blocks.setdefault(page.key, page.block)
                self._pages.label_page(page.group, loading.blocks[page.group], page.column, page.key)
        self._unpin(loading.missing)
        self._pages.release(loading.blocks)
