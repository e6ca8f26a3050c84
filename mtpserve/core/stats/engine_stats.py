"""The engine's counters and gauges, each with its metrics. A new one is a field here, and a line where it is
counted. Metrics of one kind are exported in the order of the fields."""

# ruff: noqa: RUF009 (counter, gauge, histogram and state are dataclasses.field with metadata)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mtpserve.core.stats.metric import (
    Series,
    all_keys,
    counter,
    depths as by_depth,
    gauge,
    histogram,
    metrics_of,
    named,
    positions,
    state,
)


@dataclass(frozen=True, slots=True)
class DepthState:
    """How deep the engine drafts now, where it chooses that itself."""

    adaptive: bool  # False: as deep as is allowed
    num_steps: int  # the deepest that is allowed
    depth: int  # the last choice
    tokens_per_second: float | None  # expected of it; None: nothing was measured
    changes_total: int
    trials_total: int  # steps that tried another depth
    # by rank, learned: of a chain's draft where the one before it was accepted, of a tree's node always
    acceptance: list[float]


# off: no model drafts, or it is not watched; weak: fewer of its drafts are accepted than should be;
# suspended: hardly any are, and it does not draft.
DraftState = Literal["off", "unmeasured", "ok", "weak", "suspended"]
WORST_FIRST: tuple[DraftState, ...] = ("suspended", "weak", "unmeasured", "ok", "off")


@dataclass(slots=True)
class DraftHealth:
    """What the engine knows of its draft model: see engine/depth/watchdog."""

    state: DraftState = "off"
    start: float | None = None  # share of the first drafts that were accepted at start; None: not measured
    floor: float = 0.0  # below which a draft model is weak
    faults_total: int = 0  # how often it was weak or suspended
    reason: str = ""  # why it last failed; "": it never did


def first_depths(values: Sequence[DepthState | None]) -> DepthState | None:
    """The first engine's that has any."""
    return next((depths for depths in values if depths is not None), None)


def worst_health(values: Sequence[DraftHealth]) -> DraftHealth:
    """The worst engine's, with the faults of all."""
    worst = min(values, key=lambda health: WORST_FIRST.index(health.state), default=DraftHealth())
    return replace(worst, faults_total=sum(health.faults_total for health in values))


def last_version(values: Sequence[str]) -> str:
    """The last engine's that says one."""
    return next((version for version in reversed(values) if version), "")


# Buckets of EngineStats.step_tokens: the tokens of a step, at most. One more is for all above.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_HELP = "Tokens that one step computes: prompt tokens and generated tokens."
TRANSFERS = named("save", "load", "spill", "fetch", "pull", "send")
WAYS_HELP = (
    "save and load: to host memory and back, spill and fetch: to disk and back, pull and send: from another "
    "node and to one"
)


