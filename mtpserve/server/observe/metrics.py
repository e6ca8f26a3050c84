"""Prometheus metrics: what the engine counts, read when scraped, and what only the front end can time.

The engine's counters are exported as counters, from the last statistics that it sent; nothing is counted
twice. The fields of these statistics have their metrics with them, in core/stats. Names follow Prometheus'
rules: base units, `_total` on counters only, no colons. One registry per
app. Peers' names are in dialects.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mtpserve import __version__
from mtpserve.core.protocols.clients import EngineClient
from mtpserve.core.request import ModelCard
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import EngineState
from mtpserve.server.observe.buckets import (
    FIRST_TOKEN_BUCKETS,
    LENGTH_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
)
from mtpserve.server.observe.dialects import OBSERVERS
from mtpserve.server.observe.observed import (
    OUTCOMES,
    Family,
    Observed,
    Observer,
    Recent,
    Row,
    Scrape,
)

LATENCIES = {  # what the page has percentiles of
    "first_token": "time_to_first_token_seconds",
    "between_tokens": "inter_token_latency_seconds",
    "whole_request": "e2e_request_latency_seconds",
}


# Names of 0.1 → the ones that they have now. Exported until the next release.
DEPRECATED = {
    "speculative_depth_changes": "spec_depth_changes",
    "speculative_trials": "spec_trials",
    "speculative_faults": "spec_faults",
    "speculative_steps": "spec_steps",
    "speculative_depth": "spec_depth",
    "speculative_suspended": "spec_suspended",
    "synthetic_acceptance": "spec_synthetic_acceptance",
}
# HTTP methods that requests are counted by; others are "other", since a client may send any word
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET"})


# What an engine's statistics do not say.
OF_ENGINES: tuple[tuple[str, str, Family, Callable[[EngineState], float]], ...] = (
    ("up", "1 while this engine takes requests.", GaugeMetricFamily, lambda engine: engine.state == "up"),
    (
        "restarts",
        "Times that this engine was started again.",
        CounterMetricFamily,
        lambda engine: engine.restarts_total,
    ),
    (
        "hangs",
        "Times that this engine gave no sign of life and was ended.",
        CounterMetricFamily,
        lambda engine: engine.hangs_total,
    ),
)


class MTPServe(Observer):
    prefix = "mtpserve_"
    finished = (
        (
            "time_per_output_token_seconds",
            "A finished request's mean time per token after its first.",
            TOKEN_BUCKETS,
            lambda observed: observed.per_token,
        ),
        (
            "e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            REQUEST_BUCKETS,
            lambda observed: observed.seconds,
        ),
        (
            "request_prompt_tokens",
            "Prompt tokens of a finished request.",
            LENGTH_BUCKETS,
            lambda observed: len(observed.request.prompt),
        ),
        (
            "request_generation_tokens",
            "Output tokens of a finished request.",
            LENGTH_BUCKETS,
            lambda observed: observed.tokens,
        ),
    )

    def __init__(
        self, registry: CollectorRegistry, scrape: Callable[[], Scrape], model: str, engines: int
    ) -> None:
        super().__init__(registry, scrape, {"model_name": model})
        self._first = self.histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._token = self.histogram(
            "inter_token_latency_seconds",
            "Time per token after the first: n tokens that arrive together share the wait.",
            TOKEN_BUCKETS,
        )
        self._gap = self.histogram(
            "step_gap_seconds",
            "Time between two arrivals of tokens for a request, of one token or several.",
            TOKEN_BUCKETS,
        )
        self._queue = self.histogram(
            "queue_time_seconds", "Time a request waited before the engine scheduled it.", REQUEST_BUCKETS
        )
        self._prompt = self.histogram(
            "prompt_time_seconds", "Time from a request's scheduling to its first token.", REQUEST_BUCKETS
        )
        self._outcomes = self.counter(
            "requests", f"Requests by how they ended: {', '.join(OUTCOMES)}.", outcome=OUTCOMES
        )
        self._plain = self.counter(
            "spec_disabled_requests", "Requests without drafts, by why: asked for none.", reason=("request",)
        )
        self._http = self.counter(
            "http_requests",
            "HTTP requests by the route's path, method and status; other: no route has the path.",
            route=(),
            method=(),
            status=(),
        )

    def http_request(self, route: str, method: str, status: int) -> None:
        """`route`: its path, as routes are written; "": the request's path has none."""
        self._http(route or "other", method if method in METHODS else "other", str(status)).inc()

    def families(self, now: Scrape) -> Iterable[Metric]:
        """All metrics in the order of docs/operating.md, then those that have an older name once more."""
        by_name: dict[str, Metric] = {}
        for metric in self._families(now):
            by_name[metric.name] = metric
            yield metric
        for older, name in DEPRECATED.items():
            yield renamed(by_name[self.prefix + name], self.prefix + older)

    def _families(self, now: Scrape) -> Iterator[Metric]:
        """Single values, values with labels, engines."""
        steps, stats_rows = now.card.speculative_steps, [((), now.stats)]
        yield from self.rows([], [("engine_up", "1 while an engine takes requests.", float(now.alive))])
        yield from self.of_stats(lambda entry: entry.series if entry.is_single else (), stats_rows, steps)
        yield from self.rows([bonus_tokens(now.stats)], gauges(now))
        yield self.family(
            GaugeMetricFamily,
            "build_info",
            "1, with the server's version and what it serves as labels.",
            [(build_of(now.card), 1)],
            "version",
            "model",
            "drafter",
            "device",
            "format",
        )
        yield self.family(
            GaugeMetricFamily,
            "spec_algorithm",
            "1, with --speculative-algorithm as the label.",
            [([now.card.algorithm or "none"], 1)],
            "algorithm",
        )
        yield self.family(
            GaugeMetricFamily,
            "weight_version",
            "1, with the version of the weights as the label.",
            [([now.stats.weight_version or "default"], 1)],
            "weight_version",
        )
        yield from self.of_stats(lambda entry: () if entry.is_single else entry.series, stats_rows, steps)
        for name, help, kind, fact in OF_ENGINES:
            values = [([str(engine.number)], float(fact(engine))) for engine in now.engines]
            yield self.family(kind, f"replica_{name}", help, values, "engine")
        engines = [([str(engine.number)], engine.stats) for engine in now.engines]
        yield from self.of_stats(lambda entry: entry.replicas, engines, steps, "engine")

    def step(self, seconds: float, tokens: int, engine: int) -> None:
        super().step(seconds, tokens, engine)
        self._gap.observe(seconds)

    def end(self, observed: Observed) -> None:
        super().end(observed)
        self._outcomes(observed.outcome).inc()
        if observed.request.sampling.speculation.depth == 0:
            self._plain("request").inc()
        if observed.times is not None:
            self._queue.observe(observed.times.queued)
            self._prompt.observe(observed.times.prompt)


