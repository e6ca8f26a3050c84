"""Blocks of host memory that hold pages, and the transfers that fill and empty them. What moves the bytes is
runtime/paging."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import Key
from mtpserve.core.kv_transfer import PageSource
from mtpserve.core.plan import Transfer, Transferred

MOST_BAD = 4096  # keys of damaged files that are remembered

Kind = Literal["save", "load", "spill", "fetch", "pull"]


class Disk(Protocol):
    """The names of the files."""

    def has(self, group: int, key: Key) -> bool: ...

    def remove(self, group: int, key: Key) -> None: ...

    def clear(self) -> None: ...


class HostGroup:
    """The blocks of one group of pages. A block is pinned while a transfer reads or writes it."""

    def __init__(self, blocks: int) -> None:
        self.blocks: OrderedDict[Key, int] = OrderedDict()  # the least recently used first
        self.free = list(range(blocks - 1, -1, -1))
        self.pins = [0] * blocks

    def take(self) -> tuple[int, Key | None] | None:
        """A block for another page, and the key of the one that it held. None: all are pinned."""
        if self.free:
            return self.free.pop(), None
        for key, block in self.blocks.items():
            if not self.pins[block]:
                del self.blocks[key]
                return block, key
        return None

    def drop(self, key: Key) -> None:
        """A block that is pinned is free once it is not any more."""
        block = self.blocks.pop(key)
        if not self.pins[block]:
            self.free.append(block)


class HostMemory:
    """`blocks`: how many blocks each group of `pages` has in host memory."""

    def __init__(self, pages: PageGroups, blocks: Sequence[int], disk: Disk | None = None) -> None:
        self._pages, self._disk = pages, disk
        # Called with the key of a page of group 0 that neither the device nor host memory has any more.
        self.on_gone: Callable[[Key], None] = lambda key: None
        self.groups = [HostGroup(count) for count in blocks]
        self.saving: set[tuple[int, int]] = set()  # groups and blocks
        self._outgoing: list[Transfer] = []
        self._bad: OrderedDict[tuple[int, Key], None] = OrderedDict()
        self._numbers = 0
        self.moved: dict[str, int] = defaultdict(int)  # by kind of transfer, as are these
        self.failed: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)

    def has_page(self, group: int, key: Key) -> bool:
        """True if any tier has the page."""
        if self._pages.has_page(group, key) or key in self.groups[group].blocks:
            return True
        return self._disk is not None and (group, key) not in self._bad and self._disk.has(group, key)

    def save(self, group: int, page: int, key: Key) -> bool:
        host = self.groups[group]
        if key in host.blocks:
            host.blocks.move_to_end(key)
            return True
        block = self.take(group)
        if block is None:
            return False
        host.blocks[key] = block
        host.pins[block] += 1
        self.saving.add((group, block))
        self.move("save", group, block, page, key)
        return True

    def take(self, group: int) -> int | None:
        entry = self.groups[group].take()
        if entry is None:
            return None
        block, key = entry
        if key is not None:
            self._report_gone(group, key)
        return block

    def _report_gone(self, group: int, key: Key) -> None:
        if group == 0 and key not in self.groups[0].blocks and not self._pages.has_page(0, key):
            self.on_gone(key)

    def release(self, group: int, key: Key, block: int) -> None:
        """A transfer has ended. A block that holds no page is free then."""
        host = self.groups[group]
        host.pins[block] -= 1
        if not host.pins[block] and host.blocks.get(key) != block:
            host.free.append(block)

    def move(
        self,
        kind: Kind,
        group: int,
        block: int,
        page: int = -1,
        key: Key = b"",
        source: PageSource | None = None,
    ) -> int:
        self._numbers += 1
        self._outgoing.append(Transfer(self._numbers, kind, group, block, page, key, source))
        return self._numbers

    def count(self, result: Transferred) -> None:
        kind = result.transfer.kind
        if not result.good:
            self.failed[kind] += 1
            return
        self.moved[kind] += 1
        self.bytes[kind] += result.bytes
        self.seconds[kind] += result.seconds

    def _avoid(self, moved: Transfer) -> None:
        """What this transfer could not read, or did not write, is not there from now on."""
        host = self.groups[moved.group]
        if moved.kind == "fetch":
            self._bad[moved.group, moved.key] = None
            if len(self._bad) > MOST_BAD:
                self._bad.popitem(last=False)
        elif host.blocks.get(moved.key) == moved.block:
            del host.blocks[moved.key]  # it is pinned until this is booked, and free then
