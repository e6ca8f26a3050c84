"""Prometheus metrics: what the engine counts, read when scraped, and what only the front end can time.

The engine's counters are exported as counters, from the last statistics that it sent; nothing is counted twice. Names follow
Prometheus' rules: base units, `_total` on counters only, no colons. One registry per app. Peers' names are in dialects.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mtpserve.core.protocols import EngineClient
from mtpserve.core.request import EngineStats
from mtpserve.server.observe.dialects import OBSERVERS
from mtpserve.server.observe.observed import OUTCOMES, Observed, Observer, Recent, Row, Scrape
from mtpserve.server.observe.tiers import KINDS, WAYS, by

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120, 300)
TOKEN_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120, 300, 600, 1200)
LENGTH_BUCKETS = tuple(4**power for power in range(10))  # tokens: 1 … 262144


class MTPServe(Observer):
    prefix = "mtpserve_"
    finished = (
        (
            "time_per_output_token_seconds",
            "A finished request's mean time per token after its first.",
            TOKEN_BUCKETS,
            lambda seen: seen.per_token,
        ),
        ("e2e_request_latency_seconds", "From a request's arrival to its last token.", REQUEST_BUCKETS, lambda seen: seen.seconds),
        ("request_prompt_tokens", "Prompt tokens of a finished request.", LENGTH_BUCKETS, lambda seen: len(seen.request.prompt)),
        ("request_generation_tokens", "Output tokens of a finished request.", LENGTH_BUCKETS, lambda seen: seen.tokens),
    )

    def __init__(self, registry: CollectorRegistry, scrape: Callable[[], Scrape], model: str) -> None:
        super().__init__(registry, scrape, {})
        self._first = self.histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS)
        self._token = self.histogram(
            "inter_token_latency_seconds", "Time per token after the first: n tokens that arrive together share the wait.", TOKEN_BUCKETS
        )
        self._gap = self.histogram("step_gap_seconds", "Between two arrivals of tokens for a request, however many came.", TOKEN_BUCKETS)
        self._queue = self.histogram("queue_time_seconds", "From a request's arrival in the engine to its seat.", REQUEST_BUCKETS)
        self._prompt = self.histogram("prompt_time_seconds", "From a request's seat to its first token.", REQUEST_BUCKETS)
        self._outcomes = self.counter("requests", f"Requests by how they ended: {', '.join(OUTCOMES)}.", outcome=OUTCOMES)
        self._plain = self.counter("spec_disabled_requests", "Requests without drafts, by why: asked for none.", reason=("request",))

    def families(self, now: Scrape) -> Iterable[Metric]:
        stats, steps = now.stats, now.card.speculative_steps
        yield from self.rows(counters(now), gauges(now))
        yield accept_length(stats.accept_lengths, steps)
        algorithm = now.card.algorithm or "none"
        yield self.family(
            GaugeMetricFamily, "spec_algorithm", "1, with --speculative-algorithm as the label.", [([algorithm], 1)], "algorithm"
        )
        deep = [([str(depth)], count) for depth, count in enumerate(stats.steps_per_depth[: steps + 1])]
        help = "Steps with decoding requests, by how deep they drafted for the next one."
        yield self.family(CounterMetricFamily, "speculative_steps", help, deep, "depth")
        of_drafts = (
            ("draft", "verified", stats.draft_tokens_per_position, stats.draft_tokens_by_source),
            ("accepted", "accepted", stats.accepted_tokens_per_position, stats.accepted_tokens_by_source),
        )
        for name, done, per_position, by_source in of_drafts:
            padded = per_position + [0] * (steps - len(per_position))
            places = [([str(place)], count) for place, count in enumerate(padded, 1)]
            help = f"Draft tokens {done}, by position in the draft, 1 first."
            yield self.family(CounterMetricFamily, f"spec_{name}_tokens_per_position", help, places, "position")
            sources = [([source], count) for source, count in by_source.items()]
            help = f"Draft tokens {done}, by who proposed them."
            yield self.family(CounterMetricFamily, f"spec_{name}_tokens_by_source", help, sources, "source")
        yield from self._of_tiers(stats)

    def _of_tiers(self, stats: EngineStats) -> Iterable[Metric]:
        """Below the device; zeros where there are none."""
        for name, help, pages in (
            ("kv_tier_pages", "Pages that a tier of the prefix cache below the device may hold.", stats.tier_pages_total),
            ("kv_tier_pages_used", "Pages in that tier.", stats.tier_pages),
        ):
            yield self.family(GaugeMetricFamily, name, help, by(("host",), pages), "tier")
        help = "Pages that came back to the device, by the tier that had them."
        yield self.family(CounterMetricFamily, "kv_loaded_pages", help, by(tuple(WAYS), stats.loaded_pages), "tier")
        ways = "save and load: to host memory and back, spill and fetch: to disk and back"
        for name, help, counts in (
            ("kv_transfers", f"Pages moved between tiers; {ways}.", stats.transfers_total),
            ("kv_transfer_bytes", f"Bytes of these pages; {ways}.", stats.transfer_bytes_total),
            ("kv_transfer_seconds", f"Seconds that they took, each by itself; {ways}.", stats.transfer_seconds_total),
            ("kv_failed_transfers", f"Pages that could not be moved; {ways}.", stats.failed_transfers_total),
        ):
            yield self.family(CounterMetricFamily, name, help, by(KINDS, counts), "kind")

    def step(self, seconds: float, tokens: int) -> None:
        super().step(seconds, tokens)
        self._gap.observe(seconds)

    def end(self, seen: Observed) -> None:
        super().end(seen)
        self._outcomes(seen.outcome).inc()
        if seen.request.sampling.speculation.depth == 0:
            self._plain("request").inc()
        if seen.times is not None:
            self._queue.observe(seen.times.queued)
            self._prompt.observe(seen.times.prompt)


def counters(now: Scrape) -> list[Row]:
    stats = now.stats
    verified = sum(tokens * count for tokens, count in enumerate(stats.accept_lengths, 1))
    changes, trials = (0, 0) if stats.depths is None else (stats.depths.changes_total, stats.depths.trials_total)
    return [
        ("engine_steps", "Steps that the engine has run.", stats.steps_total),
        ("prompt_tokens", "Prompt tokens of requests that got their first token.", stats.prompt_tokens_total),
        ("cached_prompt_tokens", "Those of these prompt tokens that were in the prefix cache.", stats.cached_prompt_tokens_total),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens_total),
        ("kv_dropped_pages", "Pages that the device gave away and host memory had no place for.", stats.dropped_pages_total),
        ("preemptions", "Times that a running request lost its pages to another and was computed again.", stats.preemptions_total),
        ("failed_requests", "Requests that ended with an error in the engine.", stats.failed_requests_total),
        ("speculative_depth_changes", "Times that another depth was chosen.", changes),
        ("speculative_trials", "Steps that tried another depth, to learn what it gives.", trials),
        (
            "speculative_faults",
            "Times that the draft model was found at fault, at start and while serving.",
            stats.draft_health.faults_total,
        ),
        ("spec_drafts", "Verifications that had at least one draft token.", stats.drafts_total),
        ("spec_draft_tokens", "Draft tokens verified.", stats.draft_tokens_total),
        ("spec_accepted_tokens", "Draft tokens accepted.", stats.accepted_tokens_total),
        ("spec_bonus_tokens", "Tokens that the model itself added in verifications.", verified - stats.accepted_tokens_total),
    ]


def gauges(now: Scrape) -> list[Row]:
    stats, rates, card = now.stats, now.rates, now.card
    return [
        ("engine_up", "1 while the engine's process lives.", float(now.alive)),
        ("requests_running", "Requests that the engine is computing.", stats.running),
        ("requests_waiting", "Requests that wait for the engine.", stats.waiting),
        ("kv_pages", "Pages in the KV pool.", stats.pages_total),
        ("kv_pages_used", "Pages of the KV pool in use.", stats.pages_used),
        ("kv_pages_cached", "Free pages of the KV pool whose contents a request may find.", stats.pages_cached),
        ("kv_page_usage_ratio", "Share of the KV pool's pages in use, 0 to 1.", now.page_share),
        ("kv_page_tokens", "Tokens in one page.", card.page_size),
        ("context_tokens", "Tokens that prompt and output may have together.", card.context_length),
        ("generation_tokens_per_second", "Tokens generated per second, over the last 10 s.", rates.tokens_per_second),
        ("recent_cached_prompt_ratio", "Share of prompt tokens found in the prefix cache, over the last 10 s.", rates.cached_share),
        ("spec_num_steps", "Depth of the deepest drafts; 0: plain decoding.", card.speculative_steps),
        ("speculative_depth", "Depth of the last choice.", card.speculative_steps if stats.depths is None else stats.depths.depth),
        ("speculative_suspended", "1 while drafting is off since the draft model is at fault.", stats.draft_health.state == "suspended"),
        ("spec_lossy", "1 where acceptance thresholds below 1 change what the model would say.", float(card.lossy)),
        ("synthetic_acceptance", "1 where drafts are accepted by lot, to measure the engine.", bool(card.synthetic_acceptance)),
        ("spec_recent_accept_length", "Tokens per verification, over the last 10 s that had any.", rates.accept_length),
        ("spec_recent_accept_rate", "Accepted share of draft tokens, over the last 10 s that had any.", rates.accept_rate),
    ]


def accept_length(counts: list[int], steps: int) -> Metric:
    """`counts[n]` verifications committed n + 1 tokens."""
    counts = counts + [0] * (steps + 1 - len(counts))
    buckets = [(str(float(length)), float(total)) for length, total in enumerate(accumulate(counts), 1)]
    family = HistogramMetricFamily("mtpserve_spec_accept_length", "Tokens committed by one verification: accepted drafts and one more.")
    family.add_metric([], [*buckets, ("+Inf", sum(counts))], sum_value=sum(n * count for n, count in enumerate(counts, 1)))
    return family


class Metrics:
    """One registry: ours, and for each of `dialects` the same facts once more."""

    def __init__(self, client: EngineClient, dialects: Sequence[str] = ()) -> None:
        # The library's only switch is global: without it each histogram brings a gauge of its creation time.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        recent = Recent()

        def scrape() -> Scrape:
            stats = client.stats()
            return Scrape(stats, recent.rates(stats), client.card, client.dead is None)

        kinds = (MTPServe, *(OBSERVERS[name] for name in dialects))
        self.observers: list[Observer] = [kind(self.registry, scrape, client.card.name) for kind in kinds]
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
