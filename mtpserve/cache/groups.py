"""Which pages each request holds, group by group: layers with one window share their pages, and full attention is a group of its own.

    columns     0  1  2  3  4  5  6       of a request's page table; each is `page_size` tokens
    full      | a| b| c| d| e| f| g|      all of them
    window    |  |  |  | q| r| p| s|      from the first that a later row sees: pages before it were released, and may come again

It counts; it stores nothing and knows no tensors. What a long prompt holds in the group of a window is bounded: it gets pages chunk by
chunk, as many as it releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mtpserve.cache.pages import PageAllocator
from mtpserve.core.sequence import Held


class PageGroup(NamedTuple):
    window: int | None
    allocator: PageAllocator


class PageGroups:
    """`windows` of the groups, see core.arch.page_groups, and how many pages each has. `chunk`: rows that one request may bring to a
    step."""

    def __init__(self, windows: Sequence[int | None], pages: Sequence[int], page_size: int, chunk: int) -> None:
        self.groups = [PageGroup(window, PageAllocator(count)) for window, count in zip(windows, pages, strict=True)]
        self.page_size, self._chunk = page_size, chunk
        self.windowed = any(window is not None for window in windows)

    @property
    def total(self) -> int:
        return sum(group.allocator.num_pages for group in self.groups)

    @property
    def used(self) -> int:
        return sum(group.allocator.num_pages - group.allocator.free_count for group in self.groups)

    def capacity(self, lookahead: int) -> int:
        """Tokens that one request alone may have."""
        limits = [
            group.allocator.num_pages * self.page_size - lookahead
            for group in self.groups
            if group.window is None or group.allocator.num_pages < self._most(group.window, lookahead)
        ]
        return min(limits, default=1 << 62)

    def columns(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _most(self, window: int, lookahead: int) -> int:
        """Pages that a request holds at most in the group of a window."""
        return self.columns(window + self._chunk + lookahead) + 1

    def _low(self, window: int | None, start: int) -> int:
        """The first column that rows from token `start` on see."""
        return 0 if window is None else max(0, start - window + 1) // self.page_size

    def _end(self, window: int | None, start: int, tokens: int, lookahead: int) -> int:
        """The column after those of a request that has `tokens`, and computes them from `start` on in chunks."""
        whole = self.columns(tokens + lookahead)
        return whole if window is None else min(whole, self._low(window, start) + self._most(window, lookahead))

    def seat(self, shared: Sequence[Held], start: int, tokens: int, lookahead: int) -> list[Held] | None:
        """What a request gets that computes `tokens` from `start` on, after `shared`, of which it becomes a holder. None: too few are
        free, and nothing was taken."""
        held = [Held(one.first, list(one.pages)) for one in shared] or [Held(self._low(window, start)) for window, _ in self.groups]
        missing = self.missing(held, start, tokens, lookahead)
        if not self.are_free(missing):
            return None
        for group, one in zip(self.groups, held, strict=True):
            group.allocator.share(one.pages)
        self.extend(held, missing)
        return held

    def has(self, held: Sequence[Held], tokens: int) -> bool:
        """Whether a request has the pages of all columns up to `tokens`, but for those that it has released."""
        for one in held:  # noqa: SIM110  asked for every request in every step, and all() of a generator costs twice as much
            if (one.first + len(one.pages)) * self.page_size < tokens:
                return False
        return True

    def missing(self, held: Sequence[Held], start: int, tokens: int, lookahead: int) -> list[int]:
        """Pages of each group that a request lacks which computes `tokens` from `start` on."""
        pairs = zip(self.groups, held, strict=True)
        return [max(self._end(group.window, start, tokens, lookahead) - one.end, 0) for group, one in pairs]

    def are_free(self, counts: Iterable[int]) -> bool:
        """So many pages of each group."""
        return all(count <= group.allocator.free_count for count, group in zip(counts, self.groups, strict=True))

    def extend(self, held: Sequence[Held], missing: Iterable[int]) -> None:
        for group, one, count in zip(self.groups, held, missing, strict=True):
            one.pages += group.allocator.allocate(count)

    def advance(self, held: Sequence[Held], start: int) -> None:
        """No row before token `start` will come any more: release what only such rows see."""
        for group, one in zip(self.groups, held, strict=True):
            passed = self._low(group.window, start) - one.first
            if passed > 0:
                group.allocator.release(one.pages[:passed])
                one.first, one.pages = one.first + passed, one.pages[passed:]

    def shareable(self, held: Sequence[Held], start: int, columns: int) -> list[Held] | None:
        """The part of `held` that a request needs which starts to compute at `start`: up to `columns`. None: not all of it is there."""
        shared = []
        for group, one in zip(self.groups, held, strict=True):
            low = self._low(group.window, start)
            if one.first > low or one.end < columns:
                return None
            shared.append(Held(low, one.pages[low - one.first : columns - one.first]))
        return shared

    def release(self, held: Sequence[Held]) -> None:
        for group, one in zip(self.groups, held, strict=False):  # a request without a seat holds none
            group.allocator.release(one.pages)

    def check_integrity(self, holders: Sequence[Sequence[Held]]) -> None:
        """Raises PageError, see PageAllocator."""
        for i, group in enumerate(self.groups):
            group.allocator.check_integrity([held[i].pages for held in holders if held])
