"""Pauses between two steps, and memory that is given back meanwhile, by SGLang's routes and by vLLM's: for
weights that change, and for whoever needs the device."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.responses import Response

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.control import (
    MEMORY_TAGS,
    ContinueGeneration,
    PauseGeneration,
    PauseMode,
    Sleep,
    WakeUp,
)
from mtpserve.server.chat.service import Served, Service
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.schema.base import Strict

VLLM_MODES: dict[str, PauseMode] = {"abort": "abort", "keep": "in_place"}


class Acknowledged(Rendered):
    message: str
    status: Literal["ok"]


class PauseState(Rendered):
    """vLLM's answer."""

    status: Literal["paused", "resumed"]


class IsPaused(Rendered):
    is_paused: bool


class IsSleeping(Rendered):
    is_sleeping: bool


class Released(Rendered):
    """`bytes`: how many one engine's process gave back to the system."""

    bytes: int


class Resumed(Rendered):
    success: Literal[True]


class MemoryRequest(Strict):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None

    @property
    def memory_tags(self) -> list[str]:
        """Without SGLang's cuda_graph, which needs nothing: steps are captured again after any release."""
        return [tag for tag in self.tags or MEMORY_TAGS if tag in MEMORY_TAGS]


class PauseRequest(Strict):
    mode: PauseMode | None = None


class ContinueRequest(Strict):
    torch_empty_cache: bool | None = None


async def pause(service: Service, mode: PauseMode) -> None:
    """Pauses all engines. abort: what runs or waits ends first; what comes from then on waits."""
    service.check_alive()
    if mode == "abort":
        service.abort(None)
    await service.client.control(PauseGeneration(mode))


async def pause_generation(service: Served, body: PauseRequest | None = None) -> Response:
    """Pause generation between two steps. `abort`, the default, ends the requests with what they have;
    `retract` gives their pages back and computes them anew later; `in_place` keeps their pages. New
    requests wait."""
    mode = (body or PauseRequest()).mode or "abort"
    await pause(service, mode)
    return JSON(Acknowledged(f"generation is paused, mode {mode}", "ok"))


async def continue_generation(service: Served, body: ContinueRequest | None = None) -> Response:
    """Continue after a pause, with the requests that wait."""
    service.check_alive()
    await service.client.control(ContinueGeneration())
    return JSON(Acknowledged("generation continues", "ok"))


async def pause_vllm(
    service: Served, mode: Literal["abort", "keep"] = "abort", clear_cache: bool = True
) -> Response:
    """Pause generation between two steps, by vLLM's name. `abort`, the default, ends the requests with what
    they have, and empties the prefix cache unless `clear_cache` is false; `keep` lets them go on later."""
    await pause(service, VLLM_MODES[mode])
    if mode == "abort" and clear_cache:
        service.client.reset_prefix_cache()
    return JSON(PauseState("paused"))


async def resume_vllm(service: Served) -> Response:
    """Continue after a pause, by vLLM's name."""
    service.check_alive()
    await service.client.control(ContinueGeneration())
    return JSON(PauseState("resumed"))


async def is_paused(service: Served) -> Response:
    """Say whether generation is paused."""
    service.check_alive()
    return JSON(IsPaused(service.client.stats().paused > 0))


async def sleep(service: Served, level: int = 1, mode: Literal["abort", "keep"] = "abort") -> Response:
    """Give memory back and let requests wait, by vLLM's name. The KV cache is dropped; `level` 1 moves the
    weights of a GPU to host memory, 2 drops weights. `abort`, the default, ends the requests with what they
    have; with `keep` they are computed anew later."""
    service.check_alive()
    if level not in (1, 2):
        raise InvalidRequest(f"level must be 1 or 2, got {level}", "level")
    if mode == "abort":
        service.abort(None)
    reply = await service.client.control(Sleep(list(MEMORY_TAGS), drops_weights=level == 2))
    return JSON(Released(reply.values.get("bytes", 0)))


async def wake_up(service: Served, tags: Annotated[list[str], Query()] = []) -> Response:  # noqa: B006
    """Take the memory of some `tags`, weights and kv_cache, or of all again. Dropped weights are loaded as at
    start. Requests go on once nothing is missing."""
    service.check_alive()
    names = [name for tag in tags for name in tag.split(",")]
    await service.client.control(WakeUp(names or None))
    return JSON(Resumed(True))


async def is_sleeping(service: Served) -> Response:
    """Say whether memory was given back."""
    service.check_alive()
    return JSON(IsSleeping(service.client.stats().sleeping > 0))


async def release_memory_occupation(service: Served, body: MemoryRequest | None = None) -> Response:
    """Give the memory of `tags` back, or of all, by SGLang's name. Requests wait, and are computed anew later
    where the KV cache goes."""
    service.check_alive()
    if not (tags := (body or MemoryRequest()).memory_tags):
        return JSON(Released(0))
    reply = await service.client.control(Sleep(tags))
    return JSON(Released(reply.values.get("bytes", 0)))


async def resume_memory_occupation(service: Served, body: MemoryRequest | None = None) -> Response:
    """Take the memory of `tags`, or of all again, by SGLang's name."""
    service.check_alive()
    if tags := (body or MemoryRequest()).memory_tags:
        await service.client.control(WakeUp(tags))
    return JSON(Resumed(True))
