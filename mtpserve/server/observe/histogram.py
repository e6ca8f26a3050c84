"""A histogram of the event loop's own thread, as Prometheus reads it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """Observed for every token of every stream. The library's own histogram takes two locks for each value and walks its buckets."""

    def __init__(
        self, name: str, help: str, buckets: Sequence[float], registry: CollectorRegistry, labels: Mapping[str, str] | None = None
    ) -> None:
        self._name, self._help, self._labels = name, help, dict(labels or {})
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]
        family.add_metric(list(self._labels.values()), buckets, sum_value=self._sum)
        yield family
