"""`/v1/spec`: how deep the engine goes and why, for operators to see and to set."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from pydantic import ConfigDict
from starlette.responses import Response

from mtpserve.core.errors import EngineBusy, InvalidRequest
from mtpserve.core.stats.reports import SpecChange, SpecReport, StepTime
from mtpserve.server.chat.service import Served, Service
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.schema.base import Strict
from mtpserve.server.schema.shapes import SERVER, Schema, present

ANSWER_S = 20.0  # a step may take long


class SpecFields(Rendered):
    """`num_steps` is the deepest that is allowed now, `depth` the last choice. Where the depth is fixed,
    `fixed` says why."""

    algorithm: str | None
    adaptive: bool
    configured_steps: int
    num_steps: int
    depth: int
    fixed: str | None
    tokens_per_second: float | None
    changes_total: int
    trials_total: int
    acceptance: list[float]
    verified_per_position: list[int]
    accepted_per_position: list[int]
    steps_per_depth: list[int]
    step_times: list[StepTime]
    coefficients_ms: dict[str, float]


class EngineSpec(SpecFields):
    engine: int


class SpecObject(SpecFields):
    """The first engine's that is up, and each one's by itself."""

    engines: list[EngineSpec]


class SpecBody(Strict):
    """What is left out stays as it is. No other field is ignored: a wrong name would seem to have been
    set."""

    model_config = ConfigDict(extra="forbid", strict=True)

    shapes: ClassVar[dict[str, Schema]] = {"num_steps": {"minimum": 0, SERVER: "steps"}}
    rules: ClassVar[tuple[Schema, ...]] = (
        {"anyOf": [present("adaptive"), present("num_steps"), present("reset")]},
    )

    adaptive: bool | None = None
    num_steps: int | None = None
    reset: bool | None = None


async def show_spec(service: Served) -> Response:
    """Show the state of spec decoding. How many tokens ahead the engine goes, what it has learned of
    acceptance, and what steps cost."""
    return JSON(spec_object(service, await exchange(service, SpecChange())))


async def set_spec(service: Served, body: SpecBody) -> Response:
    """Change spec decoding while the server runs. Sets whether the engine chooses how far ahead it goes, and
    the most that it may, from the next step on. `reset` forgets the learned acceptance."""
    service.check_alive()
    if body == SpecBody():
        raise InvalidRequest("give adaptive, num_steps or reset", "adaptive")
    # what may be set is the same for all
    settings = next(iter((await exchange(service, SpecChange())).values()))
    if settings.fixed is not None:
        (field, value), *_ = body.model_dump(exclude_none=True).items()
        raise InvalidRequest(f"{field} cannot be set to {str(value)[:50]}: {settings.fixed}", field)
    if body.num_steps is not None and not 0 <= body.num_steps <= settings.configured:
        raise InvalidRequest(
            f"num_steps must be in [0, {settings.configured}], got {str(body.num_steps)[:50]}", "num_steps"
        )
    return JSON(
        spec_object(
            service, await exchange(service, SpecChange(body.adaptive, body.num_steps, bool(body.reset)))
        )
    )


async def exchange(service: Service, change: SpecChange) -> dict[int, SpecReport]:
    try:
        return await asyncio.wait_for(service.client.set_spec(change), ANSWER_S)
    except TimeoutError:
        raise EngineBusy(f"the engine did not answer within {ANSWER_S:g} s") from None


def spec_object(service: Service, reports: dict[int, SpecReport]) -> SpecObject:
    engines = [spec_of(service, report, number) for number, report in reports.items()]
    fields = {name: getattr(engines[0], name) for name in SpecFields.__struct_fields__}
    return SpecObject(**fields, engines=engines)


def spec_of(service: Service, report: SpecReport, engine: int) -> EngineSpec:
    state, steps = report.state, report.configured
    return EngineSpec(
        engine=engine,
        algorithm=service.client.card.algorithm,
        adaptive=state is not None and state.adaptive,
        configured_steps=steps,
        num_steps=steps if state is None else state.num_steps,
        depth=steps if state is None else state.depth,
        fixed=report.fixed,
        tokens_per_second=None if state is None else state.tokens_per_second,
        changes_total=0 if state is None else state.changes_total,
        trials_total=0 if state is None else state.trials_total,
        acceptance=[] if state is None else state.acceptance,
        verified_per_position=report.verified_per_position,
        accepted_per_position=report.accepted_per_position,
        steps_per_depth=report.steps_per_depth,
        step_times=report.costs.steps,
        coefficients_ms=report.costs.coefficients_ms,
    )
