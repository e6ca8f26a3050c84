"""What the front end sees of each request, for whoever counts it: our metrics, and the same facts under peers' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from mtpserve.core.protocols import EngineClient
from mtpserve.core.request import EngineStats, FirstTokenTimes, ModelCard, Request
from mtpserve.server.observe.recent import Rates, Recent

OUTCOMES = ("stop", "length", "abort", "error", "rejected")
FINISHED = ("stop", "length")


@dataclass(slots=True)
class Observed:
    """One request, as far as it came. Durations are in seconds."""

    request: Request
    streaming: bool
    tokens: int = 0
    first_token: float | None = None  # from arrival
    decoding: float = 0.0  # from the first token to the last
    times: FirstTokenTimes | None = None
    outcome: str = "abort"
    seconds: float = 0.0  # from arrival to the end

    @property
    def finished(self) -> bool:
        return self.outcome in FINISHED

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first."""
        return self.decoding / (self.tokens - 1) if self.tokens > 1 else None


class Observer(Protocol):
    def first_token(self, seconds: float) -> None: ...
    def step(self, seconds: float, tokens: int) -> None:
        """Tokens that came together, `seconds` after those before them."""
        ...

    def end(self, seen: Observed) -> None: ...


class RequestClock:
    """Times one request. `arrival` is perf_counter's."""

    def __init__(self, observers: Sequence[Observer], request: Request, arrival: float, streaming: bool) -> None:
        self._observers = observers
        self._seen = Observed(request, streaming)
        self._arrival = arrival
        self._last = arrival

    def tokens(self, count: int, times: FirstTokenTimes | None) -> None:
        if count == 0:
            return
        seen, now = self._seen, perf_counter()
        gap, self._last = now - self._last, now
        seen.tokens += count
        if seen.first_token is None:
            seen.first_token, seen.times = gap, times
            for observer in self._observers:
                observer.first_token(gap)
        else:
            seen.decoding += gap
            for observer in self._observers:
                observer.step(gap, count)

    def end(self, outcome: str) -> None:
        self._seen.outcome = outcome
        self._seen.seconds = perf_counter() - self._arrival
        for observer in self._observers:
            observer.end(self._seen)


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape sees of the engine."""

    stats: EngineStats
    rates: Rates
    card: ModelCard
    alive: bool

    @property
    def page_share(self) -> float:
        return self.stats.pages_used / max(1, self.stats.pages_total)


class EngineView:
    """The engine as its collectors read it."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._recent = Recent()

    @property
    def card(self) -> ModelCard:
        return self._client.card

    def scrape(self) -> Scrape:
        client, stats = self._client, self._client.stats()
        return Scrape(stats, self._recent.rates(stats), client.card, client.dead is None)
