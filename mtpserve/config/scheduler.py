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
        "requests that run at once (default: by KV pool and tokens per step, at most 256)",
        "max-num-seqs",
    )
    chunked_prefill_size: int | None = option(
        None,
        "tokens per step, prompts and decoding together (default: 512 on a CPU, 2048 on a GPU)",
        "max-num-batched-tokens",
    )
    enable_chunked_prefill: bool = option(
        True, "compute prompts in chunks, together with decoding: always on", "enable-mixed-chunk"
    )
    scheduling_policy: str = option(
        "fcfs",
        "fcfs: requests are served in the order of arrival; lpm: those with the longest prefix in "
        "the cache first, nobody waits for ever; "
        "priority: those with a lower `priority` first, and they are preempted last",
        "schedule-policy",
        choices=("fcfs", "lpm", "priority"),
    )
    schedule_conservativeness: float = option(
        1.0,
        "a request starts if pages for a tenth of what others may still produce stay free, times "
        "this; 0: as soon as it fits",
    )
    long_prefill_token_threshold: int | None = option(
        None,
        "a prompt with more tokens to compute is long, and gets at most so many per step beside "
        "others (default: see docs/cache.md)",
    )
    max_long_partial_prefills: int = option(
        1, "long prompts that are computed at a time: short ones overtake the others"
    )
    random_seed: int | None = option(
        None, "seed from which requests without one get theirs (default: random)"
    )
    max_queued_requests: int | None = option(
        None, "requests that may wait; more are refused with 429", "max-num-queued-reqs"
    )
    disable_cuda_graph: bool = option(
        False, "on a GPU: launch every kernel by itself instead of replaying captured steps", "enforce-eager"
    )
    cuda_graph_max_bs: int | None = option(
        None, "decoding requests in one captured step; further ones run uncaptured (default: "
"--max-running-requests, at most 256)",
        "max-cudagraph-capture-size", "cuda-graph-max-bs-decode",
    )  # fmt: skip
    record_steps: str | None = option(
        None, "file for each step's plan and result, which `mtpserve replay` runs again; prompts included"
    )
    disable_overlap_schedule: bool = option(
        False, "on a GPU: plan a step only after the previous one was read, instead of while it runs"
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
