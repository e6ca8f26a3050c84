"""Cases along a diagonal: what `make test` takes of combinations that seldom matter and are slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def diagonal(*axes: Mapping[str, Any] | Iterable[str]) -> list[ParameterSet]:
    """All combinations of one value from each axis, for one `parametrize`; the axes map ids to values, or have ids for values.

    Without --all, as many cases as the longest axis has values: its next value comes with the next value of each other axis, which
    begin again at their ends. A covering array of strength one takes the first values again and again instead."""
    named = [list(axis.items()) if isinstance(axis, Mapping) else [(value, value) for value in axis] for axis in axes]
    longest = max(range(len(named)), key=lambda i: len(named[i]))
    cases = []
    for places in product(*(range(len(axis)) for axis in named)):
        on_it = all(place == places[longest] % len(axis) for place, axis in zip(places, named, strict=True))
        chosen = [axis[place] for place, axis in zip(places, named, strict=True)]
        marks = [] if on_it else [pytest.mark.thorough]
        cases.append(pytest.param(*(value for _, value in chosen), id="-".join(name for name, _ in chosen), marks=marks))
    return cases
