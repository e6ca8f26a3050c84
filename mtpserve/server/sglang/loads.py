"""The load of each engine in SGLang's words, which routers poll to balance."""

from __future__ import annotations

from datetime import UTC, datetime
from time import time
from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from mtpserve import __version__
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.request import ModelCard
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import EngineState
from mtpserve.server.chat.service import Served
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.schema.shapes import SERVER

# among the engines of this server
Rank = Annotated[int, Field(json_schema_extra={"minimum": 0, SERVER: "rank"})]


class EngineLoad(Rendered):
    dp_rank: int  # the engine's number in this server
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int  # in pages of the KV pool that are in use
    max_total_num_tokens: int  # tokens of the whole pool
    token_usage: float  # the share of the two
    cache_hit_rate: float  # the share of prompt tokens since the start
    total_prompt_tokens: int
    total_generation_tokens: int


class TotalLoad(Rendered):
    """The load of all engines together."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    total_tokens: int
    avg_token_usage: float


class Loads(Rendered):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[EngineLoad]
    aggregate: TotalLoad


class OneLoad(Rendered):
    """SGLang's older form."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


def used_tokens(stats: EngineStats, card: ModelCard) -> int:
    return stats.pages_used * card.page_size


def load_of(engine: EngineState, card: ModelCard) -> EngineLoad:
    stats = engine.stats
    return EngineLoad(
        dp_rank=engine.number,
        num_running_reqs=stats.running,
        num_waiting_reqs=stats.waiting,
        num_total_reqs=stats.running + stats.waiting,
        num_used_tokens=used_tokens(stats, card),
        max_total_num_tokens=stats.pages_total * card.page_size,
        token_usage=round(stats.page_share, 4),
        cache_hit_rate=round(stats.cached_prompt_tokens_total / max(1, stats.prompt_tokens_total), 4),
        total_prompt_tokens=stats.prompt_tokens_total,
        total_generation_tokens=stats.generation_tokens_total,
    )


async def loads(service: Served, dp_rank: Rank | None = None) -> Response:
    """The load of each engine, for routers, in SGLang's form. `dp_rank`: of one engine. 503 from SIGTERM
    on, and once the engines are dead: a router then sends its requests elsewhere."""
    service.check_ready()
    engines, card = service.client.engines, service.client.card
    if dp_rank is not None and not 0 <= dp_rank < len(engines):
        raise InvalidRequest(f"dp_rank must be in [0, {len(engines) - 1}], got {dp_rank}", "dp_rank")
    engine_loads = [
        load_of(engine, card)
        for engine in engines
        if engine.state == "up" and dp_rank in (None, engine.number)
    ]
    total = TotalLoad(
        total_running_reqs=sum(load.num_running_reqs for load in engine_loads),
        total_waiting_reqs=sum(load.num_waiting_reqs for load in engine_loads),
        total_reqs=sum(load.num_total_reqs for load in engine_loads),
        total_tokens=sum(load.num_used_tokens for load in engine_loads),
        avg_token_usage=round(sum(load.token_usage for load in engine_loads) / max(1, len(engine_loads)), 4),
    )
    return JSON(
        Loads(
            datetime.fromtimestamp(int(time()), UTC).isoformat(),
            __version__,
            len(engines),
            engine_loads,
            total,
        )
    )


async def get_load(service: Served) -> Response:
    """The load of each engine, in SGLang's older form."""
    service.check_ready()
    card = service.client.card
    engines = [engine for engine in service.client.engines if engine.state == "up"]
    return JSON(
        [
            OneLoad(
                engine.number,
                engine.stats.running + engine.stats.waiting,
                engine.stats.waiting,
                used_tokens(engine.stats, card),
            )
            for engine in engines
        ]
    )
