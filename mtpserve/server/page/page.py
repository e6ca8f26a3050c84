"""The page at `/`: a place to talk to the model, and what the server does now; here it is served, with the
numbers that it asks for every second, and the requests that run or wait: numbers only, nothing of what they
say. And the page at `/docs`, of the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from starlette.requests import Request
from starlette.responses import Response

from mtpserve import __version__
from mtpserve.core.request import ModelCard
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.observe.history import RECENT_S
from mtpserve.server.observe.observed import RequestClock
from mtpserve.server.observe.percentiles import Latency
from mtpserve.server.observe.tiers import Tier, tiers
from mtpserve.server.page.assembled import Page

if TYPE_CHECKING:
    from mtpserve.server.chat.service import Service


class EngineRow(Rendered):
    engine: int
    state: str  # starting, up or dead
    restarts: int
    reason: str | None  # why its last process died
    stats: EngineStats


class Stats(Rendered):
    """The engine's counters and gauges as they are, of several engines together, and what is needed to read
    them. `dead` says why the engine is gone. Latencies: of first tokens from their request's arrival, between
    tokens (those that come together share the wait), and of whole requests that ended by themselves; the
    recent ones are of `recent_s` seconds or a little more."""

    model: str
    version: str
    dead: str | None
    draining: bool
    warnings: list[str]
    speculative_steps: int
    speculative_algorithm: str | None  # as --speculative-algorithm names it; null: plain decoding
    context_length: int
    chat: bool  # it has a chat template
    about: str  # what a model without one is, in a sentence for people
    # of chats that name no sampling: its fields, and `source`, as in /v1/models
    default_sampling: dict[str, int | float | str]
    page_size: int
    stats: EngineStats
    tiers: dict[str, Tier]  # the prefix cache's tiers below the device
    engines: list[EngineRow]
    recent_s: float
    latency: dict[str, Latency]  # first_token, between_tokens, whole_request


SHOWN = 256


class LiveRequest(Rendered):
    """One choice. `id` is what `/abort_request` takes, which ends all choices that have it."""

    id: str
    choice: int
    route: str
    engine: int
    # waiting: for its first token, in the queue or while its prompt is computed
    state: Literal["waiting", "running"]
    age_s: float
    prompt_tokens: int
    cached_tokens: int | None  # null: not known before the first token
    output_tokens: int
    verifications: int
    draft_tokens: int
    accepted_tokens: int


class LiveRequests(Rendered):
    """The oldest, at most 256, of `total`."""

    total: int
    requests: list[LiveRequest]


PAGE, DOCS = Page("index.html"), Page("docs.html")
BUNDLED = Path(__file__).parents[2] / "demo"
TOY = "This is a 6 M-parameter toy that was trained on Python source. It continues code and cannot converse."
NO_TEMPLATE = "This checkpoint has no chat template. It continues text and cannot hold a conversation."
SYNTHETIC = "SYNTHETIC ACCEPTANCE: drafts are accepted by lot. The output means nothing."
LOSSY = "LOSSY: acceptance thresholds below 1. The output is not what the model alone would give."


def page_response(status: int = 200) -> Response:
    """503 while the model loads: a browser shows the page all the same, and a probe is not misled."""
    return PAGE.response(status)


async def page() -> Response:
    """The server's page, for browsers."""
    return page_response()


async def docs() -> Response:
    """All routes of this server, for browsers."""
    return DOCS.response()


def about(service: Service) -> str:
    """What the page says of a model that cannot converse; empty where it can."""
    if service.tokenizer.has_chat_template:
        return ""
    return TOY if service.engine_config.model.directory == BUNDLED else NO_TEMPLATE


def warnings(card: ModelCard) -> list[str]:
    """What every reader of the output must know."""
    return [
        text
        for text, is_shown in ((LOSSY, card.lossy), (SYNTHETIC, card.synthetic_acceptance is not None))
        if is_shown
    ]


async def stats(request: Request) -> Response:
    """The engine's counters and gauges, as JSON; /metrics has them for Prometheus."""
    service: Service = request.app.state.service
    card, counted = service.client.card, service.client.stats()
    body = Stats(
        model=card.name,
        version=__version__,
        dead=service.client.dead,
        draining=service.draining or service.leaving,
        warnings=warnings(card),
        speculative_steps=card.speculative_steps,
        speculative_algorithm=card.algorithm,
        context_length=card.context_length,
        chat=service.tokenizer.has_chat_template,
        about=about(service),
        default_sampling=service.chat_sampling.effective_values | {"source": service.chat_sampling.source},
        page_size=card.page_size,
        stats=counted,
        tiers=tiers(counted),
        engines=[
            EngineRow(engine.number, engine.state, engine.restarts_total, engine.reason or None, engine.stats)
            for engine in service.client.engines
        ],
        recent_s=RECENT_S,
        latency=service.history.latencies(),
    )
    return JSON(body, headers={"Cache-Control": "no-store"})


def live_requests(clocks: Collection[RequestClock]) -> LiveRequests:
    now = perf_counter()
    oldest = sorted(clocks, key=lambda clock: clock.arrival)[:SHOWN]
    return LiveRequests(len(clocks), [_row(clock, now) for clock in oldest])


def _row(clock: RequestClock, now: float) -> LiveRequest:
    observed = clock.observed
    id, _, choice = observed.request.id.rpartition("-")
    waits = observed.first_token is None
    return LiveRequest(
        id=id,
        choice=int(choice) if choice.isdecimal() else 0,
        route=clock.route,
        engine=clock.engine,
        state="waiting" if waits else "running",
        age_s=now - clock.arrival,
        prompt_tokens=len(observed.request.prompt),
        cached_tokens=None if waits else observed.cached,
        output_tokens=observed.tokens,
        verifications=observed.verifications,
        draft_tokens=observed.proposed_tokens,
        accepted_tokens=observed.accepted_tokens,
    )


async def requests(request: Request) -> Response:
    """List the requests that run or wait, the oldest first."""
    service: Service = request.app.state.service
    return JSON(live_requests(service.live), headers={"Cache-Control": "no-store"})
