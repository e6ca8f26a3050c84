"""The pages of each request, group by group: layers with one window share their pages, and full attention is
a group of its own.

    columns     0  1  2  3  4  5  6       of a request's page table; each is `page_size` tokens
    full      | a| b| c| d| e| f| g|      all of them
    window    |  |  |  | q| r| p| s|      from the first that a later row sees: pages before it were
                                          released, and may come again

It counts; it stores nothing and knows no tensors. What a long prompt holds in the group of a window is
bounded: it gets pages chunk by chunk, as many as it releases.

States that recurrent layers keep are the pages of one more group, of which a request holds few: a state is
the page of the column after whose last token it was kept. A row needs what the token before it has left, as
if it had a window of two tokens.

It is also the prefix cache: complete pages get keys (cache/keys), and a request starts after the longest
prefix of its tokens whose pages are there, be they held by others or cached. In the group of a window that
takes only the pages that its next row sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from mtpserve.cache.keys import Key
from mtpserve.cache.pages import PageAllocator
from mtpserve.core.state.cache_state import BlockList

Lookup = Callable[[int, Key], bool]


STATE_WINDOW = 2  # tokens, of the group of states


class PageGroup(NamedTuple):
    window: int | None
    allocator: PageAllocator
    states: bool = False  # its pages are states


class PageGroups:
    """`windows` of the groups, see core.arch.model.page_groups, and how many pages each has. `chunk`: rows
    that one request may bring to a step. `states`: how many may be kept; None: the model has no recurrent
    layers."""

    def __init__(
        self, windows: Sequence[int | None], pages: Sequence[int], page_size: int, chunk: int,
        states: int | None = None
    ) -> None:  # fmt: skip
        self.groups = [
            PageGroup(window, PageAllocator(count, partial(self._evicted, number)))
            for number, (window, count) in enumerate(zip(windows, pages, strict=True))
        ]
        self.dense = len(self.groups)  # groups that have a page for each column
        self._leaving: list[int] = []  # states that the step planned last may still read
        if states is not None:
            self.groups.append(
                PageGroup(
                    STATE_WINDOW, PageAllocator(states, partial(self._evicted, self.dense)), states=True
                )
            )
        # Called with a group, a page and its key before somebody else gets the page.
        self.on_evict: Callable[[int, int, Key], None] = lambda group, page, key: None
        self.page_size, self._chunk = page_size, chunk
        self.windowed = any(group.window is not None for group in self.groups)

    @property
    def has_states(self) -> bool:
        return len(self.groups) > self.dense

    @property
    def states(self) -> int:
        """The number of states that may be kept."""
        return self.groups[self.dense].allocator.num_pages if self.has_states else 0

    @property
    def total(self) -> int:
        return sum(group.allocator.num_pages for group in self.groups[: self.dense])

    @property
    def num_used_pages(self) -> int:
        """Pages that requests hold."""
        return sum(
            group.allocator.num_pages - group.allocator.free_count for group in self.groups[: self.dense]
        )

    @property
    def cached(self) -> int:
        """Pages that nobody holds, with contents that a request may find."""
        return sum(group.allocator.cached_count for group in self.groups[: self.dense])

    def capacity(self, lookahead: int) -> int:
        """Tokens that one request alone may have."""
        limits = [
            group.allocator.num_pages * self.page_size - lookahead
            for group in self.groups[: self.dense]
            if group.window is None or group.allocator.num_pages < self._max_pages(group.window, lookahead)
        ]
        return min(limits, default=1 << 62)

    def columns(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _evicted(self, group: int, page: int, key: Key) -> None:
        self.on_evict(group, page, key)

    def _max_pages(self, window: int, lookahead: int) -> int:
        """Pages that a request holds at most in the group of a window."""
        return self.columns(window + self._chunk + lookahead) + 1

    def _low(self, window: int | None, start: int) -> int:
        """The first column that rows from token `start` on see."""
        return 0 if window is None else max(0, start - window + 1) // self.page_size

    def _end(self, window: int | None, start: int, tokens: int, lookahead: int) -> int:
        """The column after those of a request that has `tokens`, and computes them from `start` on in
        chunks."""
        num_columns = self.columns(tokens + lookahead)
        return (
            num_columns
            if window is None
            else min(num_columns, self._low(window, start) + self._max_pages(window, lookahead))
        )

    def matched(self, keys: Sequence[Key], start: int = 0, lookup: Lookup | None = None) -> int:
        """Columns of the longest prefix that a request can start after, of one with these `keys`. `start`:
        where to start looking, any number. `lookup`: whether a group's page is there, in this pool by
        default."""
        return self._matched(self.groups, keys, start, self.has_page if lookup is None else lookup)

    def matched_without_states(self, keys: Sequence[Key]) -> int:
        """The same, if all states were there."""
        return self._matched(self.groups[: self.dense], keys, 0, self.has_page)

    def _matched(self, groups: Sequence[PageGroup], keys: Sequence[Key], start: int, there: Lookup) -> int:
        columns = len(keys)
        for number, group in enumerate(groups):
            if group.window is None:
                columns = _prefix(partial(there, number), keys, columns, start)
        windowed = [
            (partial(there, number), group.window)
            for number, group in enumerate(groups)
            if group.window is not None
        ]
        while True:
            longest = columns
            for lookup, window in windowed:
                # Full attention has all columns before these, so a shorter prefix is there, too.
                columns = self._visible(lookup, window, keys, columns)
            # A prefix that one group made shorter must be there in the others.
            if columns == longest or len(windowed) < 2:
                return columns

    def has_page(self, group: int, key: Key) -> bool:
        return self.groups[group].allocator.find(key) is not None

    def required_columns(self, columns: int) -> list[range]:
        """The columns of each group that a request needs which starts after so many of them."""
        return [range(self._low(window, columns * self.page_size - 1), columns) for window, *_ in self.groups]

    def _visible(self, lookup: Callable[[Key], bool], window: int, keys: Sequence[Key], columns: int) -> int:
        """The longest prefix of at most so many columns after which the next row sees no page that is
        missing."""
        column, low = columns - 1, self._low(window, columns * self.page_size - 1)
        while column >= low:
            if not lookup(keys[column]):
                columns, low = column, self._low(window, column * self.page_size - 1)
            column -= 1
        return columns

    def seat(
        self, shared: Sequence[Key], start: int, tokens: int, lookahead: int, spare: int = 0
    ) -> list[BlockList] | None:
        """What a request gets that computes `tokens` from `start` on, after the pages with the keys `shared`,
        of which it becomes a holder. None: too few are free, or less than `spare` more for each group without
        a window, and nothing was taken."""
        blocks = []
        for group in self.groups:
            low = self._low(group.window, start)
            pages = [group.allocator.find(key) for key in shared[low:]]
            blocks.append(BlockList(low, [page for page in pages if page is not None]))
            assert None not in pages, "`matched` said that they are there"
        missing = self.missing(blocks, start, tokens, lookahead)
        room = (
            group.allocator.free_without(one.pages) for group, one in zip(self.groups, blocks, strict=True)
        )
        spare_pages = (spare * (group.window is None) for group in self.groups)
        if any(count + more > free for count, more, free in zip(missing, spare_pages, room, strict=True)):
            return None
        for group, one in zip(self.groups, blocks, strict=True):
            group.allocator.share(one.pages)
        self.extend(blocks, missing)
        return blocks

    def gather(self, keys: Sequence[Key], required_columns: Sequence[range]) -> list[BlockList] | None:
        """Pages for the `required_columns` of each group: those that are there, of which the caller becomes a
        holder, and free ones for the others. None: too few are free, and nothing was taken."""
        cached_pages = [
            [group.allocator.find(keys[c]) for c in columns]
            for group, columns in zip(self.groups, required_columns, strict=True)
        ]
        there = [[page for page in pages if page is not None] for pages in cached_pages]
        counts = [len(pages) - len(some) for pages, some in zip(cached_pages, there, strict=True)]
        groups = list(zip(self.groups, there, counts, strict=True))
        if any(count > group.allocator.free_without(some) for group, some, count in groups):
            return None
        for group, some, _ in groups:
            group.allocator.share(some)
        fresh = [iter(group.allocator.allocate(count)) for group, _, count in groups]
        return [
            BlockList(columns.start, [next(free) if page is None else page for page in pages])
            for columns, pages, free in zip(required_columns, cached_pages, fresh, strict=True)
        ]

    def label(self, blocks: Sequence[BlockList], keys: Sequence[Key], first: int, end: int) -> bool:
        """A request's columns from `first` on, before `end`, are complete. Where a page with the same
        contents is there already it takes the place of the request's own. True: that happened, and
        `blocks.planned_end` says from which column on."""
        replaced = False
        for number, one in enumerate(blocks):
            for column in range(max(first, one.first), min(end, one.end)):
                replaced |= self.label_page(number, one, column, keys[column])
        return replaced

    def label_page(self, group: int, blocks: BlockList, column: int, key: Key) -> bool:
        """The same for one page."""
        allocator, old_page = self.groups[group].allocator, blocks.pages[column - blocks.first]
        page = allocator.label(old_page, key)
        if page == old_page:
            return False
        allocator.share([page])
        allocator.release([old_page])
        blocks.pages[column - blocks.first] = page
        blocks.planned_end = min(blocks.planned_end, column)
        return True

    def unlabel(self, blocks: Sequence[BlockList]) -> list[list[Key]]:
        """What these pages hold is not to be relied on. → the keys that are not found any more, of each
        group."""
        pairs = zip(self.groups, blocks, strict=False)  # a request without a seat holds none
        return [group.allocator.unlabel(one.pages) for group, one in pairs]

    def state_of(self, blocks: Sequence[BlockList]) -> int:
        """The state that a request starts from which holds these pages; -1: its first token."""
        return blocks[self.dense].pages[0] if self.has_states and blocks[self.dense].pages else -1

    def keep_state(self, blocks: Sequence[BlockList], column: int) -> int | None:
        """A page for the state after this column, of which the request becomes the holder. None: there is
        none, or it still waits for an earlier one to be complete."""
        group, one = self.groups[self.dense], blocks[self.dense]
        if group.allocator.free_count == 0 or any(not group.allocator.has_key(page) for page in one.pages):
            return None
        # The one that it started from may be read by the step that is planned just now.
        self._leaving += one.pages
        one.first, one.pages = column, group.allocator.allocate(1)
        return one.pages[0]

    def take_state(self) -> int | None:
        """A page for a state, of which the caller becomes the holder. None: there is none."""
        allocator = self.groups[self.dense].allocator
        return allocator.allocate(1)[0] if allocator.free_count else None

    def free_state(self, page: int) -> None:
        self.groups[self.dense].allocator.release([page])

    def give_state(self, page: int, column: int, key: Key) -> list[BlockList]:
        """Gives back a complete state of its holder → what is cached now; empty: such a state was there
        already."""
        is_new = self.groups[self.dense].allocator.label(page, key) == page
        self.free_state(page)
        return [*(BlockList() for _ in range(self.dense)), BlockList(column, [page])] if is_new else []

    def settle(self) -> None:
        """Another step is planned: what only the last one needed is given back."""
        if self._leaving:
            self.groups[self.dense].allocator.release(self._leaving)
            self._leaving = []

    def unlabel_states(self, keys: Sequence[Key]) -> None:
        """The states after these columns are not to be relied on."""
        if self.has_states:
            allocator = self.groups[self.dense].allocator
            pages = [page for page in map(allocator.find, keys) if page is not None]
            allocator.share(pages)
            allocator.unlabel(pages)
            allocator.release(pages)

    def forget(self) -> None:
        """Empty the cache. Requests keep what they hold."""
        for group in self.groups:
            group.allocator.forget()

    def has(self, blocks: Sequence[BlockList], tokens: int) -> bool:
        """True if a request has the pages of all columns up to `tokens`, except those that it has
        released."""
        # all() of a generator costs twice as much, and every request in every step asks for this
        for one in blocks[: self.dense]:  # noqa: SIM110
            if (one.first + len(one.pages)) * self.page_size < tokens:
                return False
        return True

    def missing(self, blocks: Sequence[BlockList], start: int, tokens: int, lookahead: int) -> list[int]:
        """Pages of each group that a request lacks which computes `tokens` from `start` on."""
        pairs = zip(self.groups, blocks, strict=True)
        return [
            0 if group.states else max(self._end(group.window, start, tokens, lookahead) - one.end, 0)
            for group, one in pairs
        ]

    def has_room(self, columns: int) -> bool:
        """True if one request can have so many more columns."""
        return all(group.window is not None or columns <= group.allocator.free_count for group in self.groups)

    def are_free(self, counts: Iterable[int]) -> bool:
        """True if so many pages of each group are free."""
        return all(
            count <= group.allocator.free_count for count, group in zip(counts, self.groups, strict=True)
        )

    def extend(self, blocks: Sequence[BlockList], missing: Iterable[int]) -> None:
        for group, one, count in zip(self.groups, blocks, missing, strict=True):
            one.pages += group.allocator.allocate(count)

    def advance(self, blocks: Sequence[BlockList], start: int) -> None:
        """Releases the pages that only rows before token `start` see: such rows come no more."""
        for group, one in zip(self.groups, blocks, strict=True):
            passed = self._low(group.window, start) - one.first
            if passed > 0:
                group.allocator.release(one.pages[:passed])
                one.first, one.pages = one.first + passed, one.pages[passed:]

    def release(self, blocks: Sequence[BlockList]) -> None:
        for group, one in zip(self.groups, blocks, strict=False):  # a request without a seat holds none
            group.allocator.release(one.pages)

    def check_integrity(self, holders: Sequence[Sequence[BlockList]], states: Sequence[int] = ()) -> None:
        """`states`: what was taken by `take_state`. Raises PageError, see PageAllocator."""
        for i, group in enumerate(self.groups):
            others = [self._leaving, states] if group.states else []
            group.allocator.check_integrity([*others, *(blocks[i].pages for blocks in holders if blocks)])


def _prefix(lookup: Callable[[Key], bool], keys: Sequence[Key], end: int, start: int) -> int:
    """Returns how many of `keys[:end]` are there, from the first on. The page of one that is there implies
    those before it."""
    column = min(start, end)
    while column > 0 and not lookup(keys[column - 1]):
        column -= 1
    while column < end and lookup(keys[column]):
        column += 1
    return column
