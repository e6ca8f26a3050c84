"""What a field of the engine's statistics is, and under which names servers export it.

The metadata of EngineStats' fields are the one table of these metrics: sums over engines, our metrics and
those under the peers' names derive from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]
Names = tuple[tuple[str, str], ...]  # a peer's names of one value, each with its help
# from a list or a dictionary, and the number of positions, to the values of the label with theirs
Parts = Callable[[Any, int], Sequence[tuple[str, float]]]


def added(values: Sequence[Any]) -> Any:
    """Numbers; lists place by place, dictionaries key by key."""
    if values and isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: sum(value.get(key, 0) for value in values) for key in keys}
    if values and isinstance(values[0], list):
        return [sum(column) for column in zip_longest(*values, fillvalue=0)]
    return sum(values)


@dataclass(frozen=True, slots=True)
class Series:
    """One exported metric. Its name has neither the prefix nor `_total`."""

    kind: Kind
    name: str
    help: str
    value: Callable[[Any], float] | None = None  # computes it from the field's value; None: that value


@dataclass(frozen=True, slots=True)
class Metric:
    """One field. What has the kind `state` is no number: it is told by its series alone."""

    kind: Kind | Literal["state"]
    series: tuple[Series, ...] = ()  # under our names
    vllm: tuple[Series, ...] = ()
    sglang: tuple[Series, ...] = ()
    replicas: tuple[Series, ...] = ()  # those that each engine has, beside the ones of all together
    label: str = ""  # the label of a list's or a dictionary's series
    parts: Parts | None = None
    bounds: tuple[int, ...] = ()  # a histogram's, without the infinite one; (): 1, 2, 3, …
    sum: str = ""  # the field with the sum of what a histogram counts; "": each is its bound
    total: Callable[[Sequence[Any]], Any] = added  # several engines' values as one

    @property
    def is_single(self) -> bool:
        """True if each series has one value without a label."""
        return self.kind != "histogram" and self.parts is None


def counter(name: str = "", help: str = "", of: Callable[[], Any] = int, **more: Any) -> Any:
    """A field that only grows, and outlives its engine in the totals. `of`: int, list or dict; `more`: as in
    `_entry`. No name: it is not exported by itself."""
    return _entry("counter", name, help, of, **more)


def gauge(name: str = "", help: str = "", of: Callable[[], Any] = int, **more: Any) -> Any:
    """A field that says how things are now."""
    return _entry("gauge", name, help, of, **more)


def histogram(name: str, help: str, **more: Any) -> Any:
    """A field with the counts of buckets, the last one without a bound where `bounds` are given."""
    return _entry("histogram", name, help, list, **more)


def state(of: Callable[[], Any], total: Callable[[Sequence[Any]], Any], *series: Series) -> Any:
    """A field that is an object, of several engines combined by `total`."""
    return _field(of, Metric("state", series, total=total))


def _entry(
    kind: Kind,
    name: str,
    help: str,
    of: Callable[[], Any],
    *,
    replica: str = "",
    vllm: Names = (),
    sglang: Names = (),
    label: str = "",
    parts: Parts | None = None,
    bounds: tuple[int, ...] = (),
    sum: str = "",
) -> Any:
    def series(names: Names) -> tuple[Series, ...]:
        return tuple(Series(kind, *pair) for pair in names)

    ours = series(((name, help),)) if name else ()
    replicas = series(((f"replica_{name}", replica),)) if replica else ()
    metric = Metric(kind, ours, series(vllm), series(sglang), replicas, label, parts, bounds, sum)
    return _field(of, metric)


def _field(of: Callable[[], Any], metric: Metric) -> Any:
    start = of()
    if start is None or isinstance(start, int):
        return field(default=start, metadata={"metric": metric})
    return field(default_factory=of, metadata={"metric": metric})


def metrics_of(stats: type[Any]) -> dict[str, Metric]:
    """By the fields' names, in their order. Raises KeyError for a field that is not in the table."""
    return {one.name: one.metadata["metric"] for one in fields(stats)}


# -- the labels of lists and dictionaries ----------------------------------------------------------------


def depths(counts: list[int], steps: int) -> list[tuple[str, float]]:
    """Element i is that of depth i."""
    return [(str(depth), count) for depth, count in enumerate(counts[: steps + 1])]


def positions(counts: list[int], steps: int) -> list[tuple[str, float]]:
    """Element i is that of position i + 1."""
    padded = counts + [0] * (steps - len(counts))
    return [(str(position), count) for position, count in enumerate(padded, 1)]


def named(*names: str) -> Parts:
    """One series for each of these keys alone; a key without a count is zero."""

    def parts(counts: Mapping[str, float], steps: int) -> list[tuple[str, float]]:
        return [(name, counts.get(name, 0)) for name in names]

    return parts


def all_keys(counts: Mapping[str, float], steps: int) -> list[tuple[str, float]]:
    return list(counts.items())
