"""The prefix cache over HTTP: who shares with whom, what usage and metrics say, how it is emptied; over a fake engine that has one."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mtpserve.server.observe.metrics import Metrics
from mtpserve.server.schema.base import Salted
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.server.test_dialects import SGLANG, VLLM, samples
from tests.server.test_errors import error, send
from tests.server.test_messages import named

PROMPT = [5 + i % 200 for i in range(40)]  # two whole pages and a part of one
FOUND = 32
WORDS = "import os and then some more words than a page has tokens for"
USER = [{"role": "user", "content": WORDS}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": WORDS},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": WORDS, "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/generate": {"text": WORDS},
}


def cached(route: str, answer: dict[str, Any]) -> tuple[int, int]:
    """→ cached tokens of the prompt, and all of them."""
    usage = answer["meta_info"] if route == "/generate" else answer["usage"]
    match route:
        case "/generate":
            return usage["cached_tokens"], usage["prompt_tokens"]
        case "/v1/messages":
            assert usage["cache_creation_input_tokens"] == 0
            return usage["cache_read_input_tokens"], usage["cache_read_input_tokens"] + usage["input_tokens"]
        case "/v1/responses":
            return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def asked(http: httpx.AsyncClient, route: str, **fields: Any) -> tuple[int, int]:
    response = send(http, "POST", route, json=BODIES[route] | fields)
    assert response.status_code == 200, response.text
    return cached(route, response.json())


@pytest.mark.parametrize("route", BODIES)
def test_a_prompt_is_found_again_by_those_with_its_salt(http: httpx.AsyncClient, client: FakeClient, route: str) -> None:
    none, tokens = asked(http, route)
    found, same = asked(http, route)
    assert (none, tokens) == (0, same) and tokens - 16 <= found < tokens and found >= 16
    for fields in ({"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "b"}, {"cache_salt": "ab"}):
        assert asked(http, route, **fields)[0] == 0 and asked(http, route, **fields)[0] == found, fields
    assert asked(http, route, extra_key="")[0] == found
    half = json.dumps(BODIES[route] | {"cache_salt": "\ud800"})  # JSON can hold half a character
    answer = send(http, "POST", route, content=half, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), answer.text
    assert [request.salt == "" for request in client.submitted] == [True] * 2 + [False] * 8 + [True] + [False] * (answer.status_code == 200)
    refused = error(send(http, "POST", route, json=BODIES[route] | {"cache_salt": ""}), 400)
    assert "cache_salt" in refused["message"]


def test_no_two_pairs_of_salts_are_one() -> None:
    """Where a gateway sets one and its clients the other, nobody reaches another's pages by the way that they are joined."""
    values = (None, "a", "b", "ab", "a, b", '["a", "b"]', '", "')
    salts = [Salted.model_construct(cache_salt=one, extra_key=other).salt for one in values for other in values]
    assert len(set(salts)) == len(values) ** 2


@pytest.mark.parametrize(("method", "path"), [("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/reset_prefix_cache")])
def test_it_is_emptied(http: httpx.AsyncClient, method: str, path: str) -> None:
    found = [asked(http, "/v1/completions")[0] for _ in range(2)]
    assert found[1] > found[0] == 0
    assert send(http, method, path).json() == {"success": True, "message": "the prefix cache is empty"}
    assert [asked(http, "/v1/completions")[0] for _ in range(2)] == found


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_counts_once_with_what_its_first_choice_found(http: httpx.AsyncClient, client: FakeClient, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}

    def found(*prompts: list[int]) -> list[int]:
        body = {"prompt": list(prompts), "n": 3, "max_tokens": 4, "stream": stream} | options
        answer = send(http, "POST", "/v1/completions", json=body)
        objects = events(answer)[:-1] if stream else [answer.json()]
        assert {each["usage"]["prompt_tokens"] for each in objects} == {sum(map(len, prompts))}
        return [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in objects]

    assert set(found(PROMPT)) == {0}  # though its other choices found it
    assert client.engine.stats.cached_prompt_tokens_total == 2 * FOUND
    counts = found(PROMPT, PROMPT[:20], [9] * 20)
    assert counts[-1] == FOUND + 16 and counts == sorted(counts)
    assert found(PROMPT[:32])[-1] == 31  # its last token is computed: what follows it is unknown


