"""Operators' calls: to every engine and rank, between two steps."""

from __future__ import annotations

import asyncio

import pytest

from mtpserve.core.errors import EngineDead, InvalidRequest, RequestFailed
from mtpserve.core.protocols.control import Reply, SetWeightVersion
from mtpserve.engine.process.client import ProcessClient
from tests.engine.test_process import collect, importable, request, scenario
from tests.engine.test_ranks import built, config_of
from tests.engine.test_replicas import Bench, run

__all__ = ["importable"]


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
        bench.now(1).replies = [Reply("no such name", param="name"), Reply("it broke", "failed")]
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
