"""Pauses by HTTP: SGLang's routes and vLLM's, over a fake engine, and over real ones that share a port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mtpserve.core.protocols.control import Sleep, WakeUp
from tests.server.fake_client import FakeClient
from tests.server.test_end_to_end import Running, running as running_server
from tests.server.test_errors import error, send

LONG = {"prompt": "a", "max_tokens": 400}


def scenario(app: FastAPI, work: Any) -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http, asyncio.timeout(30):
            await work(http)

    asyncio.run(main())


async def paused(http: httpx.AsyncClient) -> bool:
    state = (await http.get("/server_info")).json()["internal_states"][0]
    is_paused = (await http.get("/is_paused")).json()
    assert is_paused == {"is_paused": state["paused"] == 1}
    return bool(is_paused["is_paused"])


async def running(client: FakeClient, count: int) -> None:
    while len(client.engine.live) < count or any(done < 2 for _, done in client.engine.live.values()):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("path", "fields"), [("/pause_generation", {}), ("/pause_generation", {"mode": "abort"}), ("/pause", None)])
def test_abort_answers_with_what_there_is(app: FastAPI, client: FakeClient, path: str, fields: dict[str, Any] | None) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        client.pause = 0.005
        requests = [asyncio.create_task(http.post("/v1/completions", json=LONG)) for _ in range(2)]
        await running(client, 2)
        response = await http.post(path, json=fields)
        assert response.status_code == 200, response.text
        choices = [(await request).json()["choices"][0] for request in requests]
        assert [choice["finish_reason"] for choice in choices] == ["abort"] * 2 and all(choice["text"] for choice in choices)
        assert await paused(http)
        late = asyncio.create_task(http.post("/v1/completions", json=LONG | {"max_tokens": 4}))
        await asyncio.sleep(0.05)
        assert not late.done(), "new requests wait"
        await http.post("/continue_generation" if path == "/pause_generation" else "/resume")
        assert (await late).json()["choices"][0]["finish_reason"] == "length"
        assert not await paused(http)

    scenario(app, work)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/pause_generation", {"json": {"mode": "retract"}}),
        ("/pause_generation", {"json": {"mode": "in_place"}}),
        ("/pause?mode=keep", {}),
    ],
)
def test_the_others_go_on_later(app: FastAPI, client: FakeClient, path: str, options: dict[str, Any]) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        client.pause = 0.002
        request = asyncio.create_task(http.post("/v1/completions", json=LONG))
        await running(client, 1)
        assert (await http.post(path, **options)).status_code == 200
        assert await paused(http)
        await asyncio.sleep(0.05)
        assert not request.done()
        assert (await http.post("/continue_generation", json={"torch_empty_cache": True})).json()["status"] == "ok"
        choice = (await request).json()["choices"][0]
        assert (choice["finish_reason"], len(client.submitted)) == ("length", 1)

    scenario(app, work)


def test_wrong_modes_are_named(http: httpx.AsyncClient) -> None:
    assert error(send(http, "POST", "/pause_generation", json={"mode": "stop"}), 400)["param"] == "mode"
    assert error(send(http, "POST", "/pause?mode=wait"), 400)["param"] == "mode"
    assert error(send(http, "POST", "/pause?clear_cache=perhaps"), 400)["param"] == "clear_cache"


def test_vllms_sleep(app: FastAPI, client: FakeClient) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        client.pause = 0.005
        request = asyncio.create_task(http.post("/v1/completions", json=LONG))
        await running(client, 1)
        assert (await http.post("/sleep?level=2")).json() == {"bytes": 1000}
        assert (await request).json()["choices"][0]["finish_reason"] == "abort"
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await http.get("/server_info")).json()["internal_states"][0]["sleeping"] == 1
        late = asyncio.create_task(http.post("/v1/completions", json=LONG | {"max_tokens": 4}))
        await asyncio.sleep(0.05)
        assert not late.done(), "new requests wait"
        for query in ("?tags=weights,kv_cache", "?tags=weights&tags=kv_cache", ""):
            assert (await http.post(f"/wake_up{query}")).status_code == 200
        assert (await late).json()["choices"][0]["finish_reason"] == "length"
        assert (await http.post("/sleep?mode=keep")).status_code == 200
        both = ["weights", "kv_cache"]
        assert client.engine.sleeps == [Sleep(both, True), WakeUp(both), WakeUp(both), WakeUp(), Sleep(both)]

    scenario(app, work)


def test_sglangs_release(http: httpx.AsyncClient, client: FakeClient) -> None:
    both = ["weights", "kv_cache"]
    for body in (None, {}, {"tags": ["kv_cache"]}, {"tags": ["cuda_graph"]}):
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            assert send(http, "POST", path, json=body).status_code == 200
    assert client.engine.sleeps == [Sleep(both), WakeUp(both)] * 2 + [Sleep(["kv_cache"]), WakeUp(["kv_cache"])]


def test_wrong_memory_is_named(http: httpx.AsyncClient) -> None:
    assert error(send(http, "POST", "/sleep?level=3"), 400)["message"] == "level must be 1 or 2, got 3"
    assert error(send(http, "POST", "/sleep?level=deep"), 400)["param"] == "level"
    assert error(send(http, "POST", "/release_memory_occupation", json={"tags": ["graphs"]}), 400)["param"].startswith("tags")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server("--data-parallel-size", "2", "--max-total-tokens", "4096") as started:
        yield started


def greedy(server: Running) -> list[str]:
    """More requests than two engines compute in one step, at once."""
    bodies = [
        {"prompt": f"import {name}\n", "max_tokens": 120, "temperature": 0, "ignore_eos": True} for name in ("os", "re", "json", "ast")
    ]

    def post(body: dict[str, Any]) -> str:
        choice = httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()["choices"][0]
        return f"{choice['finish_reason']} {choice['text']}"

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(post, bodies))


@pytest.mark.thorough
def test_real_engines_go_on_where_they_were(server: Running) -> None:
    expected = greedy(server)
    holds = [
        ("/pause_generation", {"mode": "retract"}, "/continue_generation"),
        ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
        ("/sleep?mode=keep&level=2", None, "/wake_up"),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, "/resume_memory_occupation"),
    ]
    with ThreadPoolExecutor(1) as pool:
        texts = pool.submit(greedy, server)
        for path, body, back in holds:
            time.sleep(0.05)
            response = httpx.post(server.url + path, json=body, timeout=120)
            assert response.status_code == 200, response.text
            if path.startswith("/sleep"):
                assert response.json()["bytes"] > 1 << 20 and httpx.get(server.url + "/is_sleeping").json()["is_sleeping"]
            assert httpx.post(server.url + back, timeout=120).status_code == 200
        assert texts.result() == expected
    assert greedy(server) == expected
    metrics = httpx.get(server.url + "/metrics").text
    assert "mtpserve_engine_paused" in metrics and "mtpserve_engine_sleeping" in metrics
