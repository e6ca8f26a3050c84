"""An EngineClient without a process: the fake engine stepped in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from mtpserve.core.errors import EngineDead, RequestFailed
from mtpserve.core.profile import ProfileChange, ProfileReport
from mtpserve.core.protocols.control import Calls, Reply, UpdateWeights
from mtpserve.core.request import Request, TokenEvent
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import EngineState, SpecChange, SpecReport
from mtpserve.engine.process.messages import Submit
from tests.server.fake_engine import FakeEngine


class FakeClient:
    def __init__(self, pause: float = 0.0, together: int = 1) -> None:
        """`together`: so many events come at once, as to a reader that is late."""
        self.engine = FakeEngine("fake", 0.0)
        self.pause, self.together = pause, together
        self.card = self.engine.card
        self.dead: str | None = None
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.profiles: list[ProfileChange] = []
        self.versions: dict[int, str] = {}  # of the weights, by the number of tokens before they changed

    async def submit(self, request: Request) -> AsyncIterator[list[TokenEvent]]:
        msgspec.msgpack.encode(Submit(request))  # as it would travel: numbers of any size do not
        self.submitted.append(request)
        self.engine.compile(request.sampling.grammar)
        self.engine.add(request, compiled=True)
        events: list[TokenEvent] = []
        while True:
            await asyncio.sleep(self.pause)
            while (self.engine.stats.paused or self.engine.stats.sleeping) and request.id in self.engine.live:
                await asyncio.sleep(0.001)
            if self.dead is not None:
                raise EngineDead(self.dead)
            if request.id not in self.engine.live:
                raise RequestFailed("the request was aborted")
            live, done = self.engine.live[request.id]
            event = self.engine._event(live, done)
            if done in self.versions:
                event = msgspec.structs.replace(event, weight_version=self.versions[done])
            events.append(event)
            if len(events) == self.together or event.finish is not None:
                yield events
                events = []
            if event.finish is not None:
                return

    def abort(self, request_id: str) -> None:
        if request_id in self.engine.live:
            self.aborted.append(request_id)
            self.engine.abort(request_id)

    def where(self, request_id: str) -> int:
        return 0

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    async def set_spec(self, change: SpecChange) -> dict[int, SpecReport]:
        if self.dead is not None:
            raise EngineDead(self.dead)
        return {0: self.engine.set_spec(change)}

    async def control(self, call: Calls) -> Reply:
        return self.engine.controls.take(call).check()

    async def update_weights(self, call: UpdateWeights) -> Reply:
        return await self.control(call)

    async def profile(self, change: ProfileChange) -> list[ProfileReport]:
        self.profiles.append(change)
        return [ProfileReport(files=[] if change.folder else ["trace"])]

    def stats(self) -> EngineStats:
        return self.engine.stats

    @property
    def engines(self) -> list[EngineState]:
        return [EngineState(0, "up" if self.dead is None else "dead", 0, 0, self.dead or "", self.stats())]
