"""What the front end measures of each request, and the base of each set of names under which it is exported:
ours in metrics.py, those of peers in dialects.py."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate, product
from time import monotonic, perf_counter
from typing import ClassVar, Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mtpserve.core.request import FirstTokenTimes, ModelCard, Request
from mtpserve.core.stats.engine_stats import METRICS, EngineStats
from mtpserve.core.stats.metric import Kind, Metric as Entry, Series
from mtpserve.core.stats.reports import EngineState
from mtpserve.server.http.redaction import redacted
from mtpserve.server.observe.histogram import LoopHistogram

# route of this context's request; "": it came by none
ROUTE: ContextVar[str] = ContextVar("route", default="")
WINDOW_S = 10.0
SAMPLE_S = 1.0
OUTCOMES = ("stop", "length", "abort", "error", "rejected")
FINISHED = ("stop", "length")


@dataclass(slots=True)
class Observed:
    """One request, as far as it came. Durations are in seconds."""

    request: Request
    streaming: bool
    engine: int = 0  # that has it, or had it last
    tokens: int = 0
    first_token: float | None = None  # from arrival
    decoding: float = 0.0  # from the first token to the last
    times: FirstTokenTimes | None = None
    cached: int = 0  # prompt tokens that were found in the prefix cache
    verifications: int = 0
    proposed_tokens: int = 0  # that were verified
    accepted_tokens: int = 0  # that are in the text
    outcome: str = "abort"
    seconds: float = 0.0  # from arrival to the end
    error_type: str = ""  # the exception's class, where the outcome is an error or a refusal
    error: str = ""  # its text, without texts of the client

    @property
    def finished(self) -> bool:
        return self.outcome in FINISHED

    @property
    def computed(self) -> int:
        """Prompt tokens that were not in the prefix cache."""
        return len(self.request.prompt) - self.cached

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first."""
        return self.decoding / (self.tokens - 1) if self.tokens > 1 else None


class RequestObserver(Protocol):
    """Who is told of a request while it runs: see Observer."""

    def first_token(self, seconds: float, engine: int) -> None: ...

    def step(self, seconds: float, tokens: int, engine: int) -> None: ...

    def end(self, observed: Observed) -> None: ...


