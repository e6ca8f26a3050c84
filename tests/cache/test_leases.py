"""Pages under a name that another node may read, by a clock that the test moves."""

from __future__ import annotations

import pytest

from mtpserve.cache.leases import Leases, Place

PAGES: dict[Place, int] = {(0, b"a"): 1, (0, b"b"): 2}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    return Leases(10.0, clock)


def test_a_lease_is_found_until_its_time_is_over(leases: Leases, clock: Clock) -> None:
    leases.offer("one", PAGES)
    clock.now = 9.0
    assert leases.find("one", False, 0) == PAGES and leases.holds("one", PAGES) and not leases.holds("one", [(1, b"a")])
    clock.now = 10.0
    assert leases.find("one", False, 0) is None and not leases.holds("one", PAGES)
    assert leases.take_ended() == [PAGES] and leases.take_ended() == [] and leases.expired == 1 and not leases.is_open


def test_what_was_read_or_is_not_to_be_relied_on_ends(leases: Leases) -> None:
    for name in ("one", "two"):
        leases.offer(name, PAGES)
    leases.release("one", 2, 100, 0.1)
    leases.withdraw([b"b"])
    assert leases.take_ended() == [PAGES, PAGES] and leases.open_pages == 0


def test_nobody_waits_for_a_prompt_that_will_not_be_computed(leases: Leases) -> None:
    leases.expect("one")
    assert not leases._settled("one", waits=False) and not leases._settled("two", waits=True)
    for name in ("one", "two"):
        leases.refuse(name)
        assert leases._settled(name, waits=True) and leases.find(name, True, 0) is None
