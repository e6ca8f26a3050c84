"""Pages of requests, group by group: full attention keeps all columns, a window those that a later row sees."""

from __future__ import annotations

import pytest

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.pages import PageError
from mtpserve.core.arch.model import Attention, KVLayout, page_groups
from mtpserve.core.state.cache_state import BlockList

PAGE, CHUNK, AHEAD = 4, 8, 3


def made(full: int = 40, window: int = 8) -> PageGroups:
    """A window of 6 tokens: a request holds at most ⌈(6 + 8 + 3) / 4⌉ + 1 = 6 pages of it."""
    return PageGroups([None, 6], [full, window], PAGE, CHUNK)


def test_the_windows_of_layers_are_the_groups() -> None:
    kv, other = KVLayout("gqa", 2, 8, 8), KVLayout("gqa", 1, 8, 8)
    layers = [Attention(kv, 8), Attention(kv), Attention(other, 8), Attention(kv, 3)]
    assert page_groups(layers) == (None, 3, 8)
    assert page_groups(layers[2:]) == (3, 8)


def test_a_long_request_moves_through_a_window() -> None:
    groups = made()
    held = groups.seat([], 0, 100, AHEAD)
    assert held is not None and [len(each.pages) for each in held] == [26, 6]
    for start in range(0, 100, CHUNK):
        end = min(start + CHUNK, 100)
        assert held[1].end * PAGE >= min(end + AHEAD, 100) and held[1].first * PAGE <= max(start - 5, 0)
        groups.advance(held, end)
        assert len(held[1].pages) <= 6 and held[1].first == max(end - 5, 0) // PAGE
        missing = groups.missing(held, end, 100, AHEAD)
        assert missing[0] == 0 and groups.are_free(missing)
        groups.extend(held, missing)
        groups.check_integrity([held])
    assert held[0].first == 0 and len(held[0].pages) == 26
    groups.release(held)
    groups.check_integrity([[]])
    assert groups.num_used_pages == 0


def test_nothing_is_taken_where_one_group_lacks_pages() -> None:
    for groups in (made(full=25), made(window=5)):
        assert groups.seat([], 0, 100, AHEAD) is None and groups.num_used_pages == 0


def test_what_is_shared_is_held_by_both() -> None:
    groups = made()
    first = groups.seat([], 0, 22, AHEAD)
    assert first is not None
    keys = [bytes([column]) for column in range(5)]
    assert not groups.label(first, keys, 0, 5)
    groups.advance(first, 16)
    assert groups.matched(keys) == groups.matched(keys, 3) == 5
    second = groups.seat(keys, 20, 22, AHEAD)
    assert second is not None and [each.first for each in second] == [0, 3]
    assert second[0].pages[:5] == first[0].pages[:5] and second[1].pages[:2] == first[1].pages[1:3]
    groups.check_integrity([first, second])
    groups.advance(first, 40)
    groups.check_integrity([first, second])
    groups.release(second)
    with pytest.raises(PageError):
        groups.check_integrity([first, second])


def test_a_prefix_ends_before_a_page_that_its_next_row_would_miss() -> None:
    """Full attention needs all columns; a window of 6 tokens, in pages of 4, the last two or three."""
    groups, keys = made(), [bytes([column]) for column in range(6)]
    held = groups.seat([], 0, 24, AHEAD)
    assert held is not None
    groups.label(held, keys, 0, 6)
    groups.release(held)
    full, window = (group.allocator for group in groups.groups)
    page = window.find(keys[3])
    assert page is not None
    window.share([page])
    window.unlabel([page])
    assert groups.matched(keys) == 6, "what follows column 5 does not see column 3"
    assert groups.matched(keys[:5]) == 3, "what follows column 4 does"
    page = full.find(keys[1])
    assert page is not None
    full.share([page])
    full.unlabel([page])
    assert groups.matched(keys) == 1
    groups.forget()
    assert groups.matched(keys) == 0 and groups.cached == 0


def test_equal_pages_are_held_once() -> None:
    groups, keys = made(), [b"0", b"1"]
    one, other = groups.seat([], 0, 8, AHEAD), groups.seat([], 0, 8, AHEAD)
    assert one is not None and other is not None
    used = groups.num_used_pages
    assert not groups.label(one, keys, 0, 2)
    assert groups.label(other, keys, 0, 2)
    assert groups.num_used_pages == used - 4 and [each.planned_end for each in other] == [0, 0]
    groups.check_integrity([one, other])


def test_how_much_one_request_may_have() -> None:
    assert made().capacity(AHEAD) == 40 * PAGE - AHEAD
    assert made(window=6).capacity(AHEAD) == 40 * PAGE - AHEAD
    assert made(window=5).capacity(AHEAD) == 5 * PAGE - AHEAD, "the window's pages do not come round"
    assert PageGroups([6], [6], PAGE, CHUNK).capacity(AHEAD) > 1 << 40
    assert BlockList(3, [7, 8]).end == 5


def labelled(groups: PageGroups, number: int, keys: list[bytes]) -> None:
    """Pages of one group with these keys, which nobody holds."""
    allocator = groups.groups[number].allocator
    pages = allocator.allocate(len(keys))
    for page, key in zip(pages, keys, strict=True):
        allocator.label(page, key)
    allocator.release(pages)


def test_a_prefix_that_one_window_makes_shorter_must_be_there_in_the_others() -> None:
    groups, keys = PageGroups([None, 5, 9], [40, 40, 40], PAGE, CHUNK), [bytes([i]) * 16 for i in range(8)]
    labelled(groups, 0, keys)
    labelled(groups, 1, [keys[6], keys[7], keys[2], keys[3]])  # what rows after 8 columns see, and after 4
    labelled(groups, 2, keys[2:6])  # and here after 6, and after 5
    # After 6 and after 5 columns the first window lacks pages, after 4 the second one does.
    assert groups.matched(keys) == 0


def test_a_state_is_the_page_of_the_column_before() -> None:
    groups, keys = PageGroups([None], [40], PAGE, CHUNK, states=2), [bytes([i]) * 16 for i in range(6)]
    labelled(groups, 0, keys)
    assert groups.matched(keys) == 0 and groups.matched_without_states(keys) == 6
    labelled(groups, 1, [keys[3]])
    assert groups.matched(keys) == 4 and groups.required_columns(4) == [range(4), range(3, 4)]
    held = groups.seat(keys[:4], 16, 40, AHEAD)
    assert held is not None and groups.state_of(held) == groups.groups[1].allocator.find(keys[3])
    # The one that it starts from stays until the next step is planned; another may be kept meanwhile, and no third one.
    first, kept = groups.state_of(held), groups.keep_state(held, 5)
    assert kept not in (None, first) and groups.keep_state(held, 6) is None
    groups.check_integrity([held])
    groups.label(held, keys, 4, 6)
    groups.settle()
    assert groups.groups[1].allocator.find(keys[5]) == kept and groups.matched(keys) == 6
    groups.unlabel_states(keys)
    assert groups.matched(keys) == 0
    groups.release(held)
    groups.check_integrity([[]])


def test_a_state_that_the_planned_step_reads_is_nobody_else_s() -> None:
    groups, keys = PageGroups([None], [40], PAGE, CHUNK, states=2), [bytes([i]) * 16 for i in range(6)]
    labelled(groups, 0, keys)
    labelled(groups, 1, [keys[3]])
    held = groups.seat(keys[:4], 16, 40, AHEAD)
    assert held is not None
    first = groups.state_of(held)
    assert groups.keep_state(held, 5) not in (None, first) and groups.take_state() is None
    groups.settle()
    assert groups.take_state() == first
