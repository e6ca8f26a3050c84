"""Several engine processes as one. Implements `core.clients.EngineClient`.

    a request ──→ the engine that computed its prompt's beginning, unless that engine has much more to do
                  than the least busy one
    an engine dies ──→ its requests go on in another one, or in itself when it is there again; it starts
                       again after a pause

Where a request goes on, its next token is the one that the lost engine would have given: noise depends on the
request's seed and a token's index alone, and seeds are drawn here. (Where rejection sampling accepts them,
see spec/verify/accept, the text's distribution is the same.) A request that has lost several engines may be
what kills them, and ends with the last one's error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence as Seq
from contextlib import aclosing
from dataclasses import replace
from random import Random, SystemRandom
from time import monotonic
from typing import TypeVar

from mtpserve.core.errors import EngineDead, MTPServeError, QueueFull, RequestFailed, ShuttingDown, quantity
from mtpserve.core.profile import ProfileChange, ProfileReport
from mtpserve.core.protocols.control import Calls, Reply, SetWeightVersion, UpdateWeights
from mtpserve.core.request import ModelCard, Request, TokenEvent
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import EngineState, SpecChange, SpecReport
from mtpserve.engine.process.affinity import Affinity
from mtpserve.engine.process.client import ProcessClient
from mtpserve.engine.process.replica import Progress, Replica, StandingCalls, WeightHistory
from mtpserve.engine.process.totals import counters, total

log = logging.getLogger(__name__)
A = TypeVar("A")

# An engine has much more to do with more than so many requests beyond another's, and more than so many times
# as many.
LOAD_SLACK_REQUESTS, LOAD_SLACK_RATIO = 2, 1.5
MAX_LOST_ENGINES = 3  # that one request may lose
# seconds before an engine is started again: the next one where it has died soon
RESTART_PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0  # seconds after which a death counts as the first one again


class Replicas:
    """`card` exists after `start()`. `make(number, restarts)` gives an engine that was not started;
    `restarts`: how often each is started again after it has died; `seed`: from which requests without one get
    theirs; `together`: they share experts, so that they die and are started together."""

    card: ModelCard

    def __init__(
        self,
        make: Callable[[int, int], ProcessClient],
        count: int,
        *,
        restarts: int = 0,
        seed: int | None = None,
        together: bool = False,
    ) -> None:
        self._make, self._restarts, self._together = make, restarts, together
        self._seeds = SystemRandom() if seed is None else Random(seed)
        self._joins, self._standing = 0, StandingCalls()
        self._replicas = [Replica(number, self._create(number, 0)) for number in range(count)]
        self._affinity = Affinity()
        self._open: dict[str, Replica | None] = {}  # None: it waits for an engine
        self._aborted: set[str] = set()  # requests that wait
        # set, and made anew, when an engine has come up or a request has ended
        self._changed = asyncio.Event()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._draining = False
        # requests wait while weights change, unless generation is paused
        self.paused, self._updating, self._update = False, False, asyncio.Lock()
        self._history = WeightHistory()
        self._supervisors: list[asyncio.Task[None]] = []

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when all engines are ready. Raises what the first failure raises."""
        await asyncio.gather(*(replica.client.start() for replica in self._replicas))
        first, *others = [replica.client.card for replica in self._replicas]
        capacity = None if first.capacity is None else sum(card.capacity or 0 for card in (first, *others))
        # They are alike, but for what memory each has found.
        self.card = replace(
            first, capacity=capacity, context_length=min(card.context_length for card in (first, *others))
        )
        for replica in self._replicas:
            replica.state, replica.since = "up", monotonic()
        groups = [self._replicas] if self._together else [[replica] for replica in self._replicas]
        self._supervisors = [asyncio.create_task(self._supervise(group)) for group in groups]

    async def stop(self, grace: float = 2.0) -> None:
        """Ends the processes, by force after `grace` seconds, and every stream that is still open. Leaves no
        child; may be repeated."""
        self._draining = True
        self._die("the server is shutting down")
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(replica.client.stop(grace) for replica in self._replicas))

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the open streams. False: some were still open after `timeout`
        seconds."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                while self._open:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def wait_dead(self) -> str:
        """Waits until no engine lives and none will be started again. Returns the reason."""
        return await asyncio.shield(self._death)

    @property
    def dead(self) -> str | None:
        return self._death.result() if self._death.done() else None

    @property
    def requests(self) -> int:
        """The number of requests that run or wait."""
        return len(self._open)

    @property
    def engines(self) -> list[EngineState]:
        return [
            EngineState(
                replica.number,
                replica.state,
                replica.restarts,
                replica.hangs,
                replica.reason,
                replica.stats(),
            )
            for replica in self._replicas
        ]

    def _create(self, number: int, restarts: int) -> ProcessClient:
        engine = self._make(number, restarts)
        if self._together:
            engine.submitted = self._notify_peers
        return engine

    def _notify_peers(self) -> None:
        """Tells all engines that one of them was sent a request. They start together, so that each has heard
        of all since then."""
        self._joins += 1
        for replica in self._replicas:
            replica.client.join(self._joins)

    async def _supervise(self, group: Seq[Replica]) -> None:
        """Starts engines again whenever one of them has died: a single one, or all that share experts."""
        while True:
            deaths = [asyncio.create_task(replica.client.wait_dead()) for replica in group]
            try:
                await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for death in deaths:
                    death.cancel()
            number = next(number for number, death in enumerate(deaths) if death.done())
            reason = deaths[number].result()
            for replica in group:
                is_failed = replica is group[number]
                replica.reason = (
                    reason if is_failed else f"it shares experts with engine {group[number].number}: {reason}"
                )
                replica.hangs += replica.client.hung
                replica.state = "starting"  # its counters are in `stats_before_restart` alone from here on
                if monotonic() - replica.since > STEADY_S:
                    replica.deaths = 0
                replica.stats_before_restart = total(
                    [replica.stats_before_restart, counters(replica.client.stats())]
                )
                self._affinity.forget(replica.number)
            await self._stop_group(group)
            if not await self._revive(group):
                self._mark_dead(group, reason)
                return
            for replica in group:
                replica.state, replica.since = "up", monotonic()
                log.info("engine %d is running again", replica.number)
            self._wake()

    async def _stop_group(self, group: Seq[Replica]) -> None:
        await asyncio.gather(*(replica.client.stop(grace=0) for replica in group))

    def _mark_dead(self, group: Seq[Replica], reason: str) -> None:
        for replica in group:
            replica.state = "dead"
            if self._restarts:
                log.error(
                    "engine %d is not restarted (see --engine-restarts): %s", replica.number, replica.reason
                )
        if all(other.state == "dead" for other in self._replicas):
            self._die(reason)

    async def _revive(self, group: Seq[Replica]) -> bool:
        """False: they were started often enough."""
        while group[0].restarts < self._restarts:
            pause = RESTART_PAUSES_S[min(group[0].deaths, len(RESTART_PAUSES_S) - 1)]
            for replica in group:
                replica.restarts, replica.deaths = replica.restarts + 1, replica.deaths + 1
                log.warning("engine %d is restarted in %g s: %s", replica.number, pause, replica.reason)
            await asyncio.sleep(pause)
            for replica in group:
                replica.client = self._create(replica.number, replica.restarts)
            try:
                await asyncio.gather(*(replica.client.start() for replica in group))
                for replica in group:
                    await self._history.restore(replica.client)
                    await self._standing.restore(replica.client)
                return True
            except MTPServeError as error:
                for replica in group:
                    replica.reason = str(error)
                await self._stop_group(group)
        return False

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- requests --------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncGenerator[list[TokenEvent], None]:
        if self._draining:
            raise ShuttingDown
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.card.capacity is not None and len(self._open) >= self.card.capacity:
            raise QueueFull(
                f"{quantity(len(self._open), 'request')} running or waiting, and "
                "--max-queued-requests allows no more"
            )
        if request.sampling.seed is None:
            request = replace(request, seed=self._seeds.getrandbits(63))
        self._open[request.id] = None
        progress = Progress(list(request.prior_output_ids), request.num_scored_prompt_tokens)
        try:
            for retries in range(MAX_LOST_ENGINES, -1, -1):
                replica = await self._wait_for_replica(request)
                self._open[request.id] = replica
                replica.open.add(request.id)
                try:
                    async with aclosing(replica.client.submit(request)) as stream:
                        async for events in stream:
                            progress.take(events)
                            yield events
                    return
                # the latter where it is stopped because another one has died
                except (EngineDead, ShuttingDown):
                    if retries == 0 or self.dead is not None:
                        raise
                finally:
                    self._open[request.id] = None
                    replica.open.discard(request.id)
                request = progress.migrate(request)
        finally:
            self._open.pop(request.id, None)
            self._aborted.discard(request.id)
            self._wake()

    async def _wait_for_replica(self, request: Request) -> Replica:
        """An engine for it, as soon as there is one. Raises EngineDead, and RequestFailed where it is aborted
        meanwhile."""
        while True:
            if self.dead is not None:
                raise ShuttingDown(self.dead) if self._draining else EngineDead(self.dead)
            if request.id in self._aborted:
                raise RequestFailed("the request was aborted")
            up = [
                replica for replica in self._replicas if replica.state == "up" and replica.client.dead is None
            ]
            if up and (not self._updating or self.paused or request.is_migrated):
                return self._select(up, request)
            await self._changed.wait()

    def _select(self, up: list[Replica], request: Request) -> Replica:
        if len(self._replicas) == 1:
            return up[0]
        # If all are full, the least busy one refuses.
        up = [replica for replica in up if request.is_migrated or not replica.is_full] or up
        least = min(up, key=lambda replica: len(replica.open))
        keys = self._affinity.keys(request)
        number = self._affinity.find(keys)
        preferred = next((replica for replica in up if replica.number == number), least)
        load, least_load = len(preferred.open), len(least.open)
        busy = load > least_load + LOAD_SLACK_REQUESTS and load > LOAD_SLACK_RATIO * least_load
        target = least if busy else preferred
        self._affinity.remember(keys, target.number)
        return target

    def abort(self, request_id: str) -> None:
        """Ends the request in its engine. Ids that are not running are ignored."""
        replica = self._open.get(request_id)
        if replica is not None:
            replica.client.abort(request_id)
        elif request_id in self._open:
            self._aborted.add(request_id)
            self._wake()

    def where(self, request_id: str) -> int:
        """The number of the engine that has a request; 0 while none has."""
        replica = self._open.get(request_id)
        return 0 if replica is None else replica.number

    def reset_prefix_cache(self) -> None:
        """Requests that are submitted from now on find nothing that was computed before."""
        self._affinity.forget()
        for replica in self._replicas:
            replica.client.reset_prefix_cache()

    async def set_spec(self, change: SpecChange) -> dict[int, SpecReport]:
        """Applies the change to all engines that are up. Raises EngineDead."""
        return await self._ask_each(lambda client: client.set_spec(change))

    async def profile(self, change: ProfileChange) -> list[ProfileReport]:
        """Profiles all engines that are up. Raises EngineDead."""
        return list((await self._ask_each(lambda client: client.profile(change))).values())

    async def control(self, call: Calls) -> Reply:
        """Has all engines that are up do what the call says, between two steps of each. Raises EngineDead,
        and what Reply.check raises of the first engine that has not done it."""
        replies = await self._ask_each(lambda client: client.control(call))
        first, *_ = [reply.check() for reply in replies.values()]
        if isinstance(call, SetWeightVersion):
            self._history.weight_version = call.weight_version
        if self._standing.note(call):
            self._history = WeightHistory()
        self.paused = bool(self._standing.calls)
        if self._together:
            self._notify_peers()  # an engine that goes on is not alone: see ticks.py
        return first

    async def update_weights(self, call: UpdateWeights) -> Reply:
        """Does what `control` does, once no request runs: new ones wait, unless generation is paused."""
        async with self._update:
            self._updating = True
            try:
                while not self.paused and any(self._open.values()):
                    await self._changed.wait()
                reply = await self.control(call)
                self._history.add(call, reply)
                self._affinity.forget()
                return reply
            finally:
                self._updating = False
                self._wake()

    async def _ask_each(self, ask: Callable[[ProcessClient], Awaitable[A]]) -> dict[int, A]:
        """The answers of the engines that are up, by number: at least one. Raises EngineDead."""
        up = [replica for replica in self._replicas if replica.state == "up"]
        answers = await asyncio.gather(*(ask(replica.client) for replica in up), return_exceptions=True)
        received = {
            replica.number: answer
            for replica, answer in zip(up, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
        if not received:
            raise EngineDead(self.dead or "no engine is up")
        return received

    def stats(self) -> EngineStats:
        return total([replica.stats() for replica in self._replicas])
