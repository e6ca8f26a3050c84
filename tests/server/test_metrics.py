"""The metrics: exact counts, and the rules of Prometheus' linter."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtpserve import __version__
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.server.app import create_app
from mtpserve.server.observe.metrics import DEPRECATED, Metrics
from mtpserve.server.observe.observed import Recent
from mtpserve.server.observe.report import line
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.metric_text import without_model


def scrape(http: httpx.AsyncClient, *requests: dict[str, object]) -> str:
    async def ask() -> str:
        for request in requests:
            await http.post("/v1/completions", json=request)
        response = await http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        return without_model(response.text)

    return asyncio.run(ask())


def test_counts(http: httpx.AsyncClient, client: FakeClient) -> None:
    requests = [
        {"prompt": [5, 6, 7], "max_tokens": 9, "speculative": {"enabled": False}},
        {"prompt": [5], "max_tokens": 4},
        {"prompt": "a", "seed": 429},
    ]
    text = scrape(http, *requests, {"prompt": [5], "seed": 500})
    values = dict(re.findall(r"^(mtpserve_\S+) (\S+)$", text, re.MULTILINE))
    expected = {
        'mtpserve_spec_algorithm{algorithm="none"}': 1,
        "mtpserve_prompt_tokens_total": 5,
        "mtpserve_generation_tokens_total": 9 + 4 + 4,
        "mtpserve_spec_drafts_total": 9,
        "mtpserve_spec_draft_tokens_total": 18,
        "mtpserve_spec_accepted_tokens_total": 8,
        "mtpserve_spec_bonus_tokens_total": 9,
        'mtpserve_spec_draft_tokens_per_position_total{position="2"}': 9,
        'mtpserve_spec_accepted_tokens_per_position_total{position="1"}': 8,
        'mtpserve_spec_accept_length_bucket{le="1.0"}': 1,
        'mtpserve_spec_accept_length_bucket{le="2.0"}': 9,
        'mtpserve_spec_accept_length_bucket{le="3.0"}': 9,
        'mtpserve_spec_accept_length_bucket{le="+Inf"}': 9,
        "mtpserve_spec_accept_length_sum": 17,
        "mtpserve_requests_running": 0,
        "mtpserve_kv_pages": 64,
        "mtpserve_kv_pages_used": 0,
        "mtpserve_kv_page_usage_ratio": 0,
        "mtpserve_time_to_first_token_seconds_count": 3,
        "mtpserve_inter_token_latency_seconds_count": (9 - 2) + (4 - 2) + (4 - 2),  # the first chunk has two tokens
        "mtpserve_e2e_request_latency_seconds_count": 2,
        'mtpserve_requests_total{outcome="length"}': 2,
        'mtpserve_requests_total{outcome="rejected"}': 1,
        'mtpserve_requests_total{outcome="error"}': 1,
        "mtpserve_step_gap_seconds_count": 4 + 1 + 1,
        "mtpserve_time_per_output_token_seconds_count": 2,
        "mtpserve_queue_time_seconds_sum": 3 * 0.25,
        "mtpserve_prompt_time_seconds_sum": 3 * 0.5,
        "mtpserve_request_prompt_tokens_sum": 3 + 1,
        "mtpserve_request_generation_tokens_sum": 9 + 4,
        "mtpserve_engine_up": 1,
        "mtpserve_spec_num_steps": 2,
        "mtpserve_spec_recent_accept_length": 1 + 8 / 9,
        "mtpserve_spec_recent_accept_rate": 8 / 18,
        'mtpserve_spec_disabled_requests_total{reason="request"}': 1,
    }
    assert {name: float(values[name]) for name in expected} == expected


def labelled(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples of our metrics: name → labels → value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("mtpserve_"):
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_every_metric_names_the_model(client: FakeClient, tokenizer: Tokenizer) -> None:
    client.card = replace(client.card, algorithm="NEXTN", checkpoint="org/name", device="cuda", weight_format="fp8")
    client.engine.stats.draft_tokens_by_source = client.engine.stats.accepted_tokens_by_source = {"mtp": 1}
    metrics = Metrics(client)
    metrics.http_request("/health", "GET", 200)
    samples = labelled(metrics.text().decode())
    assert len(samples) > 100
    assert not [name for name, rows in samples.items() for labels in rows if ("model_name", "fake") not in labels]
    ((labels, value),) = samples["mtpserve_build_info"].items()
    described = {"version": __version__, "model": "org/name", "drafter": "NEXTN", "device": "cuda", "format": "fp8", "model_name": "fake"}
    assert (dict(labels), value) == (described, 1)


def test_older_names_have_the_same_values_for_one_release(client: FakeClient) -> None:
    client.engine.stats.steps_per_depth = [4, 5, 6]
    client.engine.stats.draft_health.faults_total = 3
    text = Metrics(client).text().decode()
    samples = labelled(text)
    for older, name in DEPRECATED.items():
        ours = [sample for sample in samples if sample.removesuffix("_total") == f"mtpserve_{older}"]
        (current,) = [sample for sample in samples if sample.removesuffix("_total") == f"mtpserve_{name}"]
        assert [samples[sample] for sample in ours] == [samples[current]]
        assert f"# HELP {ours[0]} Deprecated, gone with the next release: use {current}.\n" in text
    assert sum(samples["mtpserve_spec_steps_total"].values()) == 15 and list(samples["mtpserve_speculative_faults_total"].values()) == [3]
    assert not [
        name for name in samples if "speculative" in name and name.removeprefix("mtpserve_").removesuffix("_total") not in DEPRECATED
    ]


def test_http_requests_are_counted_by_route_and_status(http: httpx.AsyncClient) -> None:
    async def ask() -> str:
        for body in ({"prompt": "a", "max_tokens": 2}, {"prompt": "a", "max_tokens": 2, "stream": True}, {"prompt": 5.5}):
            await http.post("/v1/completions", json=body)
        await http.post("/v1/completions", json={"model": "other", "prompt": "a"})
        for method, path in (
            ("GET", "/v1/models/fake"),
            ("GET", "/nowhere/1"),
            ("GET", "/nowhere/2"),
            ("BREW", "/health"),
            ("PUT", "/health"),
        ):
            await http.request(method, path)
        http._transport.app.state.service.tokenizer = None  # type: ignore[attr-defined]
        await http.post("/v1/completions", json={"prompt": "a"})
        return (await http.get("/metrics")).text

    found = {
        tuple(dict(labels)[name] for name in ("route", "method", "status")): value
        for labels, value in labelled(asyncio.run(ask()))["mtpserve_http_requests_total"].items()
    }
    assert found == {
        ("/v1/completions", "POST", "200"): 2,
        ("/v1/completions", "POST", "400"): 1,
        ("/v1/completions", "POST", "404"): 1,
        ("/v1/completions", "POST", "500"): 1,
        ("/v1/models/{id:path}", "GET", "200"): 1,
        ("other", "GET", "404"): 2,
        ("/health", "other", "405"): 1,
        ("/health", "PUT", "405"): 1,
    }


def values_of(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^mtpserve_(kv_\S+) (\S+)$", text, re.MULTILINE)}


def test_tiers_below_the_device(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.engine.pretend_tiers()
    values = values_of(scrape(http))
    expected = {
        'kv_tier_pages{tier="host"}': 400,
        'kv_tier_pages_used{tier="host"}': 120,
        'kv_loaded_pages_total{tier="host"}': 30,
        'kv_loaded_pages_total{tier="disk"}': 10,
        'kv_transfers_total{kind="save"}': 150,
        'kv_transfers_total{kind="spill"}': 100,
        'kv_transfer_bytes_total{kind="load"}': 4e6,
        'kv_transfer_seconds_total{kind="fetch"}': 0.004,
        'kv_failed_transfers_total{kind="fetch"}': 1,
        'kv_failed_transfers_total{kind="save"}': 0,
        "kv_dropped_pages_total": 5,
    }
    assert {name: values[name] for name in expected} == expected


def test_without_tiers_they_are_zeros(http: httpx.AsyncClient) -> None:
    values = values_of(scrape(http))
    of_tiers = {name: value for name, value in values.items() if re.search("tier|transfer|loaded|dropped", name)}
    assert len(of_tiers) == 2 + 2 + 4 * 6 + 1 + 3 + 9 and not any(of_tiers.values())


def test_the_linters_rules(http: httpx.AsyncClient) -> None:
    """What `promtool check metrics` looks at."""
    text = scrape(http, {"prompt": "a"})
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name), family.name
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        if family.type != "counter" and family.name != "mtpserve_build_info":
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_info"))
        assert not re.search(r"_(ms|milliseconds|minutes|percent|kilobytes|mb|gauge|counter|histogram)(_|$)", family.name)
        assert all(re.fullmatch(r"[a-z_]+", label) for sample in family.samples for label in sample.labels)
    names = re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE)
    assert names
    assert all(name.endswith("_total") for name in names)
    assert "_created" not in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Prometheus")
def test_promtool_has_nothing_to_say(http: httpx.AsyncClient) -> None:
    text = scrape(http, {"prompt": "a", "max_tokens": 9})
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_dead_engine_is_down(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.dead = "the engine process was killed by SIGKILL"
    assert "\nmtpserve_engine_up 0.0\n" in scrape(http)


def test_nothing_is_said_of_drafts_before_there_were_any(http: httpx.AsyncClient) -> None:
    assert "spec_recent" not in scrape(http)


def test_recent_rates_are_of_the_last_ten_seconds() -> None:
    now = 100.0
    recent = Recent(lambda: now)
    stats = EngineStats()
    seen = []
    for now in (100.5, 101.0, 103.0, 105.0, 110.0, 115.0, 130.0):
        rate = {100.5: 0, 101.0: 0}.get(now, 10)
        stats.generation_tokens_total = round(rate * (now - 100))
        stats.drafts_total, stats.draft_tokens_total, stats.accepted_tokens_total = (2, 6, 3) if now > 103 else (0, 0, 0)
        stats.prompt_tokens_total, stats.cached_prompt_tokens_total = (8, 6) if now > 103 else (0, 0)
        seen.append(recent.rates(stats))
    assert [rates.cached_share for rates in seen] == [None] * 3 + [0.75] * 4
    assert [rates.accept_length for rates in seen] == [None] * 3 + [2.5] * 4
    assert seen[-1].accept_rate == 0.5
    assert seen[2].tokens_per_second == 10
    assert seen[-1].tokens_per_second == 10  # 150 tokens in the 15 s since the youngest sample that is old enough


def test_the_log_line() -> None:
    before = EngineStats(generation_tokens_total=100, drafts_total=10, accepted_tokens_total=10, prompt_tokens_total=7)
    now = EngineStats(
        running=3, waiting=1, pages_used=16, pages_total=64, generation_tokens_total=300, drafts_total=60, accepted_tokens_total=90,
        prompt_tokens_total=17, cached_prompt_tokens_total=7,
    )  # fmt: skip
    text = line(before, now, 2.0)
    assert text == "running 3  waiting 1  pages 16/64 (25 %)  prompt 5.0 tok/s  cached 70 %  generation 100.0 tok/s  accept length 2.60"
    now.tier_pages, now.tier_pages_total = {"host": 120}, {"host": 400}
    assert line(before, now, 2.0) == text.replace("(25 %)", "(25 %)  host 120/400 pages")
    assert "accept" not in line(now, now, 2.0) and "cached" not in line(now, now, 2.0)


def test_synthetic_acceptance_is_said_everywhere(client: FakeClient, tokenizer: Tokenizer) -> None:
    client.card = replace(client.card, synthetic_acceptance="glm-5.2-mtp")
    http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(client, tokenizer)), base_url="http://test")
    assert "\nmtpserve_spec_synthetic_acceptance 1.0\n" in scrape(http)
    assert asyncio.run(http.get("/v1/models")).json()["data"][0]["synthetic_acceptance"] == "glm-5.2-mtp"
    assert line(EngineStats(), EngineStats(), 1, "glm-5.2-mtp").endswith("SYNTHETIC ACCEPTANCE glm-5.2-mtp")


def test_and_nowhere_without(http: httpx.AsyncClient) -> None:
    assert "\nmtpserve_spec_synthetic_acceptance 0.0\n" in scrape(http)
    assert "SYNTHETIC" not in line(EngineStats(), EngineStats(), 1)
