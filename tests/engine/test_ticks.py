"""Engines that share their experts compute together or sleep, whatever messages and grammars come when. The engine process's own loop runs
in threads here, with an engine that computes nothing."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mtpserve.core.errors import EngineDead
from mtpserve.core.request import Request, TokenEvent
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.engine.parallel.ticks import Ticks
from mtpserve.engine.process import process
from mtpserve.engine.process.core_share import CoreShare
from mtpserve.engine.process.messages import Abort, Down, Join, ResetCache, Shutdown, Submit
from mtpserve.engine.process.process import IDLE_MS, EngineLike, Pipe, loop
from mtpserve.engine.process.profiling import Profiling
from tests import selection
from tests.engine.peers import Table, ThreadPeers, together

PATIENCE = 60.0  # seconds until something is taken for lost, on a busy machine
GRAMMAR = SamplingParams(grammar=GrammarSpec("regex", "a"))


class Engine:
    """Of a request it computes as many steps as its prompt has tokens, each with a few rounds."""

    def __init__(self, peers: ThreadPeers, random: Random) -> None:
        self.peers, self.random, self.live, self.done = peers, random, dict[str, int](), set[str]()
        self.stats, self.ticks, self.steps = EngineStats(), Ticks(peers, self.finish), 0
        self.cores = CoreShare()

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def changes_idle(self) -> bool:
        return False

    def compile(self, spec: GrammarSpec | None) -> None:
        time.sleep(self.random.random() * 2e-3)

    def add(self, request: Request, compiled: bool = False) -> None:
        self.live[request.id] = len(request.prompt)

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)

    def reset_prefix_cache(self) -> None:
        pass

    def check_integrity(self) -> None:
        assert not self.live

    def check_alive(self) -> None:
        pass

    def step(self) -> list[TokenEvent]:
        self.steps += 1
        for _ in range(self.random.randrange(3)):
            assert any(busy for (busy,) in self.peers.gather([1]))
        for id in list(self.live):
            self.live[id] -= 1
            if self.live[id] == 0:
                del self.live[id]
                self.done.add(id)
        return []

    def finish(self) -> None:
        while any(busy for (busy,) in self.peers.gather([0])):
            pass


class Messages:
    """engine.process.Pipe, in which messages may be on their way for a while."""

    def __init__(self, random: Random) -> None:
        self.inbox, self.random = queue.Queue[Down](), random
        self.sleeps = 0  # pauses of an engine that has nothing to do

    def send(self, message: object) -> None:
        pass

    def wait(self) -> Down:
        return self.inbox.get(timeout=PATIENCE)

    def pause(self, milliseconds: float = 0.1) -> bool:
        self.sleeps += milliseconds == IDLE_MS
        with self.inbox.not_empty:
            return bool(self.inbox.not_empty.wait_for(lambda: self.inbox.queue, milliseconds / 1000))

    def pending_messages(self) -> Iterator[Down]:
        while self.random.random() < 0.5:
            try:
                yield self.inbox.get_nowait()
            except queue.Empty:
                return


@dataclass
class Group:
    engines: list[Engine]
    pipes: list[Messages]
    number: int = 0

    def submit(self, to: int, request: Request, late: Random | None = None) -> None:
        """As the front end does it: to one, then to all that there is something. `late`: others may be late to hear it."""
        self.number += 1
        self.pipes[to].inbox.put(Submit(request))
        for pipe in self.pipes:
            pipe.inbox.put(Join(self.number))
            if late is not None and late.random() < 0.3:
                time.sleep(late.random() * 3e-4)


def run(size: int, front: Any, patience: float = PATIENCE, random: Random | None = None) -> Group:
    table = Table(size, patience)
    engines = [Engine(ThreadPeers(table, rank, random), random or Random(rank)) for rank in range(size)]
    group = Group(engines, [Messages(random or Random(rank)) for rank in range(size)])

    def work(rank: int) -> None:
        if rank == size:
            front(group)
        else:
            loop(cast(EngineLike, group.engines[rank]), cast(Pipe, group.pipes[rank]), Profiling(rank))

    together(size + 1, work)
    return group


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_whatever_comes_when_all_requests_are_computed_and_all_end(size: int) -> None:
    """With many orders of messages, steps and rounds each."""
    for seed in range(200 if selection.ALL else 40):
        random, last = Random(seed), time.monotonic() + PATIENCE
        asked: dict[str, int] = {}

        def front(group: Group, random: Random = random, asked: dict[str, int] = asked, last: float = last) -> None:
            for number in range(random.randrange(1, 8)):
                to = random.randrange(size)
                params = GRAMMAR if random.random() < 0.2 else SamplingParams()
                group.submit(to, Request(str(number), [0] * random.randrange(1, 4), params), random)
                asked[str(number)] = to
                if random.random() < 0.2:
                    group.pipes[random.randrange(size)].inbox.put(ResetCache() if random.random() < 0.5 else Abort("unknown"))
                if random.random() < 0.5:
                    time.sleep(random.random() * 1e-3)
            if random.random() < 0.8:  # else it ends with requests still open
                while any(id not in group.engines[to].done for id, to in asked.items()):
                    assert time.monotonic() < last, "a request is forgotten"
                    time.sleep(1e-4)
            for pipe in group.pipes:
                pipe.inbox.put(Shutdown())

        group = run(size, front, random=random)
        assert len({engine.peers.gathered for engine in group.engines}) == 1


def test_freed_memory_goes_back_to_the_system_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here at each turn of the loop."""
    trims = list[int]()
    monkeypatch.setattr(process, "TRIM_S", -1.0)
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trims.append))

    def front(group: Group) -> None:
        group.submit(0, Request("0", [0] * 3, SamplingParams()))
        until(lambda: "0" in group.engines[0].done)
        for pipe in group.pipes:
            pipe.inbox.put(Shutdown())

    group = run(2, front)
    assert len(trims) >= group.engines[0].steps == 3 and set(trims) == {0}
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: SimpleNamespace())
    process.give_back()  # a C library that is not glibc has no such function


def test_they_sleep_while_there_is_nothing_to_do() -> None:
    def front(group: Group) -> None:
        for number in range(2):
            slept = [pipe.sleeps for pipe in group.pipes]
            group.submit(0, Request(str(number), [0] * 5, SamplingParams()))
            until(lambda slept=slept: all(pipe.sleeps > before for pipe, before in zip(group.pipes, slept, strict=True)))
            gathered = [engine.peers.gathered for engine in group.engines]
            slept = [pipe.sleeps for pipe in group.pipes]
            for pipe in group.pipes:
                pipe.inbox.put(ResetCache())  # it is nobody else's business
            until(lambda slept=slept: all(pipe.sleeps > before for pipe, before in zip(group.pipes, slept, strict=True)))
            assert [engine.peers.gathered for engine in group.engines] == gathered
        for pipe in group.pipes:
            pipe.inbox.put(Shutdown())

    group = run(2, front)
    assert [engine.steps for engine in group.engines] == [10, 0]


def test_one_that_is_gone_ends_the_others() -> None:
    def front(group: Group) -> None:
        group.engines[1].step = lambda: 1 / 0  # type: ignore[assignment, return-value]
        group.submit(1, Request("0", [0], SamplingParams()))

    with pytest.raises((EngineDead, ZeroDivisionError)):
        run(2, front, patience=0.3)
