"""Operators' calls: to every engine and rank, between two steps."""

from __future__ import annotations

import asyncio

import pytest

from mtpserve.core.errors import EngineDead, InvalidRequest, RequestFailed
from mtpserve.core.protocols.control import Reply, SetWeightVersion, StageCheckpoint, StageTensors, UpdateWeights
from mtpserve.engine.process.client import ProcessClient
from tests.engine.test_process import collect, importable, request, scenario
from tests.engine.test_ranks import built, config_of
from tests.engine.test_replicas import Bench, asked, impatient, run

__all__ = ["impatient", "importable"]


def test_a_call_is_answered_between_steps_and_its_error_harms_nobody() -> None:
    async def work(client: ProcessClient) -> None:
        running = asyncio.create_task(collect(client, request(max_tokens=200)))
        replies = await asyncio.gather(*(client.control(SetWeightVersion(name)) for name in ("v2", "broken", "bad", "v3")))
        assert [(reply.error, reply.kind, reply.values) for reply in replies] == [
            ("", "invalid", {"name": "v2"}),
            ("SetWeightVersion failed: RuntimeError: it broke", "failed", {}),
            ("weight_version: it is bad", "invalid", {}),
            ("", "invalid", {"name": "v3"}),
        ]
        assert client.stats().weight_version == "v3"
        assert len(await running) == 100

    scenario(work)


def test_calls_go_to_all_that_are_up_and_fail_where_one_does() -> None:
    async def work(bench: Bench) -> None:
        call = SetWeightVersion("v2")
        assert (await bench.replicas.control(call)).values == {"engine": 0}
        bench.now(1).replies[:] = [Reply("no such name", param="name"), Reply("it broke", "failed")]
        with pytest.raises(RequestFailed, match="it broke"):
            await bench.replicas.control(call)
        with pytest.raises(InvalidRequest, match="no such name") as info:
            await bench.replicas.control(call)
        assert info.value.param == "name"
        bench.now(0).die()
        assert (await bench.replicas.control(call)).values == {"engine": 1}
        bench.now(1).die()
        with pytest.raises(EngineDead):
            await bench.replicas.control(call)

    run(work)


def test_an_engine_knows_its_version() -> None:
    with built(config_of(1)) as engine:
        assert engine.stats.weight_version == "default"
        assert engine.controls.take(SetWeightVersion("v2")).check() == Reply()
        assert engine.stats.weight_version == "v2"


def test_an_update_waits_for_what_runs_and_new_requests_wait_for_it() -> None:
    async def work(bench: Bench) -> None:
        engine, call = bench.now(0), UpdateWeights(StageCheckpoint("/m"), "v2")
        engine.replies[:] = [Reply(values={"waiting": [], "parameters": 3})]
        engine.held.clear()
        running = asyncio.create_task(bench.ask(asked("a")))
        await asyncio.sleep(0.02)
        update = asyncio.create_task(bench.replicas.update_weights(call))
        late = asyncio.create_task(bench.ask(asked("b")))
        await asyncio.sleep(0.02)
        assert [request.id for request in engine.served] == ["a"] and not update.done()
        engine.held.set()
        await asyncio.gather(running, update, late)
        assert [request.id for request in engine.served] == ["a", "b"] and engine.calls == [call]

    run(work, count=1)


def test_a_pause_lets_an_update_through() -> None:
    async def work(bench: Bench) -> None:
        engine, call = bench.now(0), UpdateWeights(StageCheckpoint("/m"))
        engine.replies[:] = [Reply(values={"waiting": [], "parameters": 3})]
        engine.held.clear()
        running = asyncio.create_task(bench.ask(asked("a")))
        await asyncio.sleep(0.02)
        bench.replicas.paused = True
        await asyncio.wait_for(bench.replicas.update_weights(call), 5)
        engine.held.set()
        await running

    run(work, count=1)


def test_an_engine_that_is_started_again_gets_the_weights_of_directories_alone() -> None:
    def reply(parameters: int) -> Reply:
        return Reply(values={"waiting": [], "parameters": parameters})

    async def work(bench: Bench) -> None:
        whole, part = UpdateWeights(StageCheckpoint("/whole"), "v2"), UpdateWeights(StageCheckpoint("/part"))
        for call, parameters in ((UpdateWeights(StageCheckpoint("/old"), "v1"), 9), (whole, 9), (part, 2)):
            bench.now(0).replies[:] = [reply(parameters)]
            await bench.replicas.update_weights(call)
        bench.now(0).die()
        await until_up(bench)
        assert bench.now(0).calls == [whole, part, SetWeightVersion("v2")]
        bench.now(0).replies[:] = [reply(1)]
        await bench.replicas.update_weights(UpdateWeights(StageTensors([b""])))
        bench.now(0).die()
        while bench.replicas.engines[0].state != "dead":
            await asyncio.sleep(0.01)
        assert "no directory has them" in bench.replicas.engines[0].reason

    run(work, count=1, restarts=2)


async def until_up(bench: Bench) -> None:
    while len(bench.made[0]) < 2 or bench.replicas.engines[0].state != "up":
        await asyncio.sleep(0.01)
