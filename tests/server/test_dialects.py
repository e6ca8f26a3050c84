"""Metrics under the peers' names: what is there, of which type, with which labels, and that the numbers are ours."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtpserve.config import ServerConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import EngineState
from mtpserve.server.app import create_app
from mtpserve.server.observe.metrics import Metrics
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient

SGLANG = '{engine_type="unified",model_name="fake",moe_ep_rank="0",pp_rank="0",tp_rank="0"}'
VLLM = '{engine="0",model_name="fake"}'
KINDS = {
    "counter": """
        sglang:spec_verify_calls sglang:num_retracted_requests sglang:prompt_tokens sglang:generation_tokens sglang:num_requests
        sglang:num_so_requests sglang:num_aborted_requests vllm:prompt_tokens vllm:generation_tokens vllm:num_preemptions
        sglang:cached_tokens vllm:prompt_tokens_cached vllm:prompt_tokens_by_source vllm:prefix_cache_queries vllm:prefix_cache_hits
        vllm:spec_decode_num_drafts vllm:spec_decode_num_draft_tokens vllm:spec_decode_num_accepted_tokens
        vllm:spec_decode_num_accepted_tokens_per_pos vllm:request_success""",
    "gauge": """
        sglang:num_running_reqs sglang:num_queue_reqs sglang:token_usage sglang:num_used_tokens sglang:kv_used_tokens
        sglang:kv_available_tokens sglang:max_total_num_tokens sglang:page_size sglang:num_pages sglang:context_len sglang:gen_throughput
        sglang:kv_evictable_tokens sglang:cache_hit_rate
        sglang:spec_num_steps sglang:spec_accept_length sglang:spec_accept_rate vllm:num_requests_running vllm:num_requests_waiting
        vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc vllm:spec_decode_draft_acceptance_rate vllm:cache_config_info
        vllm:num_requests_waiting_by_reason""",
    "histogram": """
        sglang:time_to_first_token_seconds sglang:inter_token_latency_seconds sglang:request_time_per_output_token_seconds
        sglang:e2e_request_latency_seconds sglang:queue_time_seconds sglang:prompt_tokens_histogram sglang:generation_tokens_histogram
        vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds vllm:request_time_per_output_token_seconds
        vllm:e2e_request_latency_seconds vllm:request_queue_time_seconds vllm:request_prefill_time_seconds vllm:request_decode_time_seconds
        vllm:request_inference_time_seconds vllm:request_prompt_tokens vllm:request_generation_tokens vllm:request_params_max_tokens
        vllm:time_per_output_token_seconds vllm:request_max_num_generation_tokens vllm:request_prefill_kv_computed_tokens
        sglang:uncached_prompt_tokens_histogram vllm:iteration_tokens_total vllm:request_params_n""",
}


PEERS = json.loads(Path(__file__).with_name("peer_metrics.json").read_text())


def scrape(tokenizer: Tokenizer, client: FakeClient, *dialects: str) -> str:
    app = create_app(client, tokenizer, server_config=ServerConfig(metrics_compat=",".join(dialects) or None))

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            await http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 9})
            await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 4, "stream": True, "regex": "[a-z]*"})
            await http.post("/v1/completions", json={"prompt": [5], "seed": 500})
            await http.post("/v1/completions", json={"prompt": [5], "seed": 429})
            client.engine.stats.running, client.engine.stats.pages_used = 3, 16
            client.engine.stats.pages_cached, client.engine.stats.waiting, client.engine.stats.waiting_for_pages = 8, 5, 2
            return (await http.get("/metrics")).text

    return asyncio.run(ask())


def samples(text: str) -> dict[str, float]:
    """`name{labels}`, the labels in order, → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_names_and_types_of_both(tokenizer: Tokenizer, client: FakeClient) -> None:
    text = scrape(tokenizer, client, "sglang", "vllm")
    kinds = {family.name: family.type for family in text_string_to_metric_families(text) if ":" in family.name}
    assert kinds == {name: kind for kind, names in KINDS.items() for name in names.split()}


def with_tiers(tokenizer: Tokenizer, client: FakeClient) -> str:
    client.engine.pretend_tiers()
    return scrape(tokenizer, client, "sglang", "vllm")


