"""`/v1/spec`: what the engine knows of depths, and what may be set; and the same in metrics, the log line and the page."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mtpserve.config import ServerConfig
from mtpserve.core.stats.engine_stats import DepthState, EngineStats
from mtpserve.core.stats.reports import SpecChange, SpecReport
from mtpserve.engine.depth.step_shapes import StepWork, bucket, middle
from mtpserve.server import spec
from mtpserve.server.app import create_app
from mtpserve.server.observe.report import line
from mtpserve.server.page.page import PAGE
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.fake_engine import FakeEngine
from tests.server.metric_text import without_model
from tests.server.test_errors import error

TEXT = PAGE.html.decode()


def ask(http: httpx.AsyncClient, method: str, body: Any = None, **given: Any) -> httpx.Response:
    return asyncio.run(http.request(method, "/v1/spec", json=body, **given))


def learn(client: FakeClient) -> None:
    """Steps of three kinds, which take 10, 12 and 20 ms."""
    policy = client.engine.policy
    assert policy is not None
    for _ in range(8):
        for requests, depth, seconds in ((1, 0, 0.010), (1, 2, 0.012), (40, 2, 0.020)):
            policy.times.observe(StepWork(requests, requests * (1 + depth), depth), seconds)
    policy.choice = policy.choice._replace(value=321.5)
    policy.num_changes, policy.probes.count = 3, 7


def test_what_is_known(http: httpx.AsyncClient, client: FakeClient) -> None:
    assert ask(http, "GET").json()["tokens_per_second"] is None
    learn(client)
    client.card = replace(client.card, algorithm="EAGLE3+NGRAM")
    asyncio.run(http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 4}))
    known = ask(http, "GET").json()
    assert (known["adaptive"], known["configured_steps"], known["num_steps"], known["depth"], known["fixed"]) == (True, 2, 2, 2, None)
    assert (known["tokens_per_second"], known["changes_total"], known["trials_total"]) == (321.5, 3, 7)
    assert known["algorithm"] == "EAGLE3+NGRAM" and known["acceptance"] == [0.8, 0.8]
    assert (known["verified_per_position"], known["accepted_per_position"], known["steps_per_depth"]) == ([2, 2], [2, 0], [0, 0, 2])
    few, deep, many = known["step_times"]
    assert few == {"requests": 1, "rows": 1, "passes": 0, "sampled": False, "milliseconds": 10.0, "seen": 8}
    assert deep == {"requests": 1, "rows": 3, "passes": 2, "sampled": False, "milliseconds": 12.0, "seen": 8}
    assert (bucket(many["requests"]), bucket(many["rows"]), many["milliseconds"]) == (bucket(40), bucket(120), 20.0)
    assert len(known["coefficients_ms"]) == 9 and all(value >= 0 for value in known["coefficients_ms"].values())
    assert any(known["coefficients_ms"].values())


def test_each_of_several_engines(http: httpx.AsyncClient, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(client)
    other = FakeEngine("fake", 0.0)
    other.set_spec(SpecChange(num_steps=1))

    async def both(change: SpecChange) -> dict[int, SpecReport]:
        return {2: client.engine.set_spec(change), 3: other.set_spec(change)}

    monkeypatch.setattr(client, "set_spec", both)
    known = ask(http, "GET").json()
    one, two = known.pop("engines")
    assert (one, two["engine"], two["num_steps"], two["step_times"]) == (known | {"engine": 2}, 3, 1, [])
    assert [each["num_steps"] for each in ask(http, "POST", {"num_steps": 0}).json()["engines"]] == [0, 0]


def test_numbers_that_share_a_row_are_named_by_one_of_them() -> None:
    assert all(bucket(middle(each)) == each for each in range(1, 80))


def test_setting(http: httpx.AsyncClient, client: FakeClient) -> None:
    policy = client.engine.policy
    assert policy is not None
    answer = ask(http, "POST", {"num_steps": 1})
    assert answer.status_code == 200
    assert {name: answer.json()[name] for name in ("adaptive", "num_steps", "depth")} == {"adaptive": True, "num_steps": 1, "depth": 1}
    assert ask(http, "POST", {"adaptive": False, "num_steps": 0}).json()["num_steps"] == policy.max_depth == 0
    assert not policy.adaptive and ask(http, "GET").json()["adaptive"] is False
    policy.survival.rates = [0.5, 0.1]
    assert ask(http, "POST", {"reset": False}).json()["acceptance"] == [0.5, 0.1]
    known = ask(http, "POST", {"reset": True, "num_steps": 2}).json()
    assert (known["acceptance"], known["num_steps"], known["adaptive"]) == ([0.8, 0.8], 2, False)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"num_steps": 3}, "num_steps", "num_steps must be in [0, 2], got 3"),
        ({"num_steps": -1}, "num_steps", "num_steps must be in [0, 2], got -1"),
        ({"num_steps": 10**60}, "num_steps", "num_steps must be in [0, 2], got 10000"),
        ({"num_steps": "1"}, "num_steps", "got '1'"),
        ({"num_steps": True}, "num_steps", "got True"),
        ({"num_steps": 1.5}, "num_steps", "got 1.5"),
        ({"adaptive": 1}, "adaptive", "got 1"),
        ({"reset": "yes"}, "reset", "got 'yes'"),
        ({"steps": 1}, "steps", "steps: unknown field"),
        ({"num_steps": 1, "depth": 1}, "depth", "depth: unknown field"),
        ({"num_steps": None}, "adaptive", "give adaptive, num_steps or reset"),
        ({}, "adaptive", "give adaptive, num_steps or reset"),
    ],
    ids=str,
)
def test_bad_input(http: httpx.AsyncClient, client: FakeClient, body: dict[str, Any], param: str, told: str) -> None:
    refused = error(ask(http, "POST", body), 400)
    assert refused["param"] == param and told in refused["message"]
    assert client.engine.policy is not None and client.engine.policy.max_depth == 2


@pytest.mark.parametrize(("steps", "why"), [(0, "no speculation"), (2, "--no-speculative-adaptive, or with acceptance thresholds below 1")])
def test_where_the_depth_is_fixed(http: httpx.AsyncClient, client: FakeClient, steps: int, why: str) -> None:
    client.engine.fix_depth(steps)
    known = ask(http, "GET").json()
    assert (known["adaptive"], known["configured_steps"], known["num_steps"], known["depth"]) == (False, steps, steps, steps)
    assert (known["tokens_per_second"], known["acceptance"], known["step_times"]) == (None, [], [])
    reason = f"the depth is fixed at {steps}: the engine was started with {why}"
    assert known["fixed"] == reason
    for body, told in (({"adaptive": True}, "adaptive cannot be set to True"), ({"num_steps": 9}, "num_steps cannot be set to 9")):
        refused = error(ask(http, "POST", body), 400)
        assert (refused["param"], refused["message"]) == (told.split()[0], f"{told}: {reason}")


def test_keys(client: FakeClient, tokenizer: Tokenizer) -> None:
    """All may read who have a key; setting is for the operator."""
    config = ServerConfig(api_key=("user",), admin_api_key=("admin",))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(client, tokenizer, server_config=config)), base_url="http://test")
    user, admin = ({"authorization": f"Bearer {key}"} for key in ("user", "admin"))
    assert ask(http, "GET").status_code == ask(http, "POST", {"num_steps": 1}).status_code == 401
    assert ask(http, "GET", headers=user).status_code == 200
    assert error(ask(http, "POST", {"num_steps": 1}, headers=user), 403)["code"] == "admin_key_required"
    assert client.engine.policy is not None and client.engine.policy.max_depth == 2
    assert ask(http, "POST", {"num_steps": 1}, headers=admin).json()["num_steps"] == 1


def test_an_engine_that_does_not_answer(http: httpx.AsyncClient, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.dead = "the engine process was killed by SIGKILL"
    for method, body in (("GET", None), ("POST", {"num_steps": 1})):
        assert error(ask(http, method, body), 503)["code"] == "engine_dead"
    client.dead = None

    async def never(change: SpecChange) -> dict[int, SpecReport]:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(client, "set_spec", never)
    monkeypatch.setattr(spec, "ANSWER_S", 0.01)
    assert error(ask(http, "GET"), 503)["message"] == "the engine did not answer within 0.01 s"


def test_metrics(http: httpx.AsyncClient, client: FakeClient) -> None:
    def values() -> dict[str, float]:
        text = without_model(asyncio.run(http.get("/metrics")).text)
        return {name: float(value) for name, value in re.findall(r"^mtpserve_(spec_(?:depth|trials|steps)\S*) (\S+)$", text, re.MULTILINE)}

    learn(client)
    ask(http, "POST", {"num_steps": 1})
    client.engine.stats.steps_per_depth = [4, 5, 6, 0, 0]
    steps = {f'spec_steps_total{{depth="{depth}"}}': 4.0 + depth for depth in range(3)}
    chosen = {"spec_depth": 1.0, "spec_depth_changes_total": 3.0, "spec_trials_total": 7.0}
    assert values() == chosen | steps
    client.engine.fix_depth(2)
    fixed = {"spec_depth": 2.0, "spec_depth_changes_total": 0.0, "spec_trials_total": 0.0}
    assert values() == fixed | steps


def test_the_log_line_has_the_depth_where_it_is_chosen() -> None:
    state = DepthState(True, 3, 2, None, 0, 0, [0.8])
    assert line(EngineStats(), EngineStats(depths=state), 1.0).endswith("generation 0.0 tok/s  depth 2")
    for fixed in (None, replace(state, adaptive=False)):
        assert "depth" not in line(EngineStats(), EngineStats(depths=fixed), 1.0)


def test_what_the_page_takes_is_there(http: httpx.AsyncClient) -> None:
    depths = asyncio.run(http.get("/stats")).json()["stats"]["depths"]
    taken = set(re.findall(r"\bchosen\.(\w+)", TEXT))
    assert "acceptance" in taken and taken <= depths.keys()
    report = ask(http, "GET").json()
    assert "step_times" in report and ".step_times" in TEXT
    assert set(re.findall(r"\bstep\.(requests|rows|passes|milliseconds|seen)\b", TEXT)) == {
        "requests", "rows", "passes", "milliseconds", "seen",
    }  # fmt: skip
