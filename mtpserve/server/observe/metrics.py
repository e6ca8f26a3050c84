"""Prometheus metrics: what the engine counts, read when scraped, and what only the front end can time.

The engine's counters are exported as counters, from the last statistics that it sent; nothing is counted twice. Names follow
Prometheus' rules: base units, `_total` on counters only, no colons. One registry per app. Peers' names are in dialects.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mtpserve.core.protocols import EngineClient
from mtpserve.server.observe.dialects import observer_of
from mtpserve.server.observe.histogram import LoopHistogram
from mtpserve.server.observe.observed import OUTCOMES, EngineView, Observed, Observer, Scrape

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120, 300)
TOKEN_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120, 300, 600, 1200)
LENGTH_BUCKETS = tuple(4**power for power in range(10))  # tokens: 1 … 262144


class EngineCollector(Collector):
    def __init__(self, engine: EngineView) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        now = self._engine.scrape()
        yield from counters(now)
        yield from gauges(now)
        stats, steps = now.stats, now.card.speculative_steps
        yield per_position("draft", "verified", stats.draft_tokens_per_position, steps)
        yield per_position("accepted", "accepted", stats.accepted_tokens_per_position, steps)
        yield accept_length(stats.accept_lengths, steps)
        yield by_source("draft", "verified", stats.draft_tokens_by_source)
        yield by_source("accepted", "accepted", stats.accepted_tokens_by_source)


def counters(now: Scrape) -> Iterable[Metric]:
    stats = now.stats
    verified = sum(tokens * count for tokens, count in enumerate(stats.accept_lengths, 1))
    for name, help, count in (
        ("engine_steps", "Steps that the engine has run.", stats.steps_total),
        ("prompt_tokens", "Prompt tokens of requests that got their first token.", stats.prompt_tokens_total),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens_total),
        ("preemptions", "Times that a running request lost its pages to another and was computed again.", stats.preemptions_total),
        ("failed_requests", "Requests that ended with an error in the engine.", stats.failed_requests_total),
        ("spec_drafts", "Verifications that had at least one draft token.", stats.drafts_total),
        ("spec_draft_tokens", "Draft tokens verified.", stats.draft_tokens_total),
        ("spec_accepted_tokens", "Draft tokens accepted.", stats.accepted_tokens_total),
        ("spec_bonus_tokens", "Tokens that the model itself added in verifications.", verified - stats.accepted_tokens_total),
    ):
        yield CounterMetricFamily(f"mtpserve_{name}", help, value=count)


def gauges(now: Scrape) -> Iterable[Metric]:
    stats, rates, card = now.stats, now.rates, now.card
    for name, help, value in (
        ("engine_up", "1 while the engine's process lives.", float(now.alive)),
        ("requests_running", "Requests that the engine is computing.", stats.running),
        ("requests_waiting", "Requests that wait for the engine.", stats.waiting),
        ("kv_pages", "Pages in the KV pool.", stats.pages_total),
        ("kv_pages_used", "Pages of the KV pool in use.", stats.pages_used),
        ("kv_page_usage_ratio", "Share of the KV pool's pages in use, 0 to 1.", now.page_share),
        ("kv_page_tokens", "Tokens in one page.", card.page_size),
        ("context_tokens", "Tokens that prompt and output may have together.", card.context_length),
        ("generation_tokens_per_second", "Tokens generated per second, over the last 10 s.", rates.tokens_per_second),
        ("spec_num_steps", "Depth of the drafts; 0: plain decoding.", card.speculative_steps),
        ("spec_lossy", "1 where acceptance thresholds below 1 change what the model would say.", float(card.lossy)),
        ("synthetic_acceptance", "1 where drafts are accepted by lot, to measure the engine.", bool(card.synthetic_acceptance)),
        ("spec_recent_accept_length", "Tokens per verification, over the last 10 s that had any.", rates.accept_length),
        ("spec_recent_accept_rate", "Accepted share of draft tokens, over the last 10 s that had any.", rates.accept_rate),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"mtpserve_{name}", help, value=value)


def per_position(name: str, done: str, counts: list[int], steps: int) -> Metric:
    padded = counts + [0] * (steps - len(counts))
    help = f"Draft tokens {done}, by position in the draft, 1 first."
    return labelled(f"{name}_tokens_per_position", help, "position", {str(place): count for place, count in enumerate(padded, 1)})


def by_source(name: str, done: str, counts: dict[str, int]) -> Metric:
    return labelled(f"{name}_tokens_by_source", f"Draft tokens {done}, by who proposed them.", "source", counts)


def labelled(name: str, help: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"mtpserve_spec_{name}", help, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def accept_length(counts: list[int], steps: int) -> Metric:
    """`counts[n]` verifications committed n + 1 tokens."""
    counts = counts + [0] * (steps + 1 - len(counts))
    buckets = [(str(float(length)), float(total)) for length, total in enumerate(accumulate(counts), 1)]
    family = HistogramMetricFamily("mtpserve_spec_accept_length", "Tokens committed by one verification: accepted drafts and one more.")
    family.add_metric([], [*buckets, ("+Inf", sum(counts))], sum_value=sum(n * count for n, count in enumerate(counts, 1)))
    return family


class Requests(Observer):
    """What the front end observes of each request, under our names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help: str, buckets: Sequence[float]) -> LoopHistogram:
            return LoopHistogram(f"mtpserve_{name}", help, buckets, registry)

        def counter(name: str, help: str, label: str, values: Sequence[str]) -> Counter:
            made = Counter(f"mtpserve_{name}", help, [label], registry=registry)
            for value in values:
                made.labels(value)
            return made

        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS)
        self._token = histogram(
            "inter_token_latency_seconds", "Time per token after the first: n tokens that arrive together share the wait.", TOKEN_BUCKETS
        )
        self._gap = histogram("step_gap_seconds", "Between two arrivals of tokens for a request, however many came.", TOKEN_BUCKETS)
        self._mean = histogram("time_per_output_token_seconds", "A finished request's mean time per token after its first.", TOKEN_BUCKETS)
        self._queue = histogram("queue_time_seconds", "From a request's arrival in the engine to its seat.", REQUEST_BUCKETS)
        self._prompt = histogram("prompt_time_seconds", "From a request's seat to its first token.", REQUEST_BUCKETS)
        self._request = histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", REQUEST_BUCKETS)
        self._asked = histogram("request_prompt_tokens", "Prompt tokens of a finished request.", LENGTH_BUCKETS)
        self._answered = histogram("request_generation_tokens", "Output tokens of a finished request.", LENGTH_BUCKETS)
        self._outcomes = counter("requests", f"Requests by how they ended: {', '.join(OUTCOMES)}.", "outcome", OUTCOMES)
        self._plain = counter("spec_disabled_requests", "Requests without drafts, by why: asked for none.", "reason", ("request",))

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def step(self, seconds: float, tokens: int) -> None:
        self._gap.observe(seconds)
        self._token.observe(seconds / tokens, tokens)

    def end(self, seen: Observed) -> None:
        self._outcomes.labels(seen.outcome).inc()
        if seen.request.sampling.speculation.depth == 0:
            self._plain.labels("request").inc()
        if seen.times is not None:
            self._queue.observe(seen.times.queued)
            self._prompt.observe(seen.times.prompt)
        if seen.finished:
            self._request.observe(seen.seconds)
            self._asked.observe(len(seen.request.prompt))
            self._answered.observe(seen.tokens)
            if seen.per_token is not None:
                self._mean.observe(seen.per_token)


class Metrics:
    """One registry: ours, and for each of `dialects` the same facts once more."""

    def __init__(self, client: EngineClient, dialects: Sequence[str] = ()) -> None:
        # The library's only switch is global: without it each histogram brings a gauge of its creation time.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        engine = EngineView(client)
        self.registry.register(EngineCollector(engine))
        ProcessCollector(registry=self.registry)
        self.observers: list[Observer] = [Requests(self.registry), *(observer_of(name, self.registry, engine) for name in dialects)]

    def text(self) -> bytes:
        return generate_latest(self.registry)
