"""The whole server with several engines, which are killed under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import events
from tests.server.metric_text import without_model
from tests.server.test_launch import Server, alive, launched

SPOKEN = {"prompt": "a", "max_tokens": 200, "stream": True}


def engines(server: Server) -> list[int]:
    """The processes, in the order in which they were started."""
    return [int(pid) for pid in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()]


async def health(http: httpx.AsyncClient, wanted: str) -> None:
    async with asyncio.timeout(20):
        while True:
            answer = await http.get("/health")
            if answer.json().get("status") == wanted:
                assert answer.status_code == 200
                return
            await asyncio.sleep(0.02)


def run(server: Server, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            await work(http)

    asyncio.run(main())


def text(response: httpx.Response) -> str:
    assert response.status_code == 200
    *chunks, last = events(response)
    assert last == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length", last
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_forty_of_forty_requests_end_well_when_an_engine_is_killed(checkpoint: Path, count: int) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        whole = text(await http.post("/v1/completions", json=SPOKEN))
        first = engines(server)
        assert len(first) == count
        tasks = [asyncio.create_task(http.post("/v1/completions", json=SPOKEN | {"prompt": f"{i}"})) for i in range(40)]
        await asyncio.sleep(0.3)
        os.kill(first[0], signal.SIGKILL)
        late = asyncio.create_task(http.post("/v1/completions", json=SPOKEN))
        answers = await asyncio.gather(*tasks, late)
        assert [text(answer) for answer in answers] == [whole] * 41
        await health(http, "ok")
        told = (await http.get("/health?verbose=true")).json()
        assert [each["restarts"] for each in told["engines"]] == [1, 0][:count] and "SIGKILL" in told["engines"][0]["reason"]
        stats, metrics = (await http.get("/stats")).json(), without_model((await http.get("/metrics")).text)
        assert [each["state"] for each in stats["engines"]] == ["up"] * count
        assert sum(each["stats"]["generation_tokens_total"] for each in stats["engines"]) == stats["stats"]["generation_tokens_total"]
        for number in range(count):
            assert f'mtpserve_replica_up{{engine="{number}"}} 1.0' in metrics
        assert 'mtpserve_replica_restarts_total{engine="0"} 1.0' in metrics
        loads = (await http.get("/v1/loads")).json()
        assert [each["dp_rank"] for each in loads["loads"]] == list(range(count)) and loads["aggregate"]["total_reqs"] == 0
        assert sum(each["total_generation_tokens"] for each in loads["loads"]) == stats["stats"]["generation_tokens_total"]
        assert (await http.get("/v1/loads?dp_rank=0")).json()["loads"] == loads["loads"][:1]
        refused = await http.get(f"/v1/loads?dp_rank={count}")
        assert refused.status_code == 400 and f"dp_rank must be in [0, {count - 1}]" in refused.json()["error"]["message"]
        assert not alive(first[0]) and len(engines(server)) == count

    with launched(checkpoint, "--dp", str(count), "--engine-restarts", "3") as server:
        run(server, work)
        server.process.send_signal(signal.SIGTERM)
        code, log = server.end(60)
    assert code == 0 and "engine 0 is restarted" in log and "Traceback" not in log


def test_while_an_engine_is_gone_the_server_is_degraded(checkpoint: Path) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        await health(http, "ok")
        os.kill(engines(server)[1], signal.SIGKILL)
        await health(http, "degraded")
        assert text(await http.post("/v1/completions", json=SPOKEN | {"max_tokens": 8}))
        os.kill(engines(server)[0], signal.SIGKILL)
        answer = await http.post("/v1/completions", json=SPOKEN)
        assert answer.status_code == 503 and "SIGKILL" in answer.json()["error"]["message"]

    with launched(checkpoint, "--dp", "2", "--engine-restarts", "0") as server:
        run(server, work)
        assert server.end(60)[0] == 1


def test_a_request_that_kills_engines_is_given_up(checkpoint: Path) -> None:
    """The others go on."""

    async def work(http: httpx.AsyncClient) -> None:
        others = [asyncio.create_task(http.post("/v1/completions", json=SPOKEN | {"prompt": f"{i}", "max_tokens": 1000})) for i in range(4)]
        await asyncio.sleep(0.2)
        answer = await http.post("/v1/completions", json=SPOKEN | {"seed": 666})
        assert "the fake engine broke" in events(answer)[-1]["error"]["message"]
        assert len({text(other) for other in await asyncio.gather(*others)}) == 1
        await health(http, "ok")

    with launched(checkpoint, "--dp", "4", "--engine-restarts", "9") as server:
        run(server, work)
        server.process.send_signal(signal.SIGTERM)
        log = server.end(60)[1]
    assert len(re.findall(r"ERROR engine \d: the engine process stops", log)) == log.count("the engine process stops") == 4


def test_an_engine_that_cannot_start_ends_the_server(checkpoint: Path) -> None:
    with launched(checkpoint, "--dp", "2", ready=False, FAKE_ENGINE="load") as server:
        code, log = server.end(60)
    assert code == 1 and log.splitlines()[1:] == ["mtpserve: model.safetensors: tensor 'x' is cut off"]