@dataclass(slots=True)
class EngineStats:
    """Counters since start (…_total and lists) and gauges of now. Position i of the lists is depth i+1."""

    running: int = gauge(
        "requests_running",
        "Requests that the engine is computing.",
        replica="Requests that this engine is computing.",
        vllm=(("num_requests_running", "Running requests."),),
        sglang=(("num_running_reqs", "Running requests."),),
    )
    waiting: int = gauge(
        "requests_waiting",
        "Requests that wait for the engine.",
        replica="Requests that wait for this engine.",
        vllm=(("num_requests_waiting", "Waiting requests."),),
        sglang=(("num_queue_reqs", "Requests in the queue."),),
    )
    # waiting requests whose pages are on their way from host memory, the disk or another node
    waiting_for_pages: int = gauge()
    paused: int = gauge("engine_paused", "Engines whose generation is paused.")
    sleeping: int = gauge("engine_sleeping", "Engines that have given memory back and sleep.")
    pages_total: int = gauge(
        "kv_pages",
        "Pages in the KV pool.",
        replica="Pages in this engine's KV pool.",
        sglang=(("num_pages", "Pages in the KV pool."),),
    )
    pages_used: int = gauge(
        "kv_pages_used", "Pages of the KV pool in use.", replica="Pages of this engine's KV pool in use."
    )
    pages_cached: int = gauge(
        "kv_pages_cached", "Free pages of the KV pool whose contents a request may find."
    )
    leased_pages: int = gauge(
        "kv_transfer_leased_pages", "Pages in host memory that are kept for other nodes."
    )
    steps_total: int = counter("engine_steps", "Steps that the engine has run.")
    prompt_tokens_total: int = counter(
        "prompt_tokens",
        "Prompt tokens of requests that got their first token.",
        replica="Prompt tokens of this engine's requests that got their first token.",
        vllm=(
            ("prompt_tokens", "Prompt tokens processed."),
            ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache."),
        ),
    )
    cached_prompt_tokens_total: int = counter(
        "cached_prompt_tokens",
        "Prompt tokens served from the prefix cache.",
        replica="Prompt tokens served from this engine's prefix cache.",
        vllm=(
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache."),
            ("prefix_cache_hits", "Prompt tokens served from the prefix cache."),
        ),
    )
    generation_tokens_total: int = counter(
        "generation_tokens",
        "Tokens generated.",
        replica="Tokens generated by this engine.",
        vllm=(("generation_tokens", "Tokens generated."),),
    )
    dropped_pages_total: int = counter(
        "kv_dropped_pages", "Pages that the device gave away and host memory had no place for."
    )
    leases_total: int = counter("kv_transfer_leases", "Requests whose pages were kept for another node.")
    expired_leases_total: int = counter(
        "kv_transfer_expired_leases", "Requests whose pages no other node read in time."
    )
    preemptions_total: int = counter(
        "preemptions",
        "Times that a running request lost its pages to another and was computed again.",
        vllm=(("num_preemptions", "Preemptions."),),
        sglang=(("num_retracted_requests", "Requests that lost their pages and were computed again."),),
    )
    failed_requests_total: int = counter(
        "failed_requests",
        "Requests that ended with an error in the engine, unless their own constraints excluded every token.",
    )
    depths: DepthState | None = state(  # None: the depth is fixed
        lambda: None,
        first_depths,
        Series(
            "counter",
            "spec_depth_changes",
            "Times that another depth was chosen.",
            lambda depths: 0 if depths is None else depths.changes_total,
        ),
        Series(
            "counter",
            "spec_trials",
            "Steps that tried another depth, to learn what it gives.",
            lambda depths: 0 if depths is None else depths.trials_total,
        ),
    )
    weight_version: str = state(str, last_version)  # the operator's name of the weights; "": not known
    draft_health: DraftHealth = state(
        DraftHealth,
        worst_health,
        Series(
            "counter",
            "spec_faults",
            "Times that the draft model was found at fault, at start and while serving.",
            lambda health: health.faults_total,
        ),
    )
    drafts_total: int = counter(
        "spec_drafts",
        "Verifications that had at least one draft token.",
        vllm=(("spec_decode_num_drafts", "Verifications."),),
        sglang=(("spec_verify_calls", "Verifications."),),
    )
    draft_tokens_total: int = counter(
        "spec_draft_tokens",
        "Draft tokens verified.",
        replica="Draft tokens verified by this engine.",
        vllm=(("spec_decode_num_draft_tokens", "Draft tokens."),),
    )
    accepted_tokens_total: int = counter(
        "spec_accepted_tokens",
        "Draft tokens accepted.",
        replica="Draft tokens accepted by this engine.",
        vllm=(("spec_decode_num_accepted_tokens", "Accepted draft tokens."),),
    )
    accept_lengths: list[int] = histogram(  # [n]: verifications that committed n+1 tokens
        "spec_accept_length", "Tokens committed by one verification: accepted drafts and one more."
    )
    step_tokens: list[int] = histogram(  # [n]: steps with at most STEP_TOKENS[n] tokens
        "step_tokens",
        STEP_HELP,
        vllm=(("iteration_tokens_total", STEP_HELP),),
        bounds=STEP_TOKENS,
        sum="step_tokens_total",
    )
    step_tokens_total: int = counter()  # tokens of all these steps
    steps_per_depth: list[int] = counter(  # [n]: steps that drafted n deep
        "spec_steps",
        "Steps with decoding requests, by how deep they drafted for the next one.",
        list,
        label="depth",
        parts=by_depth,
    )
    draft_tokens_per_position: list[int] = counter(  # [i]: of depth i+1
        "spec_draft_tokens_per_position",
        "Draft tokens verified, by position in the draft, 1 first, without those that a grammar forces.",
        list,
        label="position",
        parts=positions,
    )
    draft_tokens_by_source: dict[str, int] = counter(
        "spec_draft_tokens_by_source",
        "Draft tokens verified, by who proposed them.",
        dict,
        label="source",
        parts=all_keys,
    )
    accepted_tokens_per_position: list[int] = counter(  # [i]: of depth i+1
        "spec_accepted_tokens_per_position",
        "Draft tokens accepted, by position in the draft, 1 first, without those that a grammar forces.",
        list,
        label="position",
        parts=positions,
    )
    accepted_tokens_by_source: dict[str, int] = counter(
        "spec_accepted_tokens_by_source",
        "Draft tokens accepted, by who proposed them.",
        dict,
        label="source",
        parts=all_keys,
    )
    tier_pages_total: dict[str, int] = gauge(
        "kv_tier_pages",
        "Pages that a tier of the prefix cache below the device may hold.",
        dict,
        label="tier",
        parts=named("host"),
    )
    tier_pages: dict[str, int] = gauge(
        "kv_tier_pages_used", "Pages in that tier.", dict, label="tier", parts=named("host")
    )
    loaded_pages: dict[str, int] = counter(
        "kv_loaded_pages",
        "Pages that came back to the device, by the tier that had them.",
        dict,
        label="tier",
        parts=named("host", "disk"),
    )
    transfers_total: dict[str, int] = counter(
        "kv_transfers", f"Pages moved between tiers; {WAYS_HELP}.", dict, label="kind", parts=TRANSFERS
    )
    transfer_bytes_total: dict[str, int] = counter(
        "kv_transfer_bytes",
        f"Bytes of pages moved between tiers; {WAYS_HELP}.",
        dict,
        label="kind",
        parts=TRANSFERS,
    )
    # the sum over all pages; several transfers may run at once
    transfer_seconds_total: dict[str, float] = counter(
        "kv_transfer_seconds",
        f"Seconds of page transfers between tiers, summed; {WAYS_HELP}.",
        dict,
        label="kind",
        parts=TRANSFERS,
    )
    failed_transfers_total: dict[str, int] = counter(
        "kv_failed_transfers",
        f"Pages that could not be moved; {WAYS_HELP}.",
        dict,
        label="kind",
        parts=TRANSFERS,
    )
    failed_pulls_total: dict[str, int] = counter(
        "kv_transfer_failures",
        "Pages that another node was to send and that were computed here, by why they did not come.",
        dict,
        label="reason",
        parts=named(  # docs/deploy.md says what they mean
            "unreachable", "broken", "differs", "damaged", "ended", "timeout", "absent", "no_room", "failed"
        ),
    )

    @property
    def page_share(self) -> float:
        """Share of the KV pool's pages that is in use, in [0, 1]."""
        return self.pages_used / max(1, self.pages_total)

    def accept_length(self, before: EngineStats | None = None) -> float | None:
        """Mean number of tokens that a verification committed, since `before` or since the start; None: there
        was none."""
        start = before or EngineStats()
        count = self.drafts_total - start.drafts_total
        return 1 + (self.accepted_tokens_total - start.accepted_tokens_total) / count if count else None

    def accept_rate(self, before: EngineStats | None = None) -> float | None:
        """Share of the draft tokens that were accepted, since `before` or since the start; None: there were
        none."""
        start = before or EngineStats()
        count = self.draft_tokens_total - start.draft_tokens_total
        return (self.accepted_tokens_total - start.accepted_tokens_total) / count if count else None


METRICS = metrics_of(EngineStats)
