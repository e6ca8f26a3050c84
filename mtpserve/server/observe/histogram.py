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
    """Observed for every token of every stream. The library's own histogram takes two locks for each value
    and walks its buckets."""

    def __init__(
        self,
        name: str,
        help: str,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        labels: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        """`labels`: one set of them for all engines, or one for each."""
        self._name, self._help, self._labels = name, help, labels
        self.bounds = [float(bound) for bound in buckets]
        self._counts = [[0] * (len(buckets) + 1) for _ in labels]
        self._sums = [0.0 for _ in labels]
        registry.register(self)

    def observe(self, value: float, times: int = 1, engine: int = 0) -> None:
        row = engine if len(self._sums) > 1 else 0
        self._counts[row][bisect_left(self.bounds, value)] += times
        self._sums[row] += value * times

    def counts(self) -> tuple[int, ...]:
        """Values in each bucket, of all engines together; the last bucket is above all bounds."""
        return tuple(map(sum, zip(*self._counts, strict=True)))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels[0]))
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        for labels, counts, sum_value in zip(self._labels, self._counts, self._sums, strict=True):
            buckets = [(name, float(count)) for name, count in zip(names, accumulate(counts), strict=True)]
            family.add_metric(list(labels.values()), buckets, sum_value=sum_value)
        yield family
