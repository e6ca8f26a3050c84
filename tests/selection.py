"""Which tests run: `make test` takes a selection that covers, `make test-all` (`pytest --all`) takes all.

The selection has three rules:

- Of a test function's cases it takes those that cover each pair of parameter values: a pairwise covering array (Cohen, Dalal, Fredman and
  Patton, "The AETG system", 1997). `@pytest.mark.covering(1)`, on a function or a module, asks for each value once.
- It leaves out what has the mark `thorough`: cases that another one implies, and laws over many seeds.
- hypothesis draws few examples, the same ones in each run: see `examples`.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

ALL = os.environ.get("MTPSERVE_TEST_ALL") == "1"  # set by tests/conftest.py: modules read it while they are imported
FEWER_EXAMPLES = 8

Case = tuple[tuple[str, int], ...]  # parameter and identity of its value


def examples(count: int) -> settings:
    """For `@given`: `count` examples at random with --all, else an eighth of them and at least five, the same in each run."""
    return settings(
        max_examples=count if ALL else max(count // FEWER_EXAMPLES, 5),
        derandomize=not ALL,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def every_nth(cases: Mapping[str, tuple[Any, ...]], n: int) -> list[ParameterSet]:
    """For `parametrize`: arguments by id, of which `make test` takes numbers n-1, 2n-1, …; the others are thorough."""
    return [
        pytest.param(*arguments, id=name, marks=() if number % n == n - 1 else pytest.mark.thorough)
        for number, (name, arguments) in enumerate(cases.items())
    ]


def covering(cases: Sequence[Case], strength: int) -> list[int]:
    """The positions of cases that cover each combination of `strength` values which occurs: the greedy algorithm, ascending."""
    sets = [frozenset(combinations(case, min(strength, len(case)))) for case in cases]
    uncovered = set[tuple[tuple[str, int], ...]]().union(*sets)
    # A case never covers more than when it was looked at last: the first one whose number is still true is the best.
    queue = [(-len(combined), i) for i, combined in enumerate(sets)]
    heapq.heapify(queue)
    chosen = list[int]()
    while uncovered:
        gain, i = heapq.heappop(queue)
        if (now := -len(sets[i] & uncovered)) != gain:
            heapq.heappush(queue, (now, i))
            continue
        chosen.append(i)
        uncovered -= sets[i]
    return sorted(chosen)


def selected(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of `items` those that `make test` runs, in their order."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thorough") is None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set[int]()
    for cases in functions.values():
        marker = cases[0].get_closest_marker("covering")
        chosen |= {id(cases[i]) for i in covering([parameters(case) for case in cases], marker.args[0] if marker else 2)}
    return [item for item in items if id(item) in chosen]


def parameters(item: pytest.Item) -> Case:
    """By the identity of values, which cases share: callspec.indices numbers the cases of arguments that are no fixtures' through."""
    callspec = getattr(item, "callspec", None)
    return () if callspec is None else tuple(sorted((name, id(value)) for name, value in callspec.params.items()))
