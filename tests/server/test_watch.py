"""What the page's Watch view reads: percentiles, the last ten minutes, live requests. In a browser it is tested by test_page_watch.py."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from mtpserve.config import ServerConfig
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.server.app import create_app
from mtpserve.server.observe.histogram import LoopHistogram
from mtpserve.server.observe.history import EVERY_S, KEPT_S, RECENT_S, RecentHistory
from mtpserve.server.observe.metrics import FIRST_TOKEN_BUCKETS, REQUEST_BUCKETS, TOKEN_BUCKETS
from mtpserve.server.observe.percentiles import percentile, percentiles
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def observed(buckets: tuple[float, ...], values: np.ndarray[Any, Any]) -> LoopHistogram:
    histogram = LoopHistogram("seconds", "", buckets, CollectorRegistry())
    for value in values:
        histogram.observe(float(value))
    return histogram


@pytest.mark.parametrize("buckets", [FIRST_TOKEN_BUCKETS, TOKEN_BUCKETS, REQUEST_BUCKETS])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_true_percentile_is_between_the_bounds(buckets: tuple[float, ...], size: int) -> None:
    values = np.random.default_rng(size).lognormal(np.log(buckets[len(buckets) // 2]), 1.0, size)
    histogram = observed(buckets, values)
    found = percentiles(histogram.bounds, histogram.counts())
    assert found.count == size
    for name, share in SHARES.items():
        one, true = getattr(found, name), np.percentile(values, 100 * share, method="inverted_cdf")
        assert one.low <= true and (one.high is None or true <= one.high)
        assert one.low <= one.seconds and (one.high is None or one.seconds <= one.high)


def test_percentiles_are_numpys_where_values_are_spread_evenly() -> None:
    bounds = (1.0, 2.0, 4.0, 8.0)
    values = np.linspace(0, 8, 80_001)[1:]
    counts = observed(bounds, values).counts()
    for share in (0.01, 0.25, 0.5, 0.9, 0.99, 1.0):
        found = percentile(bounds, counts, share)
        assert found is not None and found.seconds == pytest.approx(np.percentile(values, 100 * share), abs=1e-3)


def test_percentiles_of_nothing_and_above_all_bounds() -> None:
    assert percentile((1.0, 2.0), (0, 0, 0), 0.5) is None
    above = percentile((1.0, 2.0), (1, 0, 3), 0.9)
    assert above is not None and (above.seconds, above.low, above.high) == (2.0, 2.0, None)
    below = percentile((1.0, 2.0), (1, 0, 3), 0.25)
    assert below is not None and (below.seconds, below.low, below.high) == (1.0, 0.0, 1.0)
    middle = percentile((0.1, 0.2, 0.4), (6, 3, 1, 0), 0.75)  # the drawing in percentiles.py
    assert middle is not None and middle.seconds == pytest.approx(0.15)


class Clocked:
    """A history of an engine that generates 10 tokens a second, in time that is set."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.stats = EngineStats(running=1, waiting=2, pages_used=3, pages_total=64, steps_per_depth=[0, 0, 0])
        self.histogram = observed((1.0, 2.0), np.array([]))
        self.history = RecentHistory(lambda: self.stats, {"first_token": self.histogram}, lambda: self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.stats.generation_tokens_total += round(10 * seconds)
        self.history.sample()


def test_the_history_keeps_ten_minutes() -> None:
    clocked = Clocked()
    for _ in range(1000):
        clocked.pass_time(EVERY_S)
    kept = clocked.history.since(0)
    assert (kept.interval_s, kept.kept_s) == (EVERY_S, KEPT_S)
    columns = {name: getattr(kept, name) for name in kept.__struct_fields__ if isinstance(getattr(kept, name), list)}
    assert {len(column) for column in columns.values()} == {KEPT_S / EVERY_S + 1}
    assert (kept.at[-1] - kept.at[0], kept.at[-1]) == (KEPT_S, kept.now) == (600, 2000)
    assert set(kept.tokens_per_second) == {10.0}
    assert {(kept.running[0], kept.waiting[0], kept.pages_used[0], kept.pages_total[0])} == {(1, 2, 3, 64)}
    assert clocked.history.since(kept.at[-3]).at == kept.at[-2:]
    assert clocked.history.since(kept.at[-1]).at == []


def test_samples_are_differences_and_nothing_where_nothing_happened() -> None:
    clocked = Clocked()
    clocked.pass_time(0.5)
    assert clocked.history.since(0).at == []  # too early
    clocked.pass_time(1.5)
    stats = clocked.stats
    stats.drafts_total, stats.accepted_tokens_total, stats.prompt_tokens_total, stats.cached_prompt_tokens_total = 4, 6, 10, 5
    stats.steps_per_depth[1], stats.steps_per_depth[2] = 1, 3  # in place, as an engine in this process counts
    clocked.pass_time(2)
    clocked.pass_time(2)
    kept = clocked.history.since(0)
    assert kept.accept_length == [None, 2.5, None]
    assert kept.cached_share == [None, 0.5, None]
    assert kept.depth == [None, 1.75, None]
    assert kept.tokens_per_second == [10.0] * 3


def test_recent_percentiles_forget_what_is_old() -> None:
    clocked = Clocked()
    clocked.histogram.observe(0.5)
    clocked.pass_time(EVERY_S)
    clocked.histogram.observe(1.5, 3)
    both = clocked.history.latencies()["first_token"]
    assert (both.since_start.count, both.recent.count) == (4, 4)
    for _ in range(round(RECENT_S / EVERY_S)):
        clocked.pass_time(EVERY_S)
    later = clocked.history.latencies()["first_token"]
    assert (later.since_start.count, later.recent.count) == (4, 3)
    assert later.recent.p50 is not None and (later.recent.p50.low, later.recent.p50.high) == (1.0, 2.0)
    for _ in range(3):
        clocked.pass_time(EVERY_S)
    last = clocked.history.latencies()["first_token"]
    assert (last.since_start.count, last.recent.count, last.recent.p99) == (4, 0, None)


def test_the_task_takes_samples_and_whoever_asks_too(http: httpx.AsyncClient, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.server.observe.history.EVERY_S", 0.01)
    monkeypatch.setattr("mtpserve.server.observe.history.EARLY_S", 0.01)
    clocked = Clocked()

    async def kept() -> None:
        task = asyncio.create_task(clocked.history.keep())
        async with asyncio.timeout(30):
            while len(clocked.history.since(0).at) < 3:
                await asyncio.sleep(0.01)
                clocked.now += EVERY_S
        task.cancel()

    asyncio.run(kept())
    client.engine.stats.generation_tokens_total = 7
    answer = asyncio.run(http.get("/stats/history"))
    assert answer.headers["cache-control"] == "no-store"
    (at,) = answer.json()["at"]
    assert answer.json()["tokens_per_second"][0] > 0 and answer.json()["pages_total"] == [64]
    assert at not in asyncio.run(http.get("/stats/history", params={"since": at})).json()["at"]


@pytest.mark.parametrize("since", ["nan", "inf", "soon"])
def test_since_is_a_time(http: httpx.AsyncClient, since: str) -> None:
    answer = asyncio.run(http.get("/stats/history", params={"since": since}))
    assert answer.status_code == 400 and "since" in answer.json()["error"]["message"]


def test_stats_have_the_percentiles(http: httpx.AsyncClient) -> None:
    asyncio.run(http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 9}))
    body = asyncio.run(http.get("/stats")).json()
    assert body["recent_s"] == RECENT_S
    counts = {name: latency["since_start"]["count"] for name, latency in body["latency"].items()}
    assert counts == {"first_token": 1, "between_tokens": 7, "whole_request": 1}
    for latency in body["latency"].values():
        assert latency["recent"] == latency["since_start"]
        assert 0 <= latency["recent"]["p50"]["low"] <= latency["recent"]["p50"]["seconds"] <= latency["recent"]["p99"]["seconds"]


