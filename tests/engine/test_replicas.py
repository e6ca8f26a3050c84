"""Several engines as one: where requests go, and what becomes of them when engines die. The engines here are objects of the test's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import pytest

from mtpserve.core.errors import EngineBusy, EngineDead, LoadError, QueueFull, RequestFailed
from mtpserve.core.profile import ProfileChange, ProfileReport
from mtpserve.core.request import Finish, ModelCard, Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import SpecChange, SpecReport, StepCosts
from mtpserve.engine.process import affinity, replicas
from mtpserve.engine.process.replicas import MAX_LOST_ENGINES, Replicas
from mtpserve.engine.process.totals import total
from tests.engine.answering import Answering

DEADLY, REPORT = 666, SpecReport(3, None, None, StepCosts(), [], [], [])  # a prompt with the token DEADLY kills its engine


class Local(Answering):
    """An engine whose token i is a function of the prompt, the seed and i."""

    def __init__(self, number: int, *, capacity: int | None = None, fails: bool = False) -> None:
        self.number, self.fails = number, fails
        self.submitted: Callable[[], None] = lambda: None
        self.joins: list[int] = []
        self.card = ModelCard("m", 1000, 4096 + number, (1,), 3, capacity=capacity)
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.served: list[Request] = []
        self.aborted: set[str] = set()
        self.counted, self.held = EngineStats(pages_total=10), asyncio.Event()  # tokens come while it is set
        self.held.set()
        self.stopped = self.hung = False

    async def start(self) -> None:
        if self.fails:
            raise LoadError("there is no weight")

    async def stop(self, grace: float = 2.0) -> None:
        self.stopped = True
        self.die("stopped")
        await asyncio.sleep(0.01)

    def die(self, reason: str = "killed") -> None:
        if not self.death.done():
            self.death.set_result(reason)
        self.held.set()

    async def wait_dead(self) -> str:
        return await asyncio.shield(self.death)

    @property
    def dead(self) -> str | None:
        return self.death.result() if self.death.done() else None

    async def submit(self, request: Request) -> AsyncGenerator[list[TokenEvent], None]:
        self.served.append(request)
        self.submitted()
        self.counted.running += 1
        at_most = request.sampling.max_tokens or 16
        for index in range(len(request.prior_output_ids), at_most):
            await asyncio.sleep(0)
            await self.held.wait()
            if DEADLY in request.prompt:
                self.die()
            if self.dead is not None:
                raise EngineDead(self.dead)
            if request.id in self.aborted:
                raise RequestFailed("the request was aborted")
            self.counted.generation_tokens_total += 1
            yield [TokenEvent(request.id, [said(request, index)], finish=Finish.LENGTH if index + 1 == at_most else None)]
        self.counted.running -= 1

    def join(self, number: int) -> None:
        self.joins.append(number)

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    def reset_prefix_cache(self) -> None:
        pass

    async def set_spec(self, change: SpecChange) -> SpecReport:
        if self.dead is not None:
            raise EngineDead(self.dead)
        return REPORT

    async def profile(self, change: ProfileChange) -> ProfileReport:
        if self.dead is not None:
            raise EngineDead(self.dead)
        return ProfileReport(files=[change.name])

    def stats(self) -> EngineStats:
        return self.counted


def said(request: Request, index: int) -> int:
    seed = request.seed if request.sampling.seed is None else request.sampling.seed
    return hash((tuple(request.prompt), seed, index)) % 600


class Bench:
    """`made[i]`: the engines that were engine i, one after the other."""

    def __init__(
        self, count: int, restarts: int = 0, capacity: int | None = None, failing: int = 0, together: bool = False
    ) -> None:  # fmt: skip
        """`failing`: so many of those that are started again do not start."""
        self.made: list[list[Local]] = [[] for _ in range(count)]
        self.capacity, self.failing = capacity, failing
        self.replicas = Replicas(self.make, count, restarts=restarts, seed=5, together=together)

    def make(self, number: int, restarts: int) -> Local:
        fails = bool(self.made[number]) and self.failing > 0
        self.failing -= fails
        self.made[number].append(Local(number, capacity=self.capacity, fails=fails))
        return self.made[number][-1]

    def now(self, number: int) -> Local:
        return self.made[number][-1]

    async def hold(self, requests: list[Request]) -> Callable[[], Awaitable[object]]:
        """Returns once the engines have all requests, which wait for their first step until the result is called."""
        for engines in self.made:
            engines[-1].held.clear()
        tasks = [asyncio.create_task(self.ask(request)) for request in requests]
        await settle(lambda: sum(len(engines[-1].served) for engines in self.made) == len(requests))

        def release() -> Awaitable[object]:
            for engines in self.made:
                engines[-1].held.set()
            return asyncio.gather(*tasks)

        return release

    def where(self, id: str) -> list[int]:
        return [number for number, made in enumerate(self.made) for local in made for served in local.served if served.id == id]

    async def ask(self, request: Request) -> list[int]:
        return [token async for events in self.replicas.submit(request) for event in events for token in event.tokens]


def run(work: Callable[[Bench], Awaitable[None]], count: int = 2, **options: int) -> None:
    async def main() -> None:
        bench = Bench(count, **options)
        await bench.replicas.start()
        try:
            await asyncio.wait_for(work(bench), 20)
        finally:
            await bench.replicas.stop()
            assert all(local.stopped for made in bench.made for local in made), "no process is left"

    asyncio.run(main())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RESTART_PAUSES_S", (0.03,))


def asked(id: str = "a", tokens: int = 12, prompt: list[int] | None = None, seed: int | None = None) -> Request:
    return Request(id, prompt or [1, 2, 3], SamplingParams(max_tokens=tokens, seed=seed))


async def settle(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_cut_stream_goes_on_in_another_engine(seed: int | None) -> None:
    async def work(bench: Bench) -> None:
        found, known = list[int](), list[int]()
        stream = bench.replicas.submit(asked(seed=seed))
        async for events in stream:
            found += [token for event in events for token in event.tokens]
            known.append(bench.replicas.where("a"))
            if len(found) == 5:
                bench.now(bench.where("a")[0]).die()
        first, second = bench.where("a")
        assert first != second and known == [first] * 5 + [second] * 7
        lost, went_on = (bench.now(number).served[0] for number in (first, second))
        assert went_on == replace(lost, prior_output_ids=found[:5], is_migrated=True)
        assert found == [said(lost, index) for index in range(12)]
        await settle(lambda: bench.replicas.engines[first].state == "dead")
        assert bench.replicas.dead is None and bench.replicas.engines[first].reason == "killed"
        assert bench.replicas.stats().generation_tokens_total == 12, "those of the lost engine count"
        assert await bench.ask(asked("b")), "the other one serves"

    run(work)


def test_forty_of_forty_requests_end_well() -> None:
    async def work(bench: Bench) -> None:
        tasks = [asyncio.create_task(bench.ask(asked(f"r{i}", prompt=[i, i]))) for i in range(40)]
        await settle(lambda: len(bench.now(0).served) > 10 and bench.now(0).counted.generation_tokens_total > 20)
        bench.now(0).die()
        counted = [0]
        while not all(task.done() for task in tasks) or bench.replicas.engines[0].state != "up":
            counted.append(bench.replicas.stats().generation_tokens_total)
            await asyncio.sleep(0)
        assert counted == sorted(counted) and counted[-1] == 40 * 12, "nothing is counted twice while an engine is put away"
        assert [len(text) for text in await asyncio.gather(*tasks)] == [12] * 40
        await settle(lambda: bench.replicas.engines[0].state == "up")
        assert bench.replicas.engines[0].restarts_total == 1 and len(bench.made[0]) == 2

    run(work, restarts=3)


def test_one_engine_is_started_again_and_its_requests_go_on() -> None:
    async def work(bench: Bench) -> None:
        bench.now(0).held.clear()
        tasks = [asyncio.create_task(bench.ask(asked(f"r{i}", seed=i))) for i in range(3)]
        await settle(lambda: len(bench.now(0).served) == 3)
        bench.now(0).die()
        await settle(lambda: bench.replicas.engines[0].state == "starting")
        late = asyncio.create_task(bench.ask(asked("late", seed=9)))
        texts = await asyncio.gather(*tasks, late)
        assert texts == [[said(asked(seed=seed), index) for index in range(12)] for seed in (0, 1, 2, 9)]
        assert len(bench.made[0]) == 3 and bench.replicas.engines[0].restarts_total == 2, "the first new one did not start"

    run(work, count=1, restarts=2, failing=1)


def test_engines_that_share_experts_hear_of_all_requests_and_are_started_again_together() -> None:
    async def work(bench: Bench) -> None:
        tasks = [asyncio.create_task(bench.ask(asked(f"r{i}", prompt=[i, i], tokens=30))) for i in range(40)]
        await settle(lambda: all(bench.now(number).counted.generation_tokens_total > 20 for number in range(3)))
        assert [bench.now(number).joins for number in range(3)] == [list(range(1, 41))] * 3
        bench.now(1).die()
        assert [len(text) for text in await asyncio.gather(*tasks)] == [30] * 40
        # The second ones did not all start.
        assert [len(made) for made in bench.made] == [3] * 3 and all(local.stopped for made in bench.made for local in made[:2])
        engines = bench.replicas.engines
        assert [each.state for each in engines] == ["up"] * 3 and [each.restarts_total for each in engines] == [2] * 3
        heard = [bench.now(number).joins for number in range(3)]
        assert heard[0] == heard[1] == heard[2] == sorted(heard[0]) and len(heard[0]) > 20
        for number in range(3):
            bench.now(number).die()
        await settle(lambda: all(len(made) == 4 for made in bench.made))
        assert [len(text) for text in [await bench.ask(asked("last"))]] == [12]

    run(work, count=3, restarts=5, failing=1, together=True)


def test_without_restarts_the_end_is_the_engines() -> None:
    async def work(bench: Bench) -> None:
        bench.now(0).held.clear()
        task = asyncio.create_task(bench.ask(asked()))
        await settle(lambda: bool(bench.now(0).served))
        bench.now(0).die("out of memory")
        with pytest.raises(EngineDead, match="out of memory"):
            await task
        assert await bench.replicas.wait_dead() == "out of memory" == bench.replicas.dead
        with pytest.raises(EngineDead):
            await bench.ask(asked("b"))

    run(work, count=1)


def test_a_request_that_kills_engines_is_given_up() -> None:
    async def work(bench: Bench) -> None:
        other = asyncio.create_task(bench.ask(asked("other", tokens=3000)))
        with pytest.raises(EngineDead, match="killed"):
            await bench.ask(asked(prompt=[DEADLY]))
        assert len(bench.where("a")) == MAX_LOST_ENGINES + 1
        assert len(await other) == 3000 or len(bench.where("other")) > MAX_LOST_ENGINES
        assert await bench.ask(asked("after"))

    run(work, count=3, restarts=100)


def test_requests_go_where_their_beginning_is() -> None:
    async def work(bench: Bench) -> None:
        beginnings = [[i] * (3 * affinity.BLOCK) for i in range(4)]
        release = await bench.hold([asked(f"first {i}", prompt=beginning) for i, beginning in enumerate(beginnings)])
        await release()
        assert sorted(bench.where(f"first {i}") for i in range(4)) == [[0], [0], [1], [1]]
        for i, beginning in enumerate(beginnings):
            for more in range(3):
                await bench.ask(asked(f"{i} {more}", prompt=[*beginning, *range(more + 9)]))
                assert bench.where(f"{i} {more}") == bench.where(f"first {i}")
        bench.replicas.reset_prefix_cache()
        assert bench.replicas._affinity.find(bench.replicas._affinity.keys(asked(prompt=beginnings[0]))) is None
        salted = replace(asked(prompt=beginnings[0]), salt="other")
        assert bench.replicas._affinity.keys(salted) != bench.replicas._affinity.keys(asked(prompt=beginnings[0]))

    run(work)


def test_load_outweighs_beginnings() -> None:
    """Of 24 requests with one beginning the other engine gets nearly half."""

    async def work(bench: Bench) -> None:
        release = await bench.hold([asked(f"r{i}", prompt=[1] * (2 * affinity.BLOCK)) for i in range(24)])
        assert 8 <= len(bench.now(0).served) <= 16
        await release()

    run(work)


def test_full_engines_are_passed_over_and_capacity_is_that_of_all() -> None:
    async def work(bench: Bench) -> None:
        assert bench.replicas.card.capacity == 4 and bench.replicas.card.context_length == 4096
        release = await bench.hold([asked(f"r{i}", prompt=[1] * (2 * affinity.BLOCK)) for i in range(4)])
        assert len(bench.now(0).served) == 2
        with pytest.raises(QueueFull, match="4 requests running or waiting"):
            await bench.ask(asked("fifth"))
        await release()

    run(work, capacity=2)


def test_abort_and_drain() -> None:
    async def work(bench: Bench) -> None:
        bench.now(0).held.clear()
        running = asyncio.create_task(bench.ask(asked("a")))
        await settle(lambda: bool(bench.now(0).served))
        bench.replicas.abort("a")
        bench.replicas.abort("unknown")
        bench.now(0).held.set()
        with pytest.raises(RequestFailed, match="aborted"):
            await running
        bench.now(0).held.clear()
        bench.now(0).die()
        await settle(lambda: bench.replicas.engines[0].state == "starting")
        waiting = asyncio.create_task(bench.ask(asked("b")))
        await asyncio.sleep(0.005)
        bench.replicas.abort("b")
        with pytest.raises(RequestFailed, match="aborted"):
            await waiting
        await settle(lambda: bench.replicas.engines[0].state == "up")
        bench.now(0).held.clear()
        last = asyncio.create_task(bench.ask(asked("c")))
        await asyncio.sleep(0.005)
        assert not await bench.replicas.drain(0.01), "it still runs"
        bench.now(0).held.set()
        assert await bench.replicas.drain(5)
        assert len(await last) == 12
        with pytest.raises(EngineBusy, match="shutting down"):
            await bench.ask(asked("d"))

    run(work, count=1, restarts=5)


def test_readers_that_leave_end_their_requests() -> None:
    async def work(bench: Bench) -> None:
        stream = bench.replicas.submit(asked(tokens=1000))
        await anext(stream)
        await stream.aclose()
        assert await bench.replicas.drain(1) and not bench.replicas.engines[0].stats.failed_requests_total
        assert not any(replica.open for replica in bench.replicas._replicas)

    run(work)


def test_what_is_set_goes_to_all_that_are_up() -> None:
    async def work(bench: Bench) -> None:
        profiled = ProfileReport(files=["x"])
        assert await bench.replicas.set_spec(SpecChange()) == {0: REPORT, 1: REPORT}
        assert await bench.replicas.profile(ProfileChange(name="x")) == [profiled, profiled]
        bench.now(0).die()
        assert await bench.replicas.set_spec(SpecChange()) == {1: REPORT}
        assert await bench.replicas.profile(ProfileChange(name="x")) == [profiled]
        bench.now(1).die()
        with pytest.raises(EngineDead):
            await bench.replicas.set_spec(SpecChange())
        with pytest.raises(EngineDead):
            await bench.replicas.profile(ProfileChange())

    run(work)


def test_seeds_are_drawn_once_for_all_engines() -> None:
    """As one engine with --random-seed would draw them."""

    async def work(bench: Bench) -> None:
        for i in range(6):
            await bench.ask(asked(f"r{i}", prompt=[i]))
        drawn = [served.seed for number in (0, 1) for served in bench.now(number).served]
        assert len(set(drawn)) == 6 and None not in drawn
        await bench.ask(asked("own", seed=3))
        assert [served.seed for number in (0, 1) for served in bench.now(number).served if served.id == "own"] == [None]

    run(work)


def test_totals() -> None:
    one = EngineStats(running=1, loaded_pages={"host": 2}, accept_lengths=[1, 2], generation_tokens_total=5)
    two = EngineStats(running=2, loaded_pages={"host": 1, "disk": 4}, accept_lengths=[1, 1, 7], generation_tokens_total=6)
    two.draft_health = replace(two.draft_health, state="weak", faults_total=2)
    both = total([one, two])
    assert (one.running, both.running, both.generation_tokens_total, both.accept_lengths) == (1, 3, 11, [2, 3, 7])
    assert both.loaded_pages == {"host": 3, "disk": 4} and (both.draft_health.state, both.draft_health.faults_total) == ("weak", 2)
