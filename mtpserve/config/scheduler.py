"""What a step computes, and who is served next."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtpserve.config.options import check, option

# Tokens of a step. On a CPU each one takes time, and all requests wait for the step's end. On a GPU they are
# cheap, and 128 requests with four rows each fill 512: prompts got what was left, in chunks.
STEP_TOKENS = {"cpu": 512, "cuda": 2048}
CAPTURED = 256  # requests of one captured step, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_running_requests: int | None = option(
        None,
        "maximum number of requests that run at once (default: from KV cache size and tokens per "
        "step, at most 256)",
        "max-num-seqs",
    )
    chunked_prefill_size: int | None = option(
        None,
        "maximum tokens per step, of prompts and decoding together (default: 512 on a CPU, 2048 on a GPU)",
        "max-num-batched-tokens",
    )
    enable_chunked_prefill: bool = option(
        True, "always on: prompts are computed in chunks, together with decoding", "enable-mixed-chunk"
    )
    scheduling_policy: str = option(
        "fcfs",
        "order of waiting requests. fcfs: by arrival; lpm: longest cached prefix first, with a bound "
        "on overtaking; priority: lower `priority` first, and these requests are preempted last",
        "schedule-policy",
        choices=("fcfs", "lpm", "priority"),
    )
    schedule_conservativeness: float = option(
        1.0,
        "KV pages that must stay free when a request starts: this number times a tenth of what "
        "running requests may still need; 0: start as soon as the request fits",
    )
    long_prefill_token_threshold: int | None = option(
        None,
        "a prompt with more uncached tokens than this is long; while other requests run, it gets at "
        "most this many tokens per step (default: see docs/cache.md)",
    )
    max_long_partial_prefills: int = option(
        1,
        (
            "maximum number of long prompts that are computed at once; short prompts overtake the other "
            "long ones"
        ),
    )
    random_seed: int | None = option(None, "seed for requests that set none (default: random)")
    max_queued_requests: int | None = option(
        None,
        "maximum number of waiting requests; further requests get HTTP 429 (default: no limit)",
        "max-num-queued-reqs",
    )
    disable_cuda_graph: bool = option(
        False, "launch each kernel instead of replaying CUDA graphs (GPU only)", "enforce-eager"
    )
    cuda_graph_max_bs: int | None = option(
        None, (
            "maximum number of decoding requests in one CUDA graph; larger batches run without a graph "
            "(default: --max-running-requests, at most 256)"
        ),
        "max-cudagraph-capture-size", "cuda-graph-max-bs-decode",
    )  # fmt: skip
    record_steps: str | None = option(
        None,
        (
            "file that records each step's plan and result, prompts included; `mtpserve replay` runs the "
            "steps again"
        ),
    )
    disable_overlap_schedule: bool = option(
        False, "plan a step after the previous step has ended, instead of while it runs (GPU only)"
    )

    def __post_init__(self) -> None:
        running, queued = self.max_running_requests, self.max_queued_requests
        check(running is None or running >= 1, "max_running_requests", running, "at least 1")
        check(self.step_tokens >= 1, "chunked_prefill_size", self.chunked_prefill_size, "at least 1")
        check(
            self.enable_chunked_prefill,
            "enable_chunked_prefill",
            False,
            "true, or left out: prompts are always computed in chunks",
        )
        check(queued is None or queued >= 0, "max_queued_requests", queued, "at least 0")
        threshold, longs = self.long_prefill_token_threshold, self.max_long_partial_prefills
        check(threshold is None or threshold >= 1, "long_prefill_token_threshold", threshold, "at least 1")
        check(longs >= 1, "max_long_partial_prefills", longs, "at least 1")
        share = self.schedule_conservativeness
        check(0 <= share <= 10, "schedule_conservativeness", share, "in [0, 10]")
        max_bs = self.cuda_graph_max_bs
        check(max_bs is None or 1 <= max_bs <= CAPTURED, "cuda_graph_max_bs", max_bs, f"in [1, {CAPTURED}]")
        check(
            max_bs is None or not self.disable_cuda_graph,
            "cuda_graph_max_bs",
            max_bs,
            "left out together with --disable-cuda-graph",
        )

    @property
    def step_tokens(self) -> int:
        """--chunked-prefill-size. Where nobody gave it, a CPU's default, until `on` has been told the
        device."""
        return STEP_TOKENS["cpu"] if self.chunked_prefill_size is None else self.chunked_prefill_size

    def on(self, device: str) -> SchedulerConfig:
        """The options with the defaults of a `device`: cpu or cuda."""
        return (
            self
            if self.chunked_prefill_size is not None
            else replace(self, chunked_prefill_size=STEP_TOKENS[device])
        )

    def most_running(self, rows: int) -> int:
        """Requests that run at once, where memory allows. `rows` of each in a step: more than fit into one
        would take turns."""
        return self.max_running_requests or max(1, min(self.step_tokens // rows, CAPTURED))
