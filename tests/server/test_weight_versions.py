"""Which weights chose which tokens, where weights change while an output grows."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mtpserve import LLM
from mtpserve.core.protocols.control import SetWeightVersion
from mtpserve.core.request import TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.state.weight_versions import VersionSpan, WeightVersions
from mtpserve.engine.process.client import ProcessClient
from tests.engine.test_process import importable, request, scenario, until
from tests.server.fake_client import FakeClient

__all__ = ["importable"]


@pytest.mark.parametrize(
    ("events", "spans"),
    [
        ([], []),
        ([("", 0)], []),
        ([("a", 0), ("", 3), ("", 4)], [("a", 0, 9)]),
        ([("a", 0), ("b", 3), ("b", 5)], [("a", 0, 3), ("b", 3, 9)]),
        ([("a", 0), ("b", 3), ("c", 3), ("a", 9)], [("a", 0, 3), ("c", 3, 9)]),
    ],
)
def test_spans(events: list[tuple[str, int]], spans: list[tuple[str, int, int]]) -> None:
    versions = WeightVersions()
    for version, tokens in events:
        versions.add(version, tokens)
    assert versions.spans(9) == [VersionSpan(*span) for span in spans]


def test_events_of_an_engine_say_where_it_changed() -> None:
    async def work(client: ProcessClient) -> None:
        events: list[TokenEvent] = []

        async def read() -> None:
            async for some in client.submit(request(max_tokens=400)):
                events.extend(some)

        await client.control(SetWeightVersion("v1"))
        reading = asyncio.create_task(read())
        await until_async(lambda: len(events) > 3)
        await client.control(SetWeightVersion("v2"))
        await reading
        said = [(number, event.weight_version) for number, event in enumerate(events) if event.weight_version]
        assert [version for _, version in said] == ["v1", "v2"] and said[0][0] == 0 and 3 < said[1][0] < len(events)

    scenario(work)


async def until_async(condition: Any) -> None:
    await until(condition)


def test_generate_says_it(app: FastAPI, client: FakeClient) -> None:
    async def main() -> dict[str, Any]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            body = {"text": "a", "sampling_params": {"max_new_tokens": 7}}
            meta: dict[str, Any] = (await http.post("/generate", json=body)).json()["meta_info"]
            return meta

    client.versions = {0: "v1", 4: "v2"}
    meta = asyncio.run(main())
    assert meta["weight_version"] == "v2"
    assert meta["weight_versions"] == [{"version": "v1", "start": 0, "end": 4}, {"version": "v2", "start": 4, "end": 7}]


def test_an_llm_says_it() -> None:
    with LLM("demo", max_total_tokens=512, max_running_requests=2, speculative_adaptive=False) as llm:
        (completion,) = llm.generate("import os", SamplingParams(max_tokens=5))
        assert completion.weight_versions == [VersionSpan("default", 0, 5)]
        outputs: dict[str, Any] = {}
        steps = llm._run(["import os"], [SamplingParams(max_tokens=20)], outputs, [None])
        before = 0
        for number, (id, step) in enumerate(steps):
            outputs[id].steps.append(step)
            if number == 2:
                llm.control(SetWeightVersion("v2"))
                before = sum(len(each.tokens) for each in outputs[id].steps)
        assert outputs[id].completion().weight_versions[-1] == VersionSpan("v2", before, 20)
