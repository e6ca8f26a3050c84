"""Which pages of the KV pool are in use, and by how many holders. It counts; it stores nothing and knows no tensors.

A page is a number in [0, num_pages). It is free, or held by one or more holders, of which each gives it back once.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfPages(RuntimeError):
    """More pages were asked for than are free. Nothing was taken."""


class PageError(RuntimeError):
    """The accounting was broken: a page given back twice, or refcounts, free list and holders that disagree."""


class PageAllocator:
    """Reference-counted pages. Not for several threads at once."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool has at least 1 page, got {num_pages}")
        self._references = [0] * num_pages
        # A heap hands out the lowest numbers first: a request's pages are mostly contiguous, and the pool fills from below.
        self._free = list(range(num_pages))

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages in ascending order, each with one holder. All or nothing: raises OutOfPages."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.free_count:
            raise OutOfPages(f"{count} pages asked for, {self.free_count} of {self.num_pages} free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of `pages`, which must be held already."""
        self._require_held(Counter(pages), extra=True)
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each of `pages`; the last one frees it. Raises PageError, and changes nothing, for a page not held."""
        self._require_held(Counter(pages), extra=False)
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise PageError unless `holders`, one list of pages for each, account for every reference and all else is free."""
        held = Counter(page for pages in holders for page in pages)
        free = Counter(self._free)
        if strange := [page for page in held | free if not 0 <= page < self.num_pages]:
            raise PageError(f"page {strange[0]} is not one of the pool's {self.num_pages}")
        for page, references in enumerate(self._references):
            if references != held[page]:
                raise PageError(f"page {page} counts {references} holders but {held[page]} hold it")
            if free[page] != (references == 0):
                raise PageError(f"page {page} counts {references} holders and is {free[page]} times in the free list")

    def _require_held(self, pages: Counter[int], extra: bool) -> None:
        for page, count in pages.items():
            if not 0 <= page < self.num_pages:
                raise PageError(f"page {page} is not one of the pool's {self.num_pages}")
            # Sharing needs one holder; giving back needs as many as the list names the page.
            if self._references[page] < (1 if extra else count):
                action = "shared" if extra else f"given back {count} times"
                raise PageError(f"page {page} is {action} but counts {self._references[page]} holders")