class RequestClock:
    """Times one request. `arrival` is perf_counter's; `where` gives the engine that has the request; `route`
    is the one it came by."""

    def __init__(
        self,
        observers: Sequence[RequestObserver],
        request: Request,
        arrival: float,
        streaming: bool,
        where: Callable[[str], int],
        route: str = "",
    ) -> None:
        self._observers, self._where = observers, where
        self.observed = Observed(request, streaming)
        self.arrival = arrival
        self.route = route
        self._last = arrival

    @property
    def engine(self) -> int:
        return self._where(self.observed.request.id)

    def tokens(self, count: int, times: FirstTokenTimes | None, cached: int = 0) -> None:
        if count == 0:
            return
        observed, now = self.observed, perf_counter()
        gap, self._last = now - self._last, now
        observed.tokens += count
        observed.engine = self.engine
        if observed.first_token is None:
            observed.first_token, observed.times, observed.cached = gap, times, cached
            for observer in self._observers:
                observer.first_token(gap, observed.engine)
        else:
            observed.decoding += gap
            for observer in self._observers:
                observer.step(gap, count, observed.engine)

    def verified(self, proposed: int, accepted: int) -> None:
        """A step's tokens, at least one of them proposed."""
        self.observed.verifications += 1
        self.observed.proposed_tokens += proposed
        self.observed.accepted_tokens += accepted

    def fail(self, error: Exception) -> None:
        """Notes what the request ends with; `end` follows."""
        self.observed.error_type, self.observed.error = type(error).__name__, redacted(str(error))

    def end(self, outcome: str) -> None:
        self.observed.outcome = outcome
        self.observed.seconds = perf_counter() - self.arrival
        for observer in self._observers:
            observer.end(self.observed)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`at` in seconds of the clock."""

    at: float
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Rates:
    """`accept_…` are None until the first verification, and keep their values while nothing is verified; so
    does `cached_share`, of prompt tokens."""

    tokens_per_second: float
    accept_length: float | None
    accept_rate: float | None
    cached_share: float | None


def cached_share(stats: EngineStats, before: EngineStats) -> float | None:
    """Share of the prompt tokens since `before` that the cache had; None: there were none."""
    prompts = stats.prompt_tokens_total - before.prompt_tokens_total
    return (
        (stats.cached_prompt_tokens_total - before.cached_prompt_tokens_total) / prompts if prompts else None
    )


class Recent:
    """Rates over the last seconds, for readers without PromQL's `rate` and for dashboards made for SGLang and
    vLLM.

    A window of at least WINDOW_S seconds that ends now. Reading it has no effect on other readers.

    samples   | s0 | s1 | s2 | … | now      s0: the youngest that is WINDOW_S old or older, or the first
              └──── the window ────┘
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._samples = deque([Snapshot(clock(), EngineStats())])
        self._length: float | None = None
        self._rate: float | None = None
        self._cached: float | None = None

    def rates(self, stats: EngineStats) -> Rates:
        now = Snapshot(self._clock(), replace(stats))
        samples = self._samples
        while len(samples) > 1 and samples[1].at <= now.at - WINDOW_S:
            samples.popleft()
        then = samples[0]
        if now.at - samples[-1].at >= SAMPLE_S:
            samples.append(now)
        length, rate = stats.accept_length(then.stats), stats.accept_rate(then.stats)
        self._length, self._rate = (self._length, self._rate) if length is None else (length, rate)
        cached = cached_share(stats, then.stats)
        self._cached = self._cached if cached is None else cached
        tokens, seconds = stats.generation_tokens_total - then.stats.generation_tokens_total, now.at - then.at
        return Rates(tokens / seconds if seconds > 0 else 0.0, self._length, self._rate, self._cached)


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape sees of the engine."""

    stats: EngineStats
    rates: Rates
    card: ModelCard
    alive: bool
    engines: Sequence[EngineState]


def buckets(counts: list[int], bounds: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """What the engine has counted in each bucket, as Prometheus has it, and the sum where each value is its
    bound."""
    totals = accumulate(counts + [0] * (len(bounds) - len(counts)))
    names = map(floatToGoString, bounds)
    named = [(name, float(count)) for name, count in zip(names, totals, strict=False)]
    total = sum(bound * count for bound, count in zip(bounds, counts, strict=False))
    return [*named, ("+Inf", float(sum(counts)))], total


Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
FAMILIES: dict[Kind, Family] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
Counted = tuple[Sequence[str], EngineStats]  # values of further labels, and the statistics that have them
Row = tuple[str, str, float | None]  # name, help, value; None: not known yet
# name, help, buckets, a request's value, if it has one
Measure = tuple[str, str, Sequence[float], Callable[[Observed], float | None]]


class Observer(Collector):
    """One set of names: reads the engine at each scrape, and is told of each request. Every metric has the
    prefix and the labels."""

    prefix: ClassVar[str]
    finished: ClassVar[tuple[Measure, ...]]  # histograms of finished requests
    _first: LoopHistogram
    _token: LoopHistogram

    def __init__(
        self,
        registry: CollectorRegistry,
        scrape: Callable[[], Scrape],
        labels: dict[str, str],
        engines: int = 0,
    ) -> None:
        """`engines`: of so many each has histograms of its own, with its number as the label `engine`; 0:
        they are of all together."""
        self._registry, self._scrape, self._labels = registry, scrape, labels
        self.histograms: dict[str, LoopHistogram] = {}  # by their names without the prefix
        self._rows = [labels | {"engine": str(number)} for number in range(engines)] or [labels]
        registry.register(self)
        self._finished = [
            (self.histogram(name, help, buckets), value) for name, help, buckets, value in self.finished
        ]

    def collect(self) -> Iterable[Metric]:
        return self.families(self._scrape())

    @abstractmethod
    def families(self, now: Scrape) -> Iterable[Metric]: ...

    def first_token(self, seconds: float, engine: int) -> None:
        self._first.observe(seconds, engine=engine)

    def step(self, seconds: float, tokens: int, engine: int) -> None:
        """Tokens that came together, `seconds` after those before them: they share the wait."""
        self._token.observe(seconds / tokens, tokens, engine)

    def end(self, observed: Observed) -> None:
        for histogram, value in self._finished if observed.finished else ():
            if (measured := value(observed)) is not None:
                histogram.observe(measured, engine=observed.engine)

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> LoopHistogram:
        loop_histogram = self.histograms[name] = LoopHistogram(
            self.prefix + name, help, buckets, self._registry, self._rows
        )
        return loop_histogram

    def counter(self, name: str, help: str, **values: Sequence[str]) -> Callable[..., Counter]:
        """A counter by the values of further labels. Series of `values` exist from the start."""
        metric = Counter(self.prefix + name, help, [*self._labels, *values], registry=self._registry)

        def child(*label_values: str) -> Counter:
            return metric.labels(*self._labels.values(), *label_values)

        for combination in product(*values.values()):
            child(*combination)
        return child

    def family(
        self, kind: Family, name: str, help: str, values: Iterable[tuple[Sequence[str], float]], *labels: str
    ) -> Metric:
        """Each value with those of the further `labels`."""
        metric = kind(self.prefix + name, help, labels=[*self._labels, *labels])
        for label_values, value in values:
            metric.add_metric([*self._labels.values(), *label_values], value)
        return metric

    def of_stats(
        self, names: Callable[[Entry], Iterable[Series]], rows: Sequence[Counted], steps: int, *labels: str
    ) -> Iterator[Metric]:
        """The fields of the engine's statistics under these of their names. `rows` have values of the further
        `labels`; `steps`: how many positions there are."""
        for field, entry in METRICS.items():
            for series in names(entry):
                yield self._of_field(field, entry, series, rows, steps, *labels)

    def _of_field(
        self, field: str, entry: Entry, series: Series, rows: Sequence[Counted], steps: int, *labels: str
    ) -> Metric:
        if entry.kind == "histogram":
            metric = HistogramMetricFamily(
                self.prefix + series.name, series.help, labels=[*self._labels, *labels]
            )
            for label_values, stats in rows:
                counts: list[int] = getattr(stats, field)
                bounds = entry.bounds or range(1, max(steps + 1, len(counts)) + 1)
                samples, total = buckets(counts, bounds)
                metric.add_metric(
                    [*self._labels.values(), *label_values],
                    samples,
                    getattr(stats, entry.sum) if entry.sum else total,
                )
            return metric
        values: list[tuple[Sequence[str], float]] = []
        for label_values, stats in rows:
            value = getattr(stats, field)
            if entry.parts is None:
                values.append((label_values, value if series.value is None else series.value(value)))
            else:
                values += [
                    ([*label_values, label_value], count) for label_value, count in entry.parts(value, steps)
                ]
        further = labels if entry.parts is None else (*labels, entry.label)
        return self.family(FAMILIES[series.kind], series.name, series.help, values, *further)

    def rows(self, counters: Iterable[Row], gauges: Iterable[Row]) -> Iterator[Metric]:
        for kind, rows in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, help, value in rows:
                if value is not None:
                    yield self.family(kind, name, help, [((), value)])
