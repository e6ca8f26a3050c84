"""The pages of the KV pool: which are in use, by how many holders, and which can be found by what they
contain. It stores nothing and knows no tensors.

A page is a number in [0, num_pages). It is free, or held by one or more holders, of which each gives it back
once. A page whose contents are complete may get a key (cache/keys). Then it can be found, and after its last
holder has left it is cached: it counts as free, and is given to others after all pages without a key, the
least recently used first.

    free ──allocate──→ held ──label──→ held, with a key ⇄ cached ──allocate (evicts)──→ held by another
      ←────release───────┘               share, release
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from mtpserve.cache.keys import Key


class OutOfPages(RuntimeError):
    """More pages are wanted than are free. Nothing was taken."""


class PageError(RuntimeError):
    """The accounting was broken: a page given back twice, or refcounts, free list and holders that
    disagree."""


class PageAllocator:
    """Reference-counted pages. Not for several threads at once. `evicted` is called with the page and its key
    before somebody else gets the page."""

    def __init__(self, num_pages: int, evicted: Callable[[int, Key], None] = lambda page, key: None) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool has at least 1 page, got {num_pages}")
        self._references = [0] * num_pages
        # A heap hands out the lowest numbers first: a request's pages are mostly contiguous, and the pool
        # fills from below.
        self._free = list(range(num_pages))
        self._keys: dict[int, Key] = {}
        self._pages: dict[Key, int] = {}  # the same, the other way round
        # with a key and without holders, the least recently used first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._evicted = evicted

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def free_count(self) -> int:
        """Pages without a holder, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def cached_count(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, each with one holder: in ascending order, as long as there are some without a key.
        All or nothing: raises OutOfPages."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.free_count:
            raise OutOfPages(f"{count} pages asked for, {self.free_count} of {self.num_pages} free")
        pages = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def find(self, key: Key) -> int | None:
        return self._pages.get(key)

    def has_key(self, page: int) -> bool:
        return page in self._keys

    def free_without(self, pages: Iterable[int]) -> int:
        """`free_count` after `share(pages)`."""
        return self.free_count - sum(page in self._cached for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Adds one holder to each of `pages`, which must be held or cached."""
        self._require_held(Counter(pages), extra=True)
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def label(self, page: int, key: Key) -> int:
        """A held page's contents are complete. → the page that has this key: another one where that was
        labelled before."""
        self._require_held(Counter([page]), extra=False)
        first = self._pages.setdefault(key, page)
        if first == page:
            self._keys[page] = key
        return first

    def release(self, pages: Sequence[int]) -> None:
        """Removes one holder from each of `pages`; the last one frees it, or leaves it cached. Raises
        PageError, and changes nothing, for a page not held.

        A request's pages are given from the first column to the last, and are evicted from the last to the
        first: then a page is never cached without those before it, since who holds it holds these.
        """
        self._require_held(Counter(pages), extra=False)
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] > 0:
                continue
            if page in self._keys:
                self._cached[page] = None
            else:
                heapq.heappush(self._free, page)

    def unlabel(self, pages: Iterable[int]) -> list[Key]:
        """BlockList pages lose their keys, where they have any. → these keys."""
        keys = [self._keys.pop(page) for page in pages if page in self._keys]
        for key in keys:
            del self._pages[key]
        return keys

    def forget(self) -> None:
        """Removes all keys; cached pages become free."""
        for page in self._cached:
            heapq.heappush(self._free, page)
        self._cached.clear()
        self._keys.clear()
        self._pages.clear()

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise PageError unless `holders`, one list of pages for each, account for every reference and all
        else is free or cached."""
        holder_counts = Counter(page for pages in holders for page in pages)
        free = Counter(self._free)
        if strange := [page for page in holder_counts | free if not 0 <= page < self.num_pages]:
            raise PageError(f"page {strange[0]} is not one of the pool's {self.num_pages}")
        for page, references in enumerate(self._references):
            if references != holder_counts[page]:
                raise PageError(f"page {page} counts {references} holders but {holder_counts[page]} hold it")
            if free[page] + (page in self._cached) != (references == 0):
                raise PageError(
                    f"page {page} counts {references} holders and is {free[page]} times in the free list"
                )
        if (
            self._pages != {key: page for page, key in self._keys.items()}
            or not self._cached.keys() <= self._keys.keys()
        ):
            raise PageError("keys and pages disagree")

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        key = self._keys.pop(page)
        del self._pages[key]
        self._evicted(page, key)
        return page

    def _require_held(self, pages: Counter[int], extra: bool) -> None:
        for page, count in pages.items():
            if not 0 <= page < self.num_pages:
                raise PageError(f"page {page} is not one of the pool's {self.num_pages}")
            # Sharing needs one holder, or a key; giving back needs as many as the list names the page.
            if self._references[page] < (1 if extra else count) and not (extra and page in self._cached):
                action = "shared" if extra else f"given back {count} times"
                raise PageError(f"page {page} is {action} but counts {self._references[page]} holders")
