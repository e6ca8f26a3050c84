"""SGLang's routes for operators: a health check by generating, ending requests, flushing the cache."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from time import perf_counter
from typing import Annotated, ClassVar, Literal

from starlette.responses import Response

from mtpserve.core.errors import EngineBusy, InvalidRequest
from mtpserve.core.request import Request as EngineRequest
from mtpserve.core.sampling import SamplingParams
from mtpserve.server.about import Healthy
from mtpserve.server.chat.service import Served
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.schema.base import RequestId, Strict
from mtpserve.server.schema.fields import either
from mtpserve.server.schema.shapes import Schema, being, present

TRIAL_S = 20.0  # as long as SGLang waits


class Flushed(Rendered):
    success: bool
    message: str


class Aborted(Rendered):
    aborted: int  # choices that were running or waiting


class AbortRequest(Strict):
    """`rid` is the id that the client gave its request, or the one in the answer; SGLang's clients leave it
    empty where they abort all."""

    rules: ClassVar[tuple[Schema, ...]] = (
        {
            "anyOf": [
                present("rid")
                | {
                    "properties": {
                        "rid": {"type": "string", "minLength": 1},
                        "abort_all": {"enum": [None, False]},
                    }
                },
                being("abort_all", True)
                | {"properties": {"rid": {"enum": [None, ""]}, "abort_all": {"const": True}}},
            ]
        },
    )

    rid: Annotated[
        RequestId | Literal[""] | None, either("an id of letters, digits, '.', '_', ':' and '-'")
    ] = None
    abort_all: bool | None = None


async def health_generate(service: Served) -> Response:
    """Say whether the engine can generate a token. 503 when that takes longer than 20 seconds."""
    service.check_ready()
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    trial = EngineRequest(f"health-{uuid.uuid4().hex}", [0], sampling)
    try:
        async with (
            asyncio.timeout(TRIAL_S),
            contextlib.aclosing(service.generate(trial, perf_counter())) as pieces,
        ):
            async for _ in pieces:
                pass
    except TimeoutError:
        raise EngineBusy(f"the engine computed no token within {TRIAL_S:g} s") from None
    return JSON(Healthy("ok"))


async def flush_cache(service: Served) -> Response:
    """Empty the prefix cache. Later requests find nothing that was computed before. Running requests go on:
    a flush is never refused."""
    service.check_alive()
    service.client.reset_prefix_cache()
    return JSON(Flushed(True, "the prefix cache is empty"))


async def abort_request(service: Served, body: AbortRequest) -> Response:
    """Abort one request by its id, or all. They answer with what they have, finish_reason "abort". Ids that
    are not running are ignored."""
    if bool(body.rid) == bool(body.abort_all):
        raise InvalidRequest("give either rid or abort_all: true", "rid")
    return JSON(Aborted(service.abort(body.rid or None)))
