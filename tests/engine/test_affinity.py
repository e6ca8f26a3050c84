"""Which engine gets a request: the one that has computed its beginning, as far as that is there. And what is left of those that die."""

from __future__ import annotations

import asyncio

import pytest

from mtpserve.core.errors import ShuttingDown
from mtpserve.core.request import TokenEvent, TokenLogprob
from mtpserve.engine.process import replicas
from mtpserve.engine.process.affinity import BLOCK, Affinity
from mtpserve.engine.process.replicas import Progress
from tests.engine.test_replicas import Bench, asked, impatient, run, settle

__all__ = ["impatient"]  # a fixture


def test_the_longest_beginning_counts() -> None:
    affinity, first, second = Affinity(), [1] * (2 * BLOCK), [1] * BLOCK + [2] * BLOCK
    affinity.remember(affinity.keys(asked(prompt=first)), 0)
    affinity.remember(affinity.keys(asked(prompt=second)), 1)
    assert [affinity.find(affinity.keys(asked(prompt=[*prompt, 3]))) for prompt in (first, second)] == [0, 1]
    affinity.forget(0)
    assert [affinity.find(affinity.keys(asked(prompt=prompt))) for prompt in (first, second)] == [1, 1], "of the first a block is left"


def test_a_busier_engine_gets_what_it_has_computed() -> None:
    async def work(bench: Bench) -> None:
        await bench.ask(asked("first", prompt=[7] * (2 * BLOCK)))
        (number,) = bench.where("first")
        bench.now(number).held.clear()
        tasks = [asyncio.create_task(bench.ask(asked(name, prompt=[7] * (2 * BLOCK) + [1]))) for name in ("second", "third")]
        await settle(lambda: all(bench.where(name) for name in ("second", "third")))
        assert bench.where("second") == bench.where("third") == [number]
        bench.now(number).held.set()
        await asyncio.gather(*tasks)

    run(work)


def test_an_engine_that_is_started_anew_has_computed_nothing() -> None:
    async def work(bench: Bench) -> None:
        affinity = bench.replicas._affinity
        await bench.ask(asked("first", prompt=[7] * (2 * BLOCK)))
        keys, (number,) = affinity.keys(asked(prompt=[7] * (2 * BLOCK))), bench.where("first")
        assert affinity.find(keys) == number
        bench.now(number).die()
        await settle(lambda: len(bench.made[number]) == 2 and bench.replicas.engines[number].state == "up")
        assert affinity.find(keys) is None

    run(work, restarts=1)


def test_progress_counts_what_a_request_got() -> None:
    progress, score = Progress([4], 1), TokenLogprob(-1.0, 1, [])
    progress.take([TokenEvent("a", [5, 6], prompt_logprobs=[score, score]), TokenEvent("a", [7])])
    assert (progress.output_ids, progress.num_scored_prompt_tokens) == ([4, 5, 6, 7], 3)


def test_counters_outlive_several_deaths_and_gauges_none() -> None:
    async def work(bench: Bench) -> None:
        for death, tokens in enumerate((5, 3), 2):
            bench.now(0).counted.generation_tokens_total, bench.now(0).counted.running = tokens, 4
            bench.now(0).die()
            await settle(lambda: len(bench.made[0]) == death and bench.replicas.engines[0].state == "up")  # noqa: B023
            stats = bench.replicas.stats()
            assert (stats.generation_tokens_total, stats.running) == ({2: 5, 3: 8}[death], 0)

    run(work, count=1, restarts=2)


def test_who_waits_for_an_engine_hears_of_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RESTART_PAUSES_S", (60.0,))

    async def work(bench: Bench) -> None:
        bench.now(0).die()
        await settle(lambda: bench.replicas.engines[0].state == "starting")
        waiting = asyncio.create_task(bench.ask(asked()))
        await asyncio.sleep(0)
        await bench.replicas.stop()
        with pytest.raises(ShuttingDown):
            await waiting

    run(work, count=1, restarts=1)
