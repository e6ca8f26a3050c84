"""The engine as the server sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence as Seq
from typing import Protocol

from mtpserve.core.profile import ProfileChange, ProfileReport
from mtpserve.core.protocols.control import Calls, Reply, UpdateWeights
from mtpserve.core.request import ModelCard, Request, TokenEvent
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import EngineState, SpecChange, SpecReport


class RequestClient(Protocol):
    """An engine in this process or another one."""

    card: ModelCard

    def submit(self, request: Request) -> AsyncGenerator[list[TokenEvent], None]:
        """Events until one has `finish`: each time those that have come since the last, at least one. Closing
        the iterator early aborts the request. Raises EngineBusy or EngineDead."""
        ...

    def abort(self, request_id: str) -> None: ...

    def reset_prefix_cache(self) -> None:
        """Requests that are submitted from now on find nothing that was computed before."""
        ...

    @property
    def dead(self) -> str | None:
        """None while the engine lives, else one line of why it does not."""
        ...

    def stats(self) -> EngineStats: ...


class EngineClient(RequestClient, Protocol):
    """One engine or several, as one; `stats` are those of all together."""

    @property
    def engines(self) -> Seq[EngineState]: ...

    def where(self, request_id: str) -> int:
        """The number of the engine that has a request; 0 while none has."""
        ...

    async def set_spec(self, change: SpecChange) -> dict[int, SpecReport]:
        """Set the depth of later proposals, where it is not fixed; an empty change only asks. The reports of
        the engines that are up, at least one, by number. Raises EngineDead."""
        ...

    async def control(self, call: Calls) -> Reply:
        """Has every engine that is up, and each of its ranks, do what the call says between two steps, with
        none in flight. Raises InvalidRequest or RequestFailed where one has not done it, and EngineDead."""
        ...

    async def update_weights(self, call: UpdateWeights) -> Reply:
        """Does what `control` does, once no request runs: new ones wait, unless generation is paused."""
        ...

    async def profile(self, change: ProfileChange) -> Seq[ProfileReport]:
        """Begins a trace of what is computed, or ends one: the reports of the engines that are up, at least
        one. Raises EngineDead."""
        ...