def test_every_name_of_the_peers_is_given_or_has_a_reason(tokenizer: Tokenizer, client: FakeClient) -> None:
    given = {family.name for family in text_string_to_metric_families(with_tiers(tokenizer, client))}
    left_out = [name for names in PEERS["left_out"].values() for name in names]
    assert len(set(left_out)) == len(left_out)
    assert {*PEERS["vllm"], *PEERS["sglang"]} - given == set(left_out)


@pytest.mark.parametrize("board", PEERS["boards"])
def test_what_published_boards_select_is_there(tokenizer: Tokenizer, client: FakeClient, board: str) -> None:
    found = [
        (sample.name, sample.labels.items())
        for family in text_string_to_metric_families(with_tiers(tokenizer, client))
        for sample in family.samples
    ]
    for selector in PEERS["boards"][board]:
        name, _, labels = selector.partition("{")
        wanted = set(re.findall(r'(\w+)="([^"]*)"', labels))
        assert any(name == sample and wanted <= set(items) for sample, items in found), selector


def test_n_is_counted_once_for_each_prompt(tokenizer: Tokenizer, client: FakeClient) -> None:
    app = create_app(client, tokenizer, server_config=ServerConfig(metrics_compat="vllm"))

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            await http.post("/v1/completions", json={"prompt": [[5, 6], [7]], "max_tokens": 2, "n": 3})
            await http.post("/generate", json={"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 2}})
            return (await http.get("/metrics")).text

    values = samples(asyncio.run(ask()))
    assert values[f"vllm:request_params_n_count{VLLM}"] == 4
    assert values[f"vllm:request_params_n_sum{VLLM}"] == 3 + 3 + 1 + 1


def test_tiers_below_the_device(tokenizer: Tokenizer, client: FakeClient) -> None:
    """Only where there are any: HiCache's names, and those of vLLM's offloading."""
    without = samples(scrape(tokenizer, client, "sglang", "vllm"))
    client.engine.pretend_tiers()
    values = samples(scrape(tokenizer, client, "sglang", "vllm"))

    def labelled(name: str, own: str, labels: str = SGLANG) -> str:
        return f"{name}{{" + ",".join(sorted([*labels[1:-1].split(","), own])) + "}"

    expected = {
        f"sglang:hicache_host_used_tokens{SGLANG}": 120 * 16,
        f"sglang:hicache_host_total_tokens{SGLANG}": 400 * 16,
        labelled("sglang:load_back_tokens_total", 'pool="kv"'): 40 * 16,
        labelled("sglang:hicache_backup_tokens_total", 'pool="kv"'): 150 * 16,
        labelled("sglang:hicache_dropped_tokens_total", 'pool="kv"'): 5 * 16,
        f"sglang:load_back_bytes_total{SGLANG}": 4e6,
        f"sglang:hicache_backup_bytes_total{SGLANG}": 15e6,
        f"sglang:prefetched_tokens_total{SGLANG}": 10 * 16,
        f"sglang:backuped_tokens_total{SGLANG}": 100 * 16,
        labelled("vllm:kv_offload_total_bytes_total", 'transfer_type="GPU_to_CPU"', VLLM): 15e6,
        labelled("vllm:kv_offload_total_bytes_total", 'transfer_type="CPU_to_GPU"', VLLM): 4e6,
        labelled("vllm:kv_offload_total_time_total", 'transfer_type="GPU_to_CPU"', VLLM): 0.0075,
        labelled("vllm:kv_offload_total_time_total", 'transfer_type="CPU_to_GPU"', VLLM): 0.001,
        f"vllm:kv_offload_load_bytes_total{VLLM}": 4e6,
        f"vllm:kv_offload_store_bytes_total{VLLM}": 15e6,
        f"vllm:kv_offload_load_time_total{VLLM}": 0.001,
        f"vllm:kv_offload_store_time_total{VLLM}": 0.0075,
    }
    assert {name: value for name, value in values.items() if name not in without} == expected


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_one_dialect_brings_its_own_names_and_no_others(tokenizer: Tokenizer, client: FakeClient, dialect: str) -> None:
    prefixes = {name.split(":")[0] for name in samples(scrape(tokenizer, client, dialect)) if ":" in name.split("{")[0]}
    assert prefixes == {dialect}


def test_without_a_dialect_there_are_our_names_alone(tokenizer: Tokenizer, client: FakeClient) -> None:
    assert all(name.startswith(("mtpserve_", "process_")) for name in samples(scrape(tokenizer, client)))


class Two(FakeClient):
    """Two engines, of which the second one has all requests."""

    @property
    def engines(self) -> list[EngineState]:
        other = EngineStats(pages_total=64, generation_tokens_total=7)
        return [EngineState(0, "up", 0, 0, "", other), EngineState(1, "up", 0, 0, "", self.stats())]

    def where(self, request_id: str) -> int:
        return 1


def test_vllms_metrics_are_by_engine_where_there_are_several(tokenizer: Tokenizer) -> None:
    one, two = samples(scrape(tokenizer, FakeClient(), "vllm")), samples(scrape(tokenizer, Two(), "vllm"))
    ours = {name: value for name, value in one.items() if name.startswith("vllm:") and "seconds" not in name}
    assert ours and {name: two[name.replace('engine="0"', 'engine="1"')] for name in ours} == ours
    first = {name: value for name, value in two.items() if name.startswith("vllm:") and 'engine="0"' in name}
    assert first.pop(f"vllm:generation_tokens_total{VLLM}") == 7
    assert {name.split("{")[0] for name, value in first.items() if value} == {"vllm:cache_config_info"}
    assert two['vllm:time_to_first_token_seconds_count{engine="1",model_name="fake"}'] == 3
    assert two['vllm:time_to_first_token_seconds_count{engine="0",model_name="fake"}'] == 0


def test_vllms_values(tokenizer: Tokenizer, client: FakeClient) -> None:
    values = samples(scrape(tokenizer, client, "vllm"))

    def with_label(name: str, label: str) -> str:
        return f"vllm:{name}{{" + ",".join(sorted([*VLLM[1:-1].split(","), label])) + "}"

    expected = {
        f"vllm:spec_decode_num_drafts_total{VLLM}": 9,
        f"vllm:spec_decode_num_draft_tokens_total{VLLM}": 18,
        f"vllm:spec_decode_num_accepted_tokens_total{VLLM}": 8,
        with_label("spec_decode_num_accepted_tokens_per_pos_total", 'position="0"'): 8,
        with_label("spec_decode_num_accepted_tokens_per_pos_total", 'position="1"'): 0,
        f"vllm:spec_decode_draft_acceptance_rate{VLLM}": 8 / 18,
        f"vllm:prompt_tokens_total{VLLM}": 5,
        f"vllm:generation_tokens_total{VLLM}": 9 + 4 + 4,
        f"vllm:num_requests_running{VLLM}": 3,
        f"vllm:num_requests_waiting{VLLM}": 5,
        with_label("num_requests_waiting_by_reason", 'reason="capacity"'): 3,
        with_label("num_requests_waiting_by_reason", 'reason="deferred"'): 2,
        f"vllm:iteration_tokens_total_count{VLLM}": 9,
        f"vllm:iteration_tokens_total_sum{VLLM}": 17,
        with_label("iteration_tokens_total_bucket", 'le="1.0"'): 0,
        with_label("iteration_tokens_total_bucket", 'le="8.0"'): 9,
        f"vllm:request_params_n_sum{VLLM}": 2,
        f"vllm:kv_cache_usage_perc{VLLM}": 0.25,
        f"vllm:gpu_cache_usage_perc{VLLM}": 0.25,
        f"vllm:time_per_output_token_seconds_count{VLLM}": 4 + 1 + 1,
        f"vllm:request_max_num_generation_tokens_sum{VLLM}": 13,
        'vllm:cache_config_info{block_size="16",engine="0",model_name="fake",num_gpu_blocks="64"}': 1,
        with_label("request_success_total", 'finished_reason="length"'): 2,
        with_label("request_success_total", 'finished_reason="error"'): 1,
        with_label("request_success_total", 'finished_reason="abort"'): 0,
        f"vllm:time_to_first_token_seconds_count{VLLM}": 3,
        f"vllm:inter_token_latency_seconds_count{VLLM}": 4 + 1 + 1,
        f"vllm:e2e_request_latency_seconds_count{VLLM}": 2,
        f"vllm:request_queue_time_seconds_sum{VLLM}": 2 * 0.25,
        f"vllm:request_prefill_time_seconds_sum{VLLM}": 2 * 0.5,
        f"vllm:request_generation_tokens_sum{VLLM}": 13,
        f"vllm:request_params_max_tokens_sum{VLLM}": 13,
    }
    assert {name: values[name] for name in expected} == expected
    inference, decode = (values[f"vllm:request_{what}_time_seconds_sum{VLLM}"] for what in ("inference", "decode"))
    assert inference == pytest.approx(1.0 + decode)


def test_positions_are_those_that_drafts_reach(tokenizer: Tokenizer, client: FakeClient) -> None:
    stats = client.engine.stats
    for reached, expected in ((0, 2), (4, 4)):
        stats.draft_tokens_per_position, stats.accepted_tokens_per_position = [1] * reached + [0] * (8 - reached), [0] * 8
        text = Metrics(client, ["vllm"]).text().decode()
        assert len(re.findall(r"^vllm:spec_decode_num_accepted_tokens_per_pos_total", text, re.MULTILINE)) == expected


def test_sglangs_values(tokenizer: Tokenizer, client: FakeClient) -> None:
    values = samples(scrape(tokenizer, client, "sglang"))

    def streaming(name: str, value: str) -> str:
        return f"sglang:{name}{{" + ",".join(sorted([*SGLANG[1:-1].split(","), f'is_streaming="{value}"'])) + "}"

    expected = {
        f"sglang:spec_accept_length{SGLANG}": 1 + 8 / 9,
        f"sglang:spec_accept_rate{SGLANG}": 8 / 18,
        f"sglang:spec_num_steps{SGLANG}": 2,
        f"sglang:spec_verify_calls_total{SGLANG}": 9,
        f"sglang:num_running_reqs{SGLANG}": 3,
        f"sglang:num_queue_reqs{SGLANG}": 5,
        f"sglang:token_usage{SGLANG}": 0.25,
        f"sglang:kv_used_tokens{SGLANG}": 256,
        f"sglang:kv_evictable_tokens{SGLANG}": 128,
        f"sglang:kv_available_tokens{SGLANG}": 640,
        f"sglang:max_total_num_tokens{SGLANG}": 1024,
        f"sglang:context_len{SGLANG}": 4096,
        f"sglang:num_so_requests_total{SGLANG}": 1,
        streaming("num_requests_total", "true"): 1,
        streaming("num_requests_total", "false"): 1,
        streaming("prompt_tokens_total", "false"): 3,
        streaming("generation_tokens_total", "true"): 4,
        f"sglang:inter_token_latency_seconds_count{SGLANG}": (9 - 2) + (4 - 2) + (4 - 2),
        f"sglang:queue_time_seconds_sum{SGLANG}": 3 * 0.25,
        f"sglang:e2e_request_latency_seconds_count{SGLANG}": 2,
    }
    assert {name: values[name] for name in expected} == expected
    assert values[f"sglang:gen_throughput{SGLANG}"] > 0


def test_vllm_bench_serve_finds_its_lines(tokenizer: Tokenizer, client: FakeClient) -> None:
    """That client reads /metrics by hand: lines that begin with vllm:spec_decode and whose name ends with _total."""
    found = {}
    for line in scrape(tokenizer, client, "vllm").splitlines():
        if line.startswith("vllm:spec_decode") and (name := re.split(r"[{ ]", line)[0]).endswith("_total"):
            found[name] = found.get(name, 0) + float(line.split()[-1])
    assert 1 + found["vllm:spec_decode_num_accepted_tokens_total"] / found["vllm:spec_decode_num_drafts_total"] == 1 + 8 / 9
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == found["vllm:spec_decode_num_accepted_tokens_total"]


@pytest.mark.parametrize("value", ["prometheus", "sglang,trt", "", ","])
def test_an_unknown_dialect_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--metrics-compat must be sglang, vllm or sglang,vllm, got {value!r}")):
        ServerConfig(metrics_compat=value)


def test_dialects_are_read_as_a_list() -> None:
    assert ServerConfig(metrics_compat="vllm, sglang,vllm").dialects == ("vllm", "sglang")
    assert ServerConfig().dialects == ()
