"""The same facts under the names, types and labels of SGLang and vLLM, so that dashboards and clients made for them work here.

What a peer exports and this server does not measure (prefix caches, CUDA graphs, several devices, …) is left out: a missing name is
clearer than a zero. Buckets are the peers' too, since boards compute quantiles from them. As of SGLang
0.5.23 and vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mtpserve.server.observe.histogram import LoopHistogram
from mtpserve.server.observe.observed import EngineView, Observed, Observer, Scrape

Row = tuple[str, str, float | None]  # name, help, value; None: not known yet
SGLANG_FIRST = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
SGLANG_TOKEN = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
SGLANG_REQUEST = (*SGLANG_FIRST, 600, 1200, 1800, 2400)
SGLANG_QUEUE = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 80, 100, 200, 400, 800, 1600)
VLLM_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
VLLM_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
VLLM_FINISHED = ("stop", "length", "abort", "error")
LENGTHS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


def observer_of(dialect: str, registry: CollectorRegistry, engine: EngineView) -> Observer:
    """Registers the dialect's names; what it counts itself comes through the observer."""
    made: dict[str, type[SGLang] | type[VLLM]] = {"sglang": SGLang, "vllm": VLLM}
    return made[dialect](registry, engine)


class Named:
    """Makes metrics with a dialect's prefix and labels."""

    def __init__(self, registry: CollectorRegistry, prefix: str, labels: dict[str, str]) -> None:
        self.registry, self.prefix, self.labels = registry, prefix, labels

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> LoopHistogram:
        return LoopHistogram(self.prefix + name, help, buckets, self.registry, self.labels)

    def counter(self, name: str, help: str, label: str | None = None, values: Iterable[str] = ()) -> Callable[..., Counter]:
        """Of the label's value; the values given exist from the start."""
        names = [*self.labels, *([] if label is None else [label])]
        made = Counter(self.prefix + name, help, names, registry=self.registry)

        def child(value: str | None = None) -> Counter:
            return made.labels(**self.labels, **({} if label is None else {label: str(value)}))

        for value in values if label is not None else (None,):
            child(value)
        return child

    def family(self, kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, help: str, value: float, **more: str) -> Any:
        made = kind(self.prefix + name, help, labels=[*self.labels, *more])
        made.add_metric([*self.labels.values(), *more.values()], value)
        return made

    def rows(self, counters: Iterable[Row], gauges: Iterable[Row]) -> Iterable[Metric]:
        for name, help, value in counters:
            yield self.family(CounterMetricFamily, name, help, value or 0)
        for name, help, value in gauges:
            if value is not None:
                yield self.family(GaugeMetricFamily, name, help, value)


class Scraped(Collector):
    """Metrics that are read from the engine at each scrape."""

    def __init__(self, engine: EngineView, families: Callable[[Scrape], Iterable[Metric]]) -> None:
        self._engine, self._families = engine, families

    def collect(self) -> Iterable[Metric]:
        return self._families(self._engine.scrape())


