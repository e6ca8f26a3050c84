"""The same facts under the names, types and labels of SGLang and vLLM, so that dashboards and clients made for them work here.

What a peer exports and this server does not measure (prefix caches, CUDA graphs, several devices, …) is left out: a missing name is
clearer than a zero. Buckets are the peers' too, since boards compute quantiles from them. As of SGLang
0.5.23 and vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mtpserve.server.observe.observed import Observed, Observer, Row, Scrape

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


class SGLang(Observer):
    """Its inter-token latency is per token: tokens that came together share the wait."""

    prefix = "sglang:"
    finished = (
        ("request_time_per_output_token_seconds", "A request's mean time per token.", SGLANG_TOKEN, lambda seen: seen.per_token),
        ("e2e_request_latency_seconds", "End-to-end latency.", SGLANG_REQUEST, lambda seen: seen.seconds),
        ("prompt_tokens_histogram", "Prompt tokens per request.", LENGTHS, lambda seen: len(seen.request.prompt)),
        ("generation_tokens_histogram", "Generated tokens per request.", LENGTHS, lambda seen: seen.tokens),
    )

    def __init__(self, registry: CollectorRegistry, scrape: Callable[[], Scrape], model: str) -> None:
        labels = {"model_name": model, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        super().__init__(registry, scrape, labels)
        streaming = ("true", "false")
        self._prompt = self.counter("prompt_tokens", "Prompt tokens of finished requests.", is_streaming=streaming)
        self._generated = self.counter("generation_tokens", "Tokens generated for finished requests.", is_streaming=streaming)
        self._requests = self.counter("num_requests", "Finished requests.", is_streaming=streaming)
        self._structured = self.counter("num_so_requests", "Finished requests whose output had a grammar.")
        self._aborted = self.counter("num_aborted_requests", "Requests whose client left.")
        self._first = self.histogram("time_to_first_token_seconds", "Time to first token.", SGLANG_FIRST)
        self._token = self.histogram("inter_token_latency_seconds", "Time per token after the first.", SGLANG_TOKEN)
        self._queue = self.histogram("queue_time_seconds", "Time in the queue.", SGLANG_QUEUE)

    def families(self, now: Scrape) -> Iterable[Metric]:
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
        return self.rows(counters, gauges)

    def end(self, seen: Observed) -> None:
        super().end(seen)
        if seen.outcome == "abort":
            self._aborted().inc()
        if seen.times is not None:
            self._queue.observe(seen.times.queued)
        if not seen.finished:
            return
        streaming = str(seen.streaming).lower()
        self._prompt(streaming).inc(len(seen.request.prompt))
        self._generated(streaming).inc(seen.tokens)
        self._requests(streaming).inc()
        if seen.request.sampling.grammar is not None:
            self._structured().inc()


class VLLM(Observer):
    """Its inter-token latency is per step: one observation, however many tokens came. Positions of drafts count from 0. Two facts are
    there under their older names too: the boards that people have read those."""

    prefix = "vllm:"
    finished = (
        ("request_time_per_output_token_seconds", "A request's mean time per token.", VLLM_TOKEN, lambda seen: seen.per_token),
        ("e2e_request_latency_seconds", "End-to-end latency.", VLLM_REQUEST, lambda seen: seen.seconds),
        ("request_decode_time_seconds", "From the first token to the last.", VLLM_REQUEST, lambda seen: seen.decoding),
        ("request_prompt_tokens", "Prompt tokens per request.", LENGTHS, lambda seen: len(seen.request.prompt)),
        ("request_generation_tokens", "Generated tokens per request.", LENGTHS, lambda seen: seen.tokens),
        # Each choice is a request here.
        ("request_max_num_generation_tokens", "Generated tokens per choice.", LENGTHS, lambda seen: seen.tokens),
        ("request_params_max_tokens", "max_tokens of requests that gave one.", LENGTHS, lambda seen: seen.request.sampling.max_tokens),
    )

    def __init__(self, registry: CollectorRegistry, scrape: Callable[[], Scrape], model: str) -> None:
        super().__init__(registry, scrape, {"model_name": model, "engine": "0"})
        self._success = self.counter("request_success", "Ended requests by why.", finished_reason=VLLM_FINISHED)
        self._first = self.histogram("time_to_first_token_seconds", "Time to first token.", VLLM_FIRST)
        self._token = self.histogram("inter_token_latency_seconds", "Time between a request's steps.", VLLM_TOKEN)
        self._token_once = self.histogram("time_per_output_token_seconds", "Older name of inter_token_latency_seconds.", VLLM_TOKEN)
        self._queue = self.histogram("request_queue_time_seconds", "Time in the queue.", VLLM_REQUEST)
        self._prefill = self.histogram("request_prefill_time_seconds", "From the seat to the first token.", VLLM_REQUEST)
        self._inference = self.histogram("request_inference_time_seconds", "From the seat to the last token.", VLLM_REQUEST)

    def families(self, now: Scrape) -> Iterable[Metric]:
        stats, card = now.stats, now.card
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
        yield from self.rows(counters, gauges)
        pages = [((str(card.page_size), str(stats.pages_total)), 1)]
        yield self.family(GaugeMetricFamily, "cache_config_info", "The KV pool.", pages, "block_size", "num_gpu_blocks")
        drafted_at = [position for position, count in enumerate(stats.draft_tokens_per_position, 1) if count > 0]
        deepest = max([card.speculative_steps, *drafted_at])  # a prediction or a grammar may reach deeper than the steps
        counts = [([str(position)], count) for position, count in enumerate(stats.accepted_tokens_per_position[:deepest])]
        help = "Accepted draft tokens by position, 0 first."
        yield self.family(CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", help, counts, "position")

    def step(self, seconds: float, tokens: int) -> None:
        self._token.observe(seconds)
        self._token_once.observe(seconds)

    def end(self, seen: Observed) -> None:
        super().end(seen)
        if seen.outcome in VLLM_FINISHED:
            self._success(seen.outcome).inc()
        if seen.finished and seen.times is not None:
            self._queue.observe(seen.times.queued)
            self._prefill.observe(seen.times.prompt)
            self._inference.observe(seen.times.prompt + seen.decoding)


OBSERVERS: dict[str, type[SGLang] | type[VLLM]] = {"sglang": SGLang, "vllm": VLLM}