def build_of(card: ModelCard) -> tuple[str, ...]:
    """Values of build_info's labels."""
    return (
        __version__,
        card.checkpoint or card.name,
        card.algorithm or "none",
        card.device,
        card.weight_format,
    )


def renamed(metric: Metric, name: str) -> Metric:
    """The same series under an older name."""
    current = f"{metric.name}_total" if metric.type == "counter" else metric.name
    copy = Metric(name, f"Deprecated, gone with the next release: use {current}.", metric.type)
    copy.samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples
    ]
    return copy


def acceptance_of(observed: Observed) -> dict[str, float]:
    """What became of a request's drafts, named as the metrics are."""
    drafts, accepted = observed.verifications, observed.accepted_tokens
    values: dict[str, float] = {
        "spec.drafts": drafts,
        "spec.draft_tokens": observed.proposed_tokens,
        "spec.accepted_tokens": accepted,
    }
    return values | {"spec.accept_length": 1 + accepted / drafts} if drafts > 0 else values


def bonus_tokens(stats: EngineStats) -> Row:
    verified = sum(tokens * count for tokens, count in enumerate(stats.accept_lengths, 1))
    help = "Tokens that the model itself added in verifications."
    return ("spec_bonus_tokens", help, verified - stats.accepted_tokens_total)


def gauges(now: Scrape) -> list[Row]:
    """What follows from several of the statistics, and what the model's card says."""
    stats, rates, card = now.stats, now.rates, now.card
    return [
        ("kv_page_usage_ratio", "Share of the KV pool's pages in use, 0 to 1.", stats.page_share),
        ("kv_page_tokens", "Tokens in one page.", card.page_size),
        ("context_tokens", "Tokens that prompt and output may have together.", card.context_length),
        (
            "generation_tokens_per_second",
            "Tokens generated per second, over the last 10 s.",
            rates.tokens_per_second,
        ),
        (
            "recent_cached_prompt_ratio",
            "Share of prompt tokens found in the prefix cache, over the last 10 s.",
            rates.cached_share,
        ),
        ("spec_num_steps", "Depth of the deepest drafts; 0: plain decoding.", card.speculative_steps),
        (
            "spec_depth",
            "Depth of the last choice.",
            card.speculative_steps if stats.depths is None else stats.depths.depth,
        ),
        (
            "spec_suspended",
            "1 while drafting is off since the draft model is at fault.",
            stats.draft_health.state == "suspended",
        ),
        (
            "spec_lossy",
            "1 where acceptance thresholds below 1 change what the model would say.",
            float(card.lossy),
        ),
        (
            "spec_synthetic_acceptance",
            "1 where drafts are accepted by lot, to measure the engine.",
            bool(card.synthetic_acceptance),
        ),
        (
            "spec_recent_accept_length",
            "Tokens per verification, over the last 10 s that had any.",
            rates.accept_length,
        ),
        (
            "spec_recent_accept_rate",
            "Accepted share of draft tokens, over the last 10 s that had any.",
            rates.accept_rate,
        ),
    ]


class Metrics:
    """One registry: ours, and for each of `dialects` the same facts once more."""

    def __init__(self, client: EngineClient, dialects: Sequence[str] = ()) -> None:
        # The library's only switch is global: without it each histogram brings a gauge of its creation time.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        recent = Recent()

        def scrape() -> Scrape:
            stats = client.stats()
            engines = client.engines
            return Scrape(
                stats,
                recent.rates(stats),
                client.card,
                any(engine.state == "up" for engine in engines),
                engines,
            )

        model, engines = client.card.name, len(client.engines)
        ours = MTPServe(self.registry, scrape, model, engines)
        self.http_request = ours.http_request
        self.observers: list[Observer] = [
            ours,
            *(OBSERVERS[name](self.registry, scrape, model, engines) for name in dialects),
        ]
        self.latencies = {name: ours.histograms[metric] for name, metric in LATENCIES.items()}
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