async def until(http: httpx.AsyncClient, count: int, state: str = "running") -> list[dict[str, Any]]:
    """The live requests, once so many are in that state."""
    async with asyncio.timeout(60):
        while True:
            found: list[dict[str, Any]] = (await http.get("/stats/requests")).json()["requests"]
            if sum(row["state"] == state for row in found) == count:
                return found
            await asyncio.sleep(0.01)


def test_live_requests_and_their_end(tokenizer: Tokenizer) -> None:
    client = FakeClient(pause=0.02)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(client, tokenizer)), base_url="http://test")

    async def watched() -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any], httpx.Response]:
        body = {"model": "fake", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3000, "rid": "mine-and-only"}
        chat = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(http, 1)
        other = asyncio.create_task(http.post("/generate", json={"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3000}}))
        found = await until(http, 2)
        text = (await http.get("/stats/requests")).text
        assert "secret" not in text and "messages" not in text
        aborted = (await http.post("/abort_request", json={"rid": found[0]["id"]})).json()
        left = await until(http, 1)
        await http.post("/abort_request", json={"abort_all": True})
        answer, _ = await asyncio.gather(chat, other)
        return found, left, aborted, answer

    found, left, aborted, answer = asyncio.run(watched())
    first, second = found
    assert (first["id"], first["choice"], first["route"], first["engine"]) == ("mine-and-only", 0, "/v1/chat/completions", 0)
    assert (second["route"], second["prompt_tokens"], second["cached_tokens"]) == ("/generate", 3, 0)
    assert first["age_s"] > second["age_s"] > 0
    # Each step of the fake engine accepts one draft of two.
    assert first["output_tokens"] == 2 * first["verifications"] == first["draft_tokens"] == 2 * first["accepted_tokens"] > 0
    assert aborted == {"aborted": 1}
    assert [row["id"] for row in left] == [second["id"]]
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert asyncio.run(http.get("/stats/requests")).json() == {"total": 0, "requests": []}


def test_a_request_waits_for_its_first_token(tokenizer: Tokenizer) -> None:
    client = FakeClient(pause=3600)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(client, tokenizer)), base_url="http://test")

    async def watched() -> list[dict[str, Any]]:
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": [5, 6], "n": 2, "max_tokens": 4}))
        found = await until(http, 2, "waiting")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        return found

    found = asyncio.run(watched())
    assert [row["choice"] for row in found] == [0, 1] and len({row["id"] for row in found}) == 1
    assert all((row["cached_tokens"], row["output_tokens"], row["verifications"]) == (None, 0, 0) for row in found)


def test_they_ask_for_the_key_that_stats_ask_for(client: FakeClient, tokenizer: Tokenizer) -> None:
    config = ServerConfig(api_key=("open",), admin_api_key=("admin",))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(client, tokenizer, None, config)), base_url="http://test")
    for path in ("/stats", "/stats/history", "/stats/requests"):
        for key, status in ((None, 401), ("wrong", 401), ("open", 200), ("admin", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert asyncio.run(http.get(path, headers=headers)).status_code == status, (path, key)
    refused = asyncio.run(http.post("/abort_request", json={"rid": "a"}, headers={"Authorization": "Bearer open"}))
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
