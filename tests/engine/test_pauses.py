"""A pause between two steps: requests wait with their pages or without, and their texts are those without a pause."""

from __future__ import annotations

import asyncio

import pytest

from mtpserve.core.protocols.control import ContinueGeneration, PauseGeneration, PauseMode, Sleep, WakeUp
from mtpserve.engine.engine import Engine
from mtpserve.engine.updates.pauses import Pauses
from tests.engine.harness import PROMPTS, REFERENCE, Bench
from tests.engine.test_replicas import Bench as Replicated, run

MODES: tuple[PauseMode, ...] = ("retract", "in_place", "abort")


def settle(bench: Bench) -> None:
    """As the engine's process does before each call."""
    for event in bench.engine.settle():
        bench.texts[event.id] += event.tokens
        bench.last[event.id] = event


def call(engine: Engine, what: PauseGeneration | ContinueGeneration) -> None:
    engine.controls.take(what).check()


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_texts_are_those_without_a_pause(mode: PauseMode, drafts: int, overlap: int) -> None:
    """A pause after every second step. Some requests come during it."""
    bench = Bench(drafts=drafts, overlap=overlap, running=3)
    engine, names = bench.engine, list(PROMPTS)
    Pauses(engine)
    for pause in range(40):
        for _ in range(2):
            bench.step()
        settle(bench)
        held, running = engine.stats.pages_used, engine.stats.running
        call(engine, PauseGeneration(mode))
        assert engine.stats.paused == 1
        if names:
            bench.add(names.pop())
        assert not engine.has_work and not engine.step(), "nothing is computed"
        engine.check_integrity()
        assert (engine.stats.running, engine.stats.pages_used) == ((running, held) if mode == "in_place" else (0, 0))
        if pause % 3 == 0:
            call(engine, PauseGeneration(mode))  # it may be repeated
        if pause % 4 == 0:
            engine.reset_prefix_cache()
        call(engine, ContinueGeneration())
    bench.drain()
    assert bench.texts == REFERENCE
    assert (engine.stats.preemptions_total > 0) == (mode != "in_place")


def test_a_paused_engine_keeps_requests_and_lets_them_go() -> None:
    bench = Bench()
    Pauses(bench.engine)
    bench.add("r1")
    bench.add("r2")
    bench.step()
    settle(bench)
    call(bench.engine, PauseGeneration("in_place"))
    call(bench.engine, PauseGeneration("retract"))
    bench.add("r3")
    assert (bench.engine.stats.running, bench.engine.stats.waiting) == (0, 3)
    bench.engine.abort("r1")
    bench.engine.abort("r3")
    call(bench.engine, ContinueGeneration())
    call(bench.engine, ContinueGeneration())
    bench.drain()
    assert bench.texts["r2"] == REFERENCE["r2"] and "r3" not in bench.texts


def test_an_engine_that_is_started_again_pauses_as_the_others() -> None:
    async def work(replicas: Replicated) -> None:
        pause = PauseGeneration("retract")
        for _ in range(2):
            await replicas.replicas.control(pause)
        replicas.now(0).die()
        while len(replicas.made[0]) == 1 or replicas.replicas.engines[0].state != "up":
            await asyncio.sleep(0.001)
        assert replicas.now(0).calls == [pause]
        await replicas.replicas.control(Sleep(["weights", "kv_cache"], drops_weights=True))
        await replicas.replicas.control(WakeUp(["kv_cache"]))
        await replicas.replicas.control(ContinueGeneration())
        replicas.now(1).die()
        while len(replicas.made[1]) == 1 or replicas.replicas.engines[1].state != "up":
            await asyncio.sleep(0.001)
        assert replicas.now(1).calls == [Sleep(["weights"], drops_weights=True)]
        await replicas.replicas.control(WakeUp())
        assert not replicas.replicas.paused

    run(work, restarts=2)


def test_engines_that_share_experts_wake_each_other() -> None:
    """One may go on with its requests while another has none: it must not be alone in a gather."""

    async def work(replicas: Replicated) -> None:
        await replicas.replicas.control(PauseGeneration("in_place"))
        joins = [engine.joins[-1] for (engine,) in replicas.made]
        await replicas.replicas.control(ContinueGeneration())
        assert [engine.joins[-1] for (engine,) in replicas.made] == [join + 1 for join in joins]

    run(work, together=True)