def test_a_stream_of_generate_says_it_of_each_choice(http: httpx.AsyncClient) -> None:
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 4, "n": 2}}
    chunks = events(send(http, "POST", "/generate", json=body))[:-1]
    assert {(chunk["index"], chunk["meta_info"]["cached_tokens"]) for chunk in chunks} == {(0, 0), (1, FOUND)}


def test_messages_say_it_at_their_start_and_end(http: httpx.AsyncClient) -> None:
    """Blocks, tools and the whole request may be marked for the cache; all is cached, marked or not."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1", **mark}], **mark}
    body = BODIES["/v1/messages"] | mark | {
        "system": [{"type": "text", "text": "be brief", **mark}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}, **mark}],
        "tool_choice": {"type": "none"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": WORDS, **mark}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}, **mark}]},
            {"role": "user", "content": [result]},
        ],
    }  # fmt: skip
    first, second = (named(send(http, "POST", "/v1/messages", json=body | {"stream": True}).text) for _ in range(2))
    start, end = first[0][1]["message"]["usage"], first[-2][1]["usage"]
    assert start == end | {"output_tokens": 0} and start["cache_read_input_tokens"] == 0
    again, ended = second[0][1]["message"]["usage"], second[-2][1]["usage"]
    assert again == ended | {"output_tokens": 0} and again["cache_read_input_tokens"] > 0
    assert again["input_tokens"] + again["cache_read_input_tokens"] == start["input_tokens"]


def test_a_prompt_that_is_scored_alone_says_what_was_found(http: httpx.AsyncClient) -> None:
    asked(http, "/v1/completions")
    assert asked(http, "/v1/completions", echo=True, max_tokens=0)[0] > 0
    assert asked(http, "/v1/completions", echo=True, max_tokens=0, logprobs=1)[0] == 0


def test_the_metrics(http: httpx.AsyncClient, client: FakeClient) -> None:
    metrics = http._transport.app.state.service.metrics = Metrics(client, ["sglang", "vllm"])  # type: ignore[attr-defined]
    assert "recent_cached" not in metrics.text().decode() and "cache_hit_rate" not in metrics.text().decode()
    for _ in range(4):
        send(http, "POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
    values = samples(metrics.text().decode())
    expected = {
        'mtpserve_cached_prompt_tokens_total{model_name="fake"}': 3 * FOUND,
        'mtpserve_prompt_tokens_total{model_name="fake"}': 160,
        'mtpserve_recent_cached_prompt_ratio{model_name="fake"}': 0.6,
        'mtpserve_kv_pages_cached{model_name="fake"}': 2,
        f"sglang:cache_hit_rate{SGLANG}": 0.6,
        "sglang:cached_tokens_total{" + ",".join(sorted([*SGLANG[1:-1].split(","), 'cache_source="device"'])) + "}": 3 * FOUND,
        f"sglang:kv_evictable_tokens{SGLANG}": FOUND,
        f"sglang:uncached_prompt_tokens_histogram_sum{SGLANG}": 160 - 3 * FOUND,
        f"vllm:prompt_tokens_cached_total{VLLM}": 3 * FOUND,
        f"vllm:prefix_cache_queries_total{VLLM}": 160,
        f"vllm:prefix_cache_hits_total{VLLM}": 3 * FOUND,
        f"vllm:request_prefill_kv_computed_tokens_sum{VLLM}": 160 - 3 * FOUND,
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="fake",source="local_compute"}': 160 - 3 * FOUND,
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="fake",source="local_cache_hit"}': 3 * FOUND,
    }
    assert {name: values[name] for name in expected} == expected


def test_the_server_says_of_it(http: httpx.AsyncClient) -> None:
    asked(http, "/generate"), asked(http, "/generate")
    said = send(http, "GET", "/server_info").json()
    assert said["disable_radix_cache"] is False
    state = said["internal_states"][0]
    assert 0 < state["cached_prompt_tokens_total"] < state["prompt_tokens_total"] and state["pages_cached"] > 0
