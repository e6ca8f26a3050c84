"""What servers export about drafts: their counters at /metrics, and what some say of a single request.
Clients read it here.

A run's figures are the differences of the counters after and before it. Where a server offers several sets of
names, the first of `SETS` that it has is read; series with other labels (engines, ranks) are added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import msgspec

LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class CounterNames:
    """One server's names. `first`: its number for a draft's first position."""

    server: str
    verifications: str
    proposed: str | None
    accepted: str | None
    accepted_at: str | None
    proposed_at: str | None
    first: int
    prompt: str
    cached: str
    generated: str
    # where accepted tokens are not counted, they follow from these three: generated, verifications, requests
    requests: str | None = None


def _vllms(prefix: str, prompt: str, cached: str, generated: str, server: str) -> CounterNames:
    def name(what: str) -> str:
        return f"{prefix}spec_decode_num_{what}_total"

    accepted = "accepted_tokens"
    return CounterNames(server, name("drafts"), name("draft_tokens"), name(accepted),
        name(f"{accepted}_per_pos"), None, 0, prompt, cached,
                        generated)  # fmt: skip


SETS = (
    CounterNames(
        "mtpserve",
        "mtpserve_spec_drafts_total",
        "mtpserve_spec_draft_tokens_total",
        "mtpserve_spec_accepted_tokens_total",
        "mtpserve_spec_accepted_tokens_per_position_total",
        "mtpserve_spec_draft_tokens_per_position_total",
        1,
        "mtpserve_prompt_tokens_total",
        "mtpserve_cached_prompt_tokens_total",
        "mtpserve_generation_tokens_total",
    ),
    _vllms(
        "vllm:",
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_hits_total",
        "vllm:generation_tokens_total",
        "vLLM",
    ),
    CounterNames(
        "SGLang",
        "sglang:spec_verify_calls_total",
        None,
        None,
        None,
        None,
        0,
        "sglang:prompt_tokens_total",
        "sglang:cached_tokens_total",
        "sglang:generation_tokens_total",
        "sglang:num_requests_total",
    ),
    _vllms("llamacpp:", "llamacpp:prompt_tokens_total", "", "llamacpp:tokens_predicted_total", "llama.cpp"),
)


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """`accepted_at` and `proposed_at` begin with a draft's first position. None: not exported."""

    server: str
    verifications: float  # with at least one draft token
    proposed: float | None
    accepted: float | None
    accepted_at: tuple[float, ...]
    proposed_at: tuple[float, ...] | None
    prompt: float  # tokens
    cached: float | None  # prompt tokens that the prefix cache had
    generated: float

    @property
    def length(self) -> float | None:
        """Tokens that a verification commits: 1 + accepted / verifications."""
        return (
            None
            if self.accepted is None or not self.verifications
            else 1 + self.accepted / self.verifications
        )

    @property
    def rate(self) -> float | None:
        return None if self.accepted is None or not self.proposed else self.accepted / self.proposed

    @property
    def rates_at(self) -> tuple[float, ...]:
        """The acceptance of each position: accepted / proposed there. Without proposals by position it is
        accepted / verifications, as in vLLM's client."""
        if self.proposed_at is None:
            return (
                tuple(count / self.verifications for count in self.accepted_at) if self.verifications else ()
            )
        pairs = zip(self.accepted_at, self.proposed_at, strict=True)
        return tuple(accepted / proposed for accepted, proposed in pairs if proposed)

    def since(self, before: ServerCounters) -> ServerCounters:
        """The difference. A position that was not exported before had 0."""

        def less(now: Any, then: Any) -> Any:
            if isinstance(now, tuple):
                then = (*(then or ()), *[0.0] * (len(now) - len(then or ())))
                return tuple(a - b for a, b in zip(now, then, strict=False))
            return now if now is None or isinstance(now, str) else now - (then or 0.0)

        return ServerCounters(
            *(less(getattr(self, field.name), getattr(before, field.name)) for field in fields(self))
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the counters under the names of vLLM's client, and SGLang's `accept_length`. Rates there
        are in percent, those by position are not."""
        results: dict[str, Any] = {
            "counters_of": self.server,
            "counted_prompt_tokens": self.prompt,
            "counted_output_tokens": self.generated,
        }
        results |= {} if self.cached is None else {"cached_prompt_tokens": self.cached}
        if not self.verifications:
            return results
        return results | {
            "spec_decode_num_drafts": self.verifications,
            "spec_decode_draft_tokens": self.proposed,
            "spec_decode_accepted_tokens": self.accepted,
            "spec_decode_acceptance_rate": None if self.rate is None else 100 * self.rate,
            "spec_decode_acceptance_length": self.length,
            "spec_decode_per_position_acceptance_rates": list(self.rates_at),
            "accept_length": self.length,
        }


def read_counters(text: str) -> ServerCounters | None:
    """Reads Prometheus' text format. None: the server has none of `SETS`."""
    series: dict[str, list[tuple[str, float]]] = {}
    for name, labels, value in LINE.findall(text):
        series.setdefault(name, []).append((labels, float(value)))
    names = next((counter_names for counter_names in SETS if counter_names.generated in series), None)
    if names is None:
        return None

    def total(name: str | None) -> float | None:
        return sum(value for _, value in series[name]) if name in series else None

    def places(name: str | None) -> tuple[float, ...] | None:
        if name not in series:
            return None
        at: dict[int, float] = {}
        for labels, value in series[name]:
            if match := POSITION.search(labels):
                position = int(match[1]) - names.first
                at[position] = at.get(position, 0.0) + value
        return tuple(at.get(position, 0.0) for position in range(1 + max(at, default=-1)))

    generated, verifications, accepted = (
        total(names.generated) or 0.0,
        total(names.verifications) or 0.0,
        total(names.accepted),
    )
    if names.requests is not None and verifications:
        # Each request's first token is its prompt's; every verification adds one token of the model's own.
        accepted = generated - (total(names.requests) or 0.0) - verifications
    return ServerCounters(
        names.server,
        verifications,
        total(names.proposed),
        accepted,
        places(names.accepted_at) or (),
        places(names.proposed_at),
        total(names.prompt) or 0.0,
        total(names.cached),
        generated,
    )


class RequestFigures(msgspec.Struct, frozen=True):
    """One request's, as mtpserve has them in `usage.speculative`."""

    steps: int = 0  # that committed tokens, the prompt's last among them
    proposed: int = msgspec.field(default=0, name="draft_tokens")
    accepted: int = msgspec.field(default=0, name="accepted_tokens")


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class RequestUsage(msgspec.Struct, frozen=True):
    """`usage` of an answer, as far as clients read it."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    details: CachedTokens | None = msgspec.field(default=None, name="prompt_tokens_details")
    figures: RequestFigures | None = msgspec.field(default=None, name="speculative")


class VLLMRequestFigures(msgspec.Struct, frozen=True):
    """One request's, as vLLM has them in `metrics` with --per-request-spec-decode-metrics. `steps`: without
    the prompt's."""

    steps: int = msgspec.field(default=0, name="num_spec_steps")
    proposed: int = msgspec.field(default=0, name="num_draft_tokens")
    accepted: int = msgspec.field(default=0, name="num_accepted_draft_tokens")


class VLLMRequestMetrics(msgspec.Struct, frozen=True):
    figures: VLLMRequestFigures | None = msgspec.field(default=None, name="speculative_decoding")
