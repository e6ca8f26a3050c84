"""Acceptance from /metrics: each server's names, differences, several engines; and that ours are the names that our server exports."""

from __future__ import annotations

import pytest

from mtpserve.server.observe.metrics import Metrics
from mtpserve.tools.bench.exported import SETS, ServerCounters, read_counters
from tests.server.fake_client import FakeClient

VLLM = """# HELP vllm:generation_tokens_total x
vllm:generation_tokens_total{{engine="0"}} {tokens}
vllm:prompt_tokens_total{{engine="0"}} 100.0
vllm:prefix_cache_hits_total{{engine="0"}} 25.0
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="1"}} 0.0
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {proposed}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1",engine="0"}} 2.0
"""
SGLANG = """sglang:spec_verify_calls_total{{tp_rank="0"}} {verified}
sglang:generation_tokens_total{{is_streaming="true"}} {tokens}
sglang:num_requests_total{{is_streaming="true"}} 10.0
sglang:prompt_tokens_total{{is_streaming="true"}} 50
sglang:cached_tokens_total{{cache_source="device"}} 20
"""


def test_vllms_names() -> None:
    before = read_counters(VLLM.format(tokens=5, drafts=1, proposed=3, accepted=2, first=1))
    after = read_counters(VLLM.format(tokens=65, drafts=21, proposed=63, accepted=32, first=17))
    assert before is not None and after is not None
    run = after.since(before)
    assert (run.server, run.generated, run.verifications, run.length, run.rate) == ("vLLM", 60, 20, 2.5, 0.5)
    assert run.rates_at == (0.8, 0.0) and run.prompt == 0
    made = run.as_json()
    assert made["spec_decode_acceptance_rate"] == 50 and made["accept_length"] == made["spec_decode_acceptance_length"] == 2.5


def test_sglangs_length_follows_from_what_it_counts() -> None:
    found = read_counters(SGLANG.format(verified=100, tokens=260))
    assert found is not None and (found.length, found.rate, found.rates_at, found.cached) == (2.5, None, (), 20)


def test_a_position_that_is_new() -> None:
    def counters(*accepted: float) -> ServerCounters:
        return ServerCounters("x", 10, 30, sum(accepted), accepted, tuple(2 * each for each in accepted), 0, None, 0)

    run = counters(5, 4, 3).since(counters(1))
    assert run.accepted_at == (4, 4, 3) and run.rates_at == (0.5, 0.5, 0.5) and run.cached is None


@pytest.mark.parametrize("text", ["", "process_cpu_seconds_total 3\n", "<html>"])
def test_servers_without_counters(text: str) -> None:
    assert read_counters(text) is None


def test_without_drafts_there_is_nothing_to_say() -> None:
    found = read_counters(VLLM.format(tokens=5, drafts=0, proposed=0, accepted=0, first=0))
    assert found is not None and (found.length, found.rate, found.rates_at) == (None, None, ())
    assert "accept_length" not in found.as_json()


def test_llama_cpps_names() -> None:
    text = "llamacpp:tokens_predicted_total 9\nllamacpp:prompt_tokens_total 4\nllamacpp:spec_decode_num_drafts_total 2\n"
    found = read_counters(text + "llamacpp:spec_decode_num_draft_tokens_total 6\nllamacpp:spec_decode_num_accepted_tokens_total 3\n")
    assert found is not None and (found.server, found.length, found.cached) == ("llama.cpp", 2.5, None)


@pytest.mark.parametrize("dialect", ["mtpserve", "vLLM", "SGLang"])
def test_our_server_exports_these_names(dialect: str) -> None:
    names = next(names for names in SETS if names.server == dialect)
    text = Metrics(FakeClient(), [] if dialect == "mtpserve" else [dialect.lower()]).text().decode()
    wanted = {
        names.verifications,
        names.proposed,
        names.accepted,
        names.accepted_at,
        names.prompt,
        names.cached,
        names.generated,
        names.requests,
    }
    assert [name for name in wanted - {None} if f"\n{name}" not in text and f"# TYPE {str(name).removesuffix('_total')}" not in text] == []
