"""The page accounting: all or nothing, low pages first, and every way of breaking it is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from mtpserve.cache.pages import OutOfPages, PageAllocator, PageError


def test_lowest_pages_first_and_ascending() -> None:
    pages = PageAllocator(8)
    first, second = pages.allocate(3), pages.allocate(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    pages.release(first)
    assert pages.allocate(4) == [0, 1, 2, 5]
    assert pages.allocate(0) == []


def test_all_or_nothing() -> None:
    pages = PageAllocator(4)
    pages.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 4 free"):
        pages.allocate(2)
    assert pages.free_count == 1


def test_shared_page_is_freed_by_its_last_holder() -> None:
    pages = PageAllocator(2)
    held = pages.allocate(1)
    pages.share(held)
    pages.check_integrity([held, held])
    pages.release(held)
    assert pages.free_count == 1
    pages.release(held)
    assert pages.free_count == 2
    pages.check_integrity([])


@pytest.mark.parametrize("bad", [[1], [0, 0], [-1], [4]])
def test_bad_release_raises_and_changes_nothing(bad: list[int]) -> None:
    pages = PageAllocator(4)
    held = pages.allocate(1)
    with pytest.raises(PageError, match=f"page {bad[-1]} "):
        pages.release(held + bad if bad == [1] else bad)
    pages.check_integrity([held])


def test_free_page_cannot_be_shared() -> None:
    with pytest.raises(PageError, match="page 2 is shared but counts 0 holders"):
        PageAllocator(4).share([2])


@pytest.mark.parametrize("count", [0, -1])
def test_sizes_are_checked(count: int) -> None:
    with pytest.raises(ValueError, match=str(count)):
        PageAllocator(count)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(1).allocate(-1)


def test_what_has_a_key_is_found_until_its_page_is_needed() -> None:
    evicted: list[tuple[int, bytes]] = []
    pages = PageAllocator(4, lambda page, key: evicted.append((page, key)))
    held = pages.allocate(3)
    assert [pages.label(page, key) for page, key in zip(held, (b"a", b"b", b"c"), strict=True)] == held
    pages.release(held)
    assert (pages.free_count, pages.cached_count) == (4, 3)
    assert pages.allocate(1) == [3] and evicted == [], "pages without a key first"
    assert pages.allocate(1) == [2] and evicted == [(2, b"c")], "then the end of what was released"
    assert [pages.find(key) for key in (b"a", b"b", b"c")] == [0, 1, None]
    pages.share([0])
    assert pages.free_count == 1
    assert pages.allocate(1) == [1] and pages.find(b"a") == 0


def test_the_first_page_with_a_key_keeps_it() -> None:
    pages = PageAllocator(4)
    first, second = pages.allocate(2)
    assert (pages.label(first, b"a"), pages.label(second, b"a")) == (first, first)
    pages.release([second])
    assert pages.cached_count == 0
    with pytest.raises(PageError, match="page 1 is given back 1 times"):
        pages.label(second, b"b")


def test_integrity_names_the_page() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(2)
    with pytest.raises(PageError, match="page 1 counts 1 holders but 0 hold it"):
        pages.check_integrity([held[:1]])
    with pytest.raises(PageError, match="page 3 counts 0 holders but 1 hold it"):
        pages.check_integrity([held, [3]])
    with pytest.raises(PageError, match="page 9 is not one of the pool's 4"):
        pages.check_integrity([held, [9]])
    pages._free.append(2)
    with pytest.raises(PageError, match="page 2 counts 0 holders and is 2 times in the free list"):
        pages.check_integrity([held])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "release", "label", "find", "unlabel", "forget"]), st.integers(0, 5)), max_size=60
    )
)
def test_any_history_adds_up(history: list[tuple[str, int]]) -> None:
    labelled: dict[int, bytes] = {}
    pages = PageAllocator(12, lambda page, key: labelled.pop(page) == key or pytest.fail("another key"))
    holders: list[list[int]] = []
    for action, number in history:
        if action == "allocate" and number <= pages.free_count:
            holders.append(pages.allocate(number))
        elif action == "share" and holders:
            held = holders[number % len(holders)]
            pages.share(held)
            holders.append(list(held))
        elif action == "release" and holders:
            pages.release(holders.pop(number % len(holders)))
        elif action == "label" and holders:
            for page in set(holders[number % len(holders)]) - labelled.keys():
                key = bytes([page, number])
                labelled[page] = key
                assert pages.label(page, key) == pages.find(key)
        elif action == "find":
            found = [page for key in range(12) if (page := pages.find(bytes([key, number]))) is not None]
            assert pages.free_without(found) == pages.free_count - sum(all(page not in held for held in holders) for page in found)
            pages.share(found)
            holders.append(found)
        elif action == "unlabel" and holders:
            pages.unlabel(holders[number % len(holders)])
            labelled = {page: key for page, key in labelled.items() if pages.find(key) == page}
        elif action == "forget" and number == 0:
            pages.forget()
            labelled.clear()
        pages.check_integrity(holders)
    for held in holders:
        pages.release(held)
    assert pages.free_count == 12


def cached(pages: int, more: int) -> tuple[PageAllocator, list[int]]:
    """So many pages with keys that nobody holds, and `more` without."""
    allocator = PageAllocator(pages + more)
    taken = allocator.allocate(pages)
    for page in taken:
        allocator.label(page, bytes([page]))
    allocator.release(taken)
    return allocator, taken


def test_the_end_of_what_was_given_back_together_is_evicted_first() -> None:
    allocator, (first, second, last) = cached(3, more=1)
    allocator.allocate(2)
    assert allocator.find(bytes([last])) is None and allocator.find(bytes([first])) == first and allocator.find(bytes([second])) == second


def test_an_emptied_cache_has_forgotten_what_is_held_too() -> None:
    allocator, (page, other) = cached(2, more=0)
    allocator.share([page])
    allocator.forget()
    assert allocator.find(bytes([page])) is None and allocator.find(bytes([other])) is None
    allocator.check_integrity([[page]])