class SGLang(Observer):
    """Its inter-token latency is per token: tokens that came together share the wait."""

    def __init__(self, registry: CollectorRegistry, engine: EngineView) -> None:
        labels = {"model_name": engine.card.name, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        self._named = named = Named(registry, "sglang:", labels)
        registry.register(Scraped(engine, self._families))
        by_streaming = "is_streaming", ("true", "false")
        self._prompt = named.counter("prompt_tokens", "Prompt tokens of finished requests.", *by_streaming)
        self._generated = named.counter("generation_tokens", "Tokens generated for finished requests.", *by_streaming)
        self._requests = named.counter("num_requests", "Finished requests.", *by_streaming)
        self._structured = named.counter("num_so_requests", "Finished requests whose output had a grammar.")
        self._aborted = named.counter("num_aborted_requests", "Requests whose client left.")
        self._first = named.histogram("time_to_first_token_seconds", "Time to first token.", SGLANG_FIRST)
        self._token = named.histogram("inter_token_latency_seconds", "Time per token after the first.", SGLANG_TOKEN)
        self._mean = named.histogram("request_time_per_output_token_seconds", "A request's mean time per token.", SGLANG_TOKEN)
        self._request = named.histogram("e2e_request_latency_seconds", "End-to-end latency.", SGLANG_REQUEST)
        self._queue = named.histogram("queue_time_seconds", "Time in the queue.", SGLANG_QUEUE)
        self._asked = named.histogram("prompt_tokens_histogram", "Prompt tokens per request.", LENGTHS)
        self._answered = named.histogram("generation_tokens_histogram", "Generated tokens per request.", LENGTHS)

    def _families(self, now: Scrape) -> Iterable[Metric]:
        stats, card, rates = now.stats, now.card, now.rates
        used, total = stats.pages_used * card.page_size, stats.pages_total * card.page_size
        counters: list[Row] = [
            ("spec_verify_calls", "Verifications.", stats.drafts_total),
            ("num_retracted_requests", "Requests that lost their pages and were computed again.", stats.preemptions_total),
        ]
        gauges: list[Row] = [
            ("num_running_reqs", "Running requests.", stats.running),
            ("num_queue_reqs", "Requests in the queue.", stats.waiting),
            ("token_usage", "Share of the KV pool in use.", now.page_share),
            ("num_used_tokens", "Tokens' places in use in the KV pool.", used),
            ("kv_used_tokens", "Tokens' places in use in the KV pool.", used),
            ("kv_available_tokens", "Tokens' places free in the KV pool.", total - used),
            ("max_total_num_tokens", "Tokens that the KV pool holds.", total),
            ("page_size", "Tokens in a page.", card.page_size),
            ("num_pages", "Pages in the KV pool.", stats.pages_total),
            ("context_len", "Context length.", card.context_length),
            ("gen_throughput", "Tokens generated per second, lately.", rates.tokens_per_second),
            ("spec_num_steps", "Depth of the drafts.", card.speculative_steps),
            ("spec_accept_length", "Tokens per verification, lately.", rates.accept_length),
            ("spec_accept_rate", "Accepted share of draft tokens, lately.", rates.accept_rate),
        ]
        return self._named.rows(counters, gauges)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def step(self, seconds: float, tokens: int) -> None:
        self._token.observe(seconds / tokens, tokens)

    def end(self, seen: Observed) -> None:
        if seen.outcome == "abort":
            self._aborted().inc()
        if seen.times is not None:
            self._queue.observe(seen.times.queued)
        if not seen.finished:
            return
        streaming, prompt = str(seen.streaming).lower(), len(seen.request.prompt)
        self._prompt(streaming).inc(prompt)
        self._generated(streaming).inc(seen.tokens)
        self._requests(streaming).inc()
        if seen.request.sampling.grammar is not None:
            self._structured().inc()
        self._request.observe(seen.seconds)
        self._asked.observe(prompt)
        self._answered.observe(seen.tokens)
        if seen.per_token is not None:
            self._mean.observe(seen.per_token)


class VLLM(Observer):
    """Its inter-token latency is per step: one observation, however many tokens came. Positions of drafts count from 0. Two facts are
    there under their older names too: the boards that people have read those."""

    def __init__(self, registry: CollectorRegistry, engine: EngineView) -> None:
        self._named = named = Named(registry, "vllm:", {"model_name": engine.card.name, "engine": "0"})
        registry.register(Scraped(engine, self._families))
        self._success = named.counter("request_success", "Ended requests by why.", "finished_reason", VLLM_FINISHED)
        self._first = named.histogram("time_to_first_token_seconds", "Time to first token.", VLLM_FIRST)
        self._token = named.histogram("inter_token_latency_seconds", "Time between a request's steps.", VLLM_TOKEN)
        self._token_once = named.histogram("time_per_output_token_seconds", "Older name of inter_token_latency_seconds.", VLLM_TOKEN)
        self._mean = named.histogram("request_time_per_output_token_seconds", "A request's mean time per token.", VLLM_TOKEN)
        self._request = named.histogram("e2e_request_latency_seconds", "End-to-end latency.", VLLM_REQUEST)
        self._queue = named.histogram("request_queue_time_seconds", "Time in the queue.", VLLM_REQUEST)
        self._prefill = named.histogram("request_prefill_time_seconds", "From the seat to the first token.", VLLM_REQUEST)
        self._decode = named.histogram("request_decode_time_seconds", "From the first token to the last.", VLLM_REQUEST)
        self._inference = named.histogram("request_inference_time_seconds", "From the seat to the last token.", VLLM_REQUEST)
        self._asked = named.histogram("request_prompt_tokens", "Prompt tokens per request.", LENGTHS)
        self._answered = named.histogram("request_generation_tokens", "Generated tokens per request.", LENGTHS)
        self._longest = named.histogram("request_max_num_generation_tokens", "Generated tokens per choice.", LENGTHS)
        self._limit = named.histogram("request_params_max_tokens", "max_tokens of requests that gave one.", LENGTHS)

    def _families(self, now: Scrape) -> Iterable[Metric]:
        stats, card, named = now.stats, now.card, self._named
        drafted, accepted = stats.draft_tokens_total, stats.accepted_tokens_total
        counters: list[Row] = [
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens_total),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            ("num_preemptions", "Preemptions.", stats.preemptions_total),
            ("spec_decode_num_drafts", "Verifications.", stats.drafts_total),
            ("spec_decode_num_draft_tokens", "Draft tokens.", drafted),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", accepted),
        ]
        gauges: list[Row] = [
            ("num_requests_running", "Running requests.", stats.running),
            ("num_requests_waiting", "Waiting requests.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", now.page_share),
            ("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", now.page_share),
            ("spec_decode_draft_acceptance_rate", "Accepted share of draft tokens.", accepted / drafted if drafted else None),
        ]
        yield from named.rows(counters, gauges)
        pages = {"block_size": str(card.page_size), "num_gpu_blocks": str(stats.pages_total)}
        yield named.family(GaugeMetricFamily, "cache_config_info", "The KV pool.", 1, **pages)
        help = "Accepted draft tokens by position, 0 first."
        family = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos", help, labels=[*named.labels, "position"])
        drafted_at = [position for position, count in enumerate(stats.draft_tokens_per_position, 1) if count > 0]
        for position in range(max([card.speculative_steps, *drafted_at])):  # a prediction or a grammar may reach deeper
            count = stats.accepted_tokens_per_position[position]
            family.add_metric([*named.labels.values(), str(position)], count)
        yield family

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def step(self, seconds: float, tokens: int) -> None:
        self._token.observe(seconds)
        self._token_once.observe(seconds)

    def end(self, seen: Observed) -> None:
        if seen.outcome in VLLM_FINISHED:
            self._success(seen.outcome).inc()
        if seen.finished:
            self._request.observe(seen.seconds)
            self._decode.observe(seen.decoding)
            self._asked.observe(len(seen.request.prompt))
            self._answered.observe(seen.tokens)
            self._longest.observe(seen.tokens)  # each choice is a request here
            if seen.request.sampling.max_tokens is not None:
                self._limit.observe(seen.request.sampling.max_tokens)
            if seen.per_token is not None:
                self._mean.observe(seen.per_token)
            if seen.times is not None:
                self._queue.observe(seen.times.queued)
                self._prefill.observe(seen.times.prompt)
                self._inference.observe(seen.times.prompt + seen.decoding)
