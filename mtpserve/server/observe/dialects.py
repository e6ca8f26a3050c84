"""The same facts under the names, types and labels of SGLang and vLLM, so that dashboards and clients made
for them work here.

What a peer exports and this server does not measure (a request's cached tokens by tier, CUDA graphs, several
devices, …) is left out: a missing name is clearer than a zero; tests/server/peer_metrics.json has the reason
for each. Buckets are the peers' too, since boards compute quantiles from them. As of SGLang 0.5.23 and vLLM
0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import EngineState
from mtpserve.server.observe.buckets import (
    LENGTHS,
    SGLANG_FIRST,
    SGLANG_QUEUE,
    SGLANG_REQUEST,
    SGLANG_TOKEN,
    VLLM_CHOICES,
    VLLM_FIRST,
    VLLM_REQUEST,
    VLLM_TOKEN,
)
from mtpserve.server.observe.observed import Family, Observed, Observer, Row, Scrape

VLLM_FINISHED = ("stop", "length", "abort", "error")
# name, help, an engine's value; None: not known yet
Fact = tuple[str, str, Callable[[EngineStats], float | None]]
VLLM_GAUGES: tuple[Fact, ...] = (
    ("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", lambda stats: stats.page_share),
    ("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", lambda stats: stats.page_share),
    ("spec_decode_draft_acceptance_rate", "Accepted share of draft tokens.", EngineStats.accept_rate),
)


# Newer names of kv_offload_total_…, one for each way.
VLLM_OFFLOADS: tuple[Fact, ...] = (
    (
        "kv_offload_load_bytes",
        "Bytes from host memory to the device.",
        lambda stats: stats.transfer_bytes_total.get("load", 0),
    ),
    (
        "kv_offload_store_bytes",
        "Bytes from the device to host memory.",
        lambda stats: stats.transfer_bytes_total.get("save", 0),
    ),
    (
        "kv_offload_load_time",
        "Seconds of these loads.",
        lambda stats: stats.transfer_seconds_total.get("load", 0),
    ),
    (
        "kv_offload_store_time",
        "Seconds of these stores.",
        lambda stats: stats.transfer_seconds_total.get("save", 0),
    ),
)
Parts = Callable[[EngineStats], Iterable[tuple[str, float]]]  # values of a label, with theirs


class SGLang(Observer):
    """Its inter-token latency is per token: tokens that came together share the wait."""

    prefix = "sglang:"
    finished = (
        (
            "request_time_per_output_token_seconds",
            "A request's mean time per token.",
            SGLANG_TOKEN,
            lambda observed: observed.per_token,
        ),
        (
            "e2e_request_latency_seconds",
            "End-to-end latency.",
            SGLANG_REQUEST,
            lambda observed: observed.seconds,
        ),
        (
            "prompt_tokens_histogram",
            "Prompt tokens per request.",
            LENGTHS,
            lambda observed: len(observed.request.prompt),
        ),
        (
            "uncached_prompt_tokens_histogram",
            "Prompt tokens per request that were computed.",
            LENGTHS,
            lambda observed: observed.computed,
        ),
        (
            "generation_tokens_histogram",
            "Generated tokens per request.",
            LENGTHS,
            lambda observed: observed.tokens,
        ),
    )

    def __init__(
        self, registry: CollectorRegistry, scrape: Callable[[], Scrape], model: str, engines: int
    ) -> None:
        labels = {
            "model_name": model,
            "engine_type": "unified",
            "tp_rank": "0",
            "pp_rank": "0",
            "moe_ep_rank": "0",
        }
        super().__init__(registry, scrape, labels)
        streaming = ("true", "false")
        self._prompt = self.counter(
            "prompt_tokens", "Prompt tokens of finished requests.", is_streaming=streaming
        )
        self._cached = self.counter(
            "cached_tokens", "Prompt tokens found in the prefix cache.", cache_source=("device",)
        )
        self._generated = self.counter(
            "generation_tokens", "Tokens generated for finished requests.", is_streaming=streaming
        )
        self._requests = self.counter("num_requests", "Finished requests.", is_streaming=streaming)
        self._structured = self.counter("num_so_requests", "Finished requests whose output had a grammar.")
        self._aborted = self.counter("num_aborted_requests", "Requests whose client left.")
        self._first = self.histogram("time_to_first_token_seconds", "Time to first token.", SGLANG_FIRST)
        self._token = self.histogram(
            "inter_token_latency_seconds", "Time per token after the first.", SGLANG_TOKEN
        )
        self._queue = self.histogram("queue_time_seconds", "Time in the queue.", SGLANG_QUEUE)

    def families(self, now: Scrape) -> Iterable[Metric]:
        stats, card, rates = now.stats, now.card, now.rates
        num_used, cached, total = (
            pages * card.page_size for pages in (stats.pages_used, stats.pages_cached, stats.pages_total)
        )
        gauges: list[Row] = [
            ("token_usage", "Share of the KV pool in use.", stats.page_share),
            ("num_used_tokens", "Tokens' places in use in the KV pool.", num_used),
            ("kv_used_tokens", "Tokens' places in use in the KV pool.", num_used),
            (
                "kv_evictable_tokens",
                "Tokens' places in the KV pool that nobody uses, in the prefix cache.",
                cached,
            ),
            (
                "kv_available_tokens",
                "Tokens' places in the KV pool that hold nothing.",
                total - num_used - cached,
            ),
            ("max_total_num_tokens", "Tokens that the KV pool holds.", total),
            ("page_size", "Tokens in a page.", card.page_size),
            ("context_len", "Context length.", card.context_length),
            (
                "cache_hit_rate",
                "Share of prompt tokens found in the prefix cache, lately.",
                rates.cached_share,
            ),
            ("gen_throughput", "Tokens generated per second, lately.", rates.tokens_per_second),
            ("spec_num_steps", "Depth of the drafts.", card.speculative_steps),
            ("spec_accept_length", "Tokens per verification, lately.", rates.accept_length),
            ("spec_accept_rate", "Accepted share of draft tokens, lately.", rates.accept_rate),
        ]
        if stats.tier_pages_total:
            host, capacity = (
                sum(pages.values()) * card.page_size for pages in (stats.tier_pages, stats.tier_pages_total)
            )
            gauges += [
                ("hicache_host_used_tokens", "Tokens in host memory.", host),
                ("hicache_host_total_tokens", "Its capacity.", capacity),
            ]
            yield from self._of_tiers(stats, card.page_size)
        yield from self.of_stats(lambda entry: entry.sglang, [((), stats)], card.speculative_steps)
        yield from self.rows([], gauges)

    def _of_tiers(self, stats: EngineStats, page_size: int) -> Iterable[Metric]:
        """Host memory and disk, named as in HiCache. Only where they are on, as there."""
        moved, size = stats.transfers_total, stats.transfer_bytes_total
        for name, help, pages in (
            ("load_back_tokens", "Tokens loaded from host memory to the device.", moved.get("load", 0)),
            ("hicache_backup_tokens", "Tokens saved from the device to host memory.", moved.get("save", 0)),
            (
                "hicache_dropped_tokens",
                "Tokens evicted for which host memory had no place.",
                stats.dropped_pages_total,
            ),
        ):
            yield self.family(CounterMetricFamily, name, help, [(["kv"], pages * page_size)], "pool")
        counters: list[Row] = [
            ("load_back_bytes", "Bytes loaded from host memory to the device.", size.get("load", 0)),
            ("hicache_backup_bytes", "Bytes saved from the device to host memory.", size.get("save", 0)),
            ("prefetched_tokens", "Tokens read from disk.", moved.get("fetch", 0) * page_size),
            ("backuped_tokens", "Tokens written to disk.", moved.get("spill", 0) * page_size),
        ]
        yield from self.rows(counters, [])

    def end(self, observed: Observed) -> None:
        super().end(observed)
        if observed.outcome == "abort":
            self._aborted().inc()
        if observed.times is not None:
            self._queue.observe(observed.times.queued)
        if not observed.finished:
            return
        streaming = str(observed.streaming).lower()
        self._prompt(streaming).inc(len(observed.request.prompt))
        self._cached("device").inc(observed.cached)
        self._generated(streaming).inc(observed.tokens)
        self._requests(streaming).inc()
        if observed.request.sampling.grammar is not None:
            self._structured().inc()


class VLLM(Observer):
    """Its inter-token latency is per step: one observation, however many tokens came. Positions of drafts
    count from 0. Two facts are there under their older names too: the boards that people have read those. All
    are by engine: what a request took, by the one that has ended it."""

    prefix = "vllm:"
    finished = (
        (
            "request_time_per_output_token_seconds",
            "A request's mean time per token.",
            VLLM_TOKEN,
            lambda observed: observed.per_token,
        ),
        (
            "e2e_request_latency_seconds",
            "End-to-end latency.",
            VLLM_REQUEST,
            lambda observed: observed.seconds,
        ),
        (
            "request_decode_time_seconds",
            "From the first token to the last.",
            VLLM_REQUEST,
            lambda observed: observed.decoding,
        ),
        (
            "request_prompt_tokens",
            "Prompt tokens per request.",
            LENGTHS,
            lambda observed: len(observed.request.prompt),
        ),
        (
            "request_prefill_kv_computed_tokens",
            "Prompt tokens per request that were computed.",
            LENGTHS,
            lambda observed: observed.computed,
        ),
        (
            "request_generation_tokens",
            "Generated tokens per request.",
            LENGTHS,
            lambda observed: observed.tokens,
        ),
        # Each choice is a request here.
        (
            "request_max_num_generation_tokens",
            "Generated tokens per choice.",
            LENGTHS,
            lambda observed: observed.tokens,
        ),
        (
            "request_params_max_tokens",
            "max_tokens of requests that gave one.",
            LENGTHS,
            lambda observed: observed.request.sampling.max_tokens,
        ),
        (
            "request_params_n",
            "n of each prompt.",
            VLLM_CHOICES,
            lambda observed: observed.request.choices or None,
        ),
    )

    def __init__(
        self, registry: CollectorRegistry, scrape: Callable[[], Scrape], model: str, engines: int
    ) -> None:
        super().__init__(registry, scrape, {"model_name": model}, engines)
        numbers = [str(number) for number in range(engines)]
        self._success = self.counter(
            "request_success", "Ended requests by why.", engine=numbers, finished_reason=VLLM_FINISHED
        )
        self._first = self.histogram("time_to_first_token_seconds", "Time to first token.", VLLM_FIRST)
        self._token = self.histogram(
            "inter_token_latency_seconds", "Time between a request's steps.", VLLM_TOKEN
        )
        self._token_once = self.histogram(
            "time_per_output_token_seconds", "Older name of inter_token_latency_seconds.", VLLM_TOKEN
        )
        self._queue = self.histogram("request_queue_time_seconds", "Time in the queue.", VLLM_REQUEST)
        self._prefill = self.histogram(
            "request_prefill_time_seconds", "Time from scheduling to the first token.", VLLM_REQUEST
        )
        self._inference = self.histogram(
            "request_inference_time_seconds", "Time from scheduling to the last token.", VLLM_REQUEST
        )

    def families(self, now: Scrape) -> Iterable[Metric]:
        engines, steps = now.engines, now.card.speculative_steps
        counted = [([str(engine.number)], engine.stats) for engine in engines]
        yield from self.of_stats(lambda entry: entry.vllm, counted, steps, "engine")
        yield from self._facts(GaugeMetricFamily, VLLM_GAUGES, engines)
        help = "Waiting requests; deferred: until pages that are on their way have come."
        yield self._split(
            "num_requests_waiting_by_reason", help, "reason", by_reason, engines, GaugeMetricFamily
        )
        help = "Prompt tokens by where their KV is from."
        yield self._split("prompt_tokens_by_source", help, "source", by_source, engines)
        pages = [
            ((str(engine.number), str(now.card.page_size), str(engine.stats.pages_total)), 1)
            for engine in engines
        ]
        labels = ("engine", "block_size", "num_gpu_blocks")
        yield self.family(GaugeMetricFamily, "cache_config_info", "The KV pool.", pages, *labels)
        # Only where they are on, as there; the disk's metrics have labels of classes there, and are left out.
        if now.stats.tier_pages_total:
            yield from self._of_host_memory(engines)
        help = "Accepted draft tokens by position, 0 first."
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._split(name, help, "position", partial(by_position, steps), engines)

    def _of_host_memory(self, engines: Sequence[EngineState]) -> Iterable[Metric]:
        yield from self._facts(CounterMetricFamily, VLLM_OFFLOADS, engines)
        for name, what, moved in (
            ("kv_offload_total_bytes", "Bytes", lambda stats: stats.transfer_bytes_total),
            ("kv_offload_total_time", "Seconds", lambda stats: stats.transfer_seconds_total),
        ):
            help = f"{what} of transfers to host memory and back."
            yield self._split(name, help, "transfer_type", partial(by_way, moved), engines)

    def _facts(self, kind: Family, facts: Sequence[Fact], engines: Sequence[EngineState]) -> Iterable[Metric]:
        for name, help, fact in facts:
            pairs = [(str(engine.number), fact(engine.stats)) for engine in engines]
            values = [([number], value) for number, value in pairs if value is not None]
            if values:
                yield self.family(kind, name, help, values, "engine")

    def _split(
        self,
        name: str,
        help: str,
        label: str,
        parts: Parts,
        engines: Sequence[EngineState],
        kind: Family = CounterMetricFamily,
    ) -> Metric:
        """By engine, and by the values of one more label."""
        values = [
            ([str(engine.number), label_value], value)
            for engine in engines
            for label_value, value in parts(engine.stats)
        ]
        return self.family(kind, name, help, values, "engine", label)

    def step(self, seconds: float, tokens: int, engine: int) -> None:
        self._token.observe(seconds, engine=engine)
        self._token_once.observe(seconds, engine=engine)

    def end(self, observed: Observed) -> None:
        super().end(observed)
        if observed.outcome in VLLM_FINISHED:
            self._success(str(observed.engine), observed.outcome).inc()
        if observed.finished and observed.times is not None:
            self._queue.observe(observed.times.queued, engine=observed.engine)
            self._prefill.observe(observed.times.prompt, engine=observed.engine)
            self._inference.observe(observed.times.prompt + observed.decoding, engine=observed.engine)


def by_reason(stats: EngineStats) -> list[tuple[str, float]]:
    return [("capacity", stats.waiting - stats.waiting_for_pages), ("deferred", stats.waiting_for_pages)]


def by_source(stats: EngineStats) -> list[tuple[str, float]]:
    cached = stats.cached_prompt_tokens_total
    return [("local_compute", stats.prompt_tokens_total - cached), ("local_cache_hit", cached)]


def by_way(
    moved: Callable[[EngineStats], Mapping[str, float]], stats: EngineStats
) -> list[tuple[str, float]]:
    amounts = moved(stats)
    return [("GPU_to_CPU", amounts.get("save", 0)), ("CPU_to_GPU", amounts.get("load", 0))]


def by_position(steps: int, stats: EngineStats) -> list[tuple[str, float]]:
    drafted = [position for position, count in enumerate(stats.draft_tokens_per_position, 1) if count > 0]
    deepest = max([steps, *drafted])  # a prediction or a grammar may reach deeper than the steps
    return [
        (str(position), count) for position, count in enumerate(stats.accepted_tokens_per_position[:deepest])
    ]


OBSERVERS: dict[str, type[SGLang] | type[VLLM]] = {"sglang": SGLang, "vllm": VLLM}
