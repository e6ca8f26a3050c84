"""One request's times and tokens. All times are seconds on one monotonic clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

BY_USAGE = "usage"  # each chunk says how many tokens there are so far
# the tokenizer's count of each chunk's text, scaled to the total from usage where there is one
BY_TOKENIZER = "tokenizer"
BY_LENGTH = "characters"  # the total is usage's, divided among the chunks by their characters
BY_CHUNK = "chunks"  # nobody says: each chunk is taken for one token


class Arrival(NamedTuple):
    """A chunk with tokens."""

    time: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str  # what it is counted under: HTTP 429
    detail: str = ""  # the server's words


@dataclass(frozen=True, slots=True)
class Sent:
    """The times at which a request was due, had its turn, and was written: between `ready` and `at` it waited
    for a slot."""

    planned_at: float
    ready: float
    at: float

    @property
    def lateness(self) -> float:
        return self.ready - self.planned_at

    @property
    def slot_wait(self) -> float:
        return self.at - self.ready


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """What the server says of this request's verifications."""

    steps: int
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Measured:
    sent: Sent
    end: float
    streamed: bool = True
    arrivals: tuple[Arrival, ...] = ()  # times of tokens; one, at the end, without streaming
    prompt_tokens: int | None = None  # as the server counts
    output_tokens: int = 0
    cached_tokens: int | None = None
    counted_by: str = BY_USAGE
    meant: int | None = None  # prompt tokens that were intended
    max_tokens: int | None = None  # output tokens that the request wants
    finish: str | None = None
    category: str = ""
    figures: OwnFigures | None = None
    failure: Failure | None = None
    text: str = ""

    @property
    def e2e(self) -> float:
        """The seconds from sending to the response's end."""
        return self.end - self.sent.at

    @property
    def from_planned(self) -> float:
        return self.end - self.sent.planned_at

    @property
    def ttft(self) -> float | None:
        """The seconds to the first chunk with a token; a chunk that only opens the message has none."""
        return self.arrivals[0].time - self.sent.at if self.streamed and self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first. Tokens that came with the first took no time, and count, as in
        the peers' clients."""
        if not self.streamed or self.output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1].time - self.arrivals[0].time) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: k tokens in one chunk waited for a k-th of the gap each. Those of the first
        chunk have none."""
        if not self.streamed:
            return []
        return [
            wait for a, b in pairwise(self.arrivals) for wait in [(b.time - a.time) / b.tokens] * b.tokens
        ]


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """`total` divided by weight, in whole numbers that sum to it: the largest remainders get what is left
    over."""
    total_weight = sum(weights)
    if not total_weight:
        return [total // len(weights) + (i < total % len(weights)) for i in range(len(weights))]
    exact = [total * weight / total_weight for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts
