"""The selection of `make test` covers what it says."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from tests.selection import Case, covering, selected

COUNTS = (4, 3, 3, 2, 2)


def combined(cases: list[Case], strength: int) -> set[Case]:
    return {values for case in cases for values in combinations(case, strength)}


def all_cases() -> list[Case]:
    return [tuple(zip("abcde", values, strict=True)) for values in product(*map(range, COUNTS))]


@pytest.mark.parametrize(("strength", "most"), [(1, 5), (2, 16)])
def test_each_combination_is_covered_by_few_cases(strength: int, most: int) -> None:
    cases = all_cases()
    chosen = [cases[i] for i in covering(cases, strength)]
    assert combined(chosen, strength) == combined(cases, strength)
    assert len(chosen) <= most < len(cases) == 144


def test_what_has_fewer_parameters_is_kept() -> None:
    single: list[Case] = [(("a", 0),), (("a", 1),), (("a", 2),)]
    assert covering(single, 2) == [0, 1, 2] and covering([()], 2) == [0]
    pairs: list[Case] = [(("a", i), ("b", j)) for i, j in product(range(3), range(2))]
    assert covering(pairs, 2) == list(range(6)) and len(covering(pairs, 1)) == 3


class Item:
    """What the selection reads of an item of pytest."""

    def __init__(self, function: str, marks: dict[str, tuple[int, ...]] | None = None, **params: object) -> None:
        self.nodeid, self.marks = f"tests/test_a.py::{function}[{params}]", marks or {}
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=self.marks[name]) if name in self.marks else None


def number(*items: Item) -> int:
    chosen = selected(items)  # type: ignore[arg-type]
    assert chosen == [item for item in items if item in chosen], "in their order"
    return len(chosen)


def test_items_are_selected() -> None:
    three, two = range(3), ("x", "y")
    assert number(*(Item("pairs", a=a, b=b, c=c) for a, b, c in product(three, three, three))) in (9, 10, 11)
    assert number(*(Item("values", {"covering": (1,)}, a=a, b=b) for a, b in product(three, two))) == 3
    assert number(Item("long", {"thorough": ()})) == 0
    assert number(Item("some", a=0), Item("some", {"thorough": ()}, a=1)) == 1
    assert number(Item("one", a=0), Item("other", a=0)) == 2, "each function has its own cases"
