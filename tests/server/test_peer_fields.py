"""Fields that SGLang's and vLLM's users send reach the engine on every route or are refused by name; none is left out in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtpserve.config import EngineConfig, SchedulerConfig
from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.server.anthropic.messages_body import CountRequest, MessagesRequest
from mtpserve.server.app import create_app
from mtpserve.server.chat import bodies as openai
from mtpserve.server.openai.responses.response_body import ResponsesRequest
from mtpserve.server.schema.base import Strict
from mtpserve.server.schema.unsupported import LETTERS, REFUSED, TABLE
from mtpserve.server.sglang.generate_body import NativeRequest, NativeSampling
from mtpserve.server.tokens import DetokenizeRequest, TokenizeRequest
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.test_errors import error, send

USER = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
}
# A field, a value, and what the engine is asked for. The tokenizer's own temperature and top_p are others.
SAMPLED: list[tuple[str, Any, str, Any]] = [
    ("temperature", 0.5, "temperature", 0.5),
    ("top_p", 0.5, "top_p", 0.5),
    ("top_k", 7, "top_k", 7),
    ("min_p", 0.25, "min_p", 0.25),
    ("seed", 3, "seed", 3),
    ("stop", ["x"], "stop", ("x",)),
    ("stop_token_ids", [5], "stop_token_ids", (5,)),
    ("ignore_eos", True, "ignore_eos", True),
    ("include_stop_str_in_output", True, "include_stop", True),
    ("no_stop_trim", True, "include_stop", True),
    ("skip_special_tokens", False, "skip_special_tokens", False),
    ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
    ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
    ("presence_penalty", 0.5, "presence_penalty", 0.5),
    ("logit_bias", {"5": 1.0}, "logit_bias", {5: 1.0}),
    ("allowed_token_ids", [5], "allowed_token_ids", (5,)),
    ("bad_words", ["x"], "bad_words", ("x",)),
    ("min_tokens", 2, "min_tokens", 2),
    ("speculative", {"enabled": False}, "speculation", Speculation(enabled=False)),
    ("prediction", {"type": "content", "content": "x"}, "speculation", Speculation(prediction="x")),
]


def sampled(http: httpx.AsyncClient, client: FakeClient, route: str, **fields: Any) -> SamplingParams:
    response = send(http, "POST", route, json=BODIES[route] | fields)
    assert response.status_code == 200, response.text
    return client.submitted[-1].sampling


@pytest.mark.parametrize("route", BODIES)
def test_every_conversation_takes_the_same_sampling(http: httpx.AsyncClient, client: FakeClient, route: str) -> None:
    elsewhere = {"custom_params", "priority", "cache_salt", "extra_key", "thinking_token_budget"}
    assert {name for name, *_ in SAMPLED} == openai.SamplingFields.model_fields.keys() - elsewhere
    plain = sampled(http, client, route)
    for name, value, parameter, asked in SAMPLED:
        assert getattr(plain, parameter) != asked
        assert getattr(sampled(http, client, route, **{name: value}), parameter) == asked, name


@pytest.mark.parametrize("route", [*BODIES, "/generate"])
def test_priority_needs_its_policy(tokenizer: Tokenizer, client: FakeClient, route: str) -> None:
    body = BODIES.get(route, {"text": "a"}) | {"priority": 3}
    for policy in ("fcfs", "priority"):
        config = EngineConfig(scheduler=SchedulerConfig(scheduling_policy=policy))
        transport = httpx.ASGITransport(create_app(client, tokenizer, config))
        response = send(httpx.AsyncClient(transport=transport, base_url="http://test"), "POST", route, json=body)
        if policy == "fcfs":
            assert response.status_code == 400 and "--scheduling-policy" in response.text and not client.submitted
    assert [request.sampling.priority for request in client.submitted] == [3]


PEERS = json.loads(Path(__file__).with_name("peer_fields.json").read_text())
# They label a request, say who logs or routes it, or how pictures travel which no request can have: no answer depends on them.
CHANGES_NOTHING = {
    "betas", "conversation_id", "custom_labels", "external_trace_header", "kv_hints", "log_metrics", "media_io_kwargs", "mm_payload",
    "mm_processor_kwargs", "no_logs", "received_time", "return_flat_raw_top_logprobs_b64", "return_mm_kwargs", "routing_key", "session_id",
}  # fmt: skip
CLASSES: dict[str, type[Strict]] = {
    "/v1/completions": openai.CompletionRequest,
    "/v1/chat/completions": openai.ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/generate": NativeRequest,
}
BY_COLUMN: dict[str, type[Strict]] = {
    "completions": openai.CompletionRequest,
    "chat": openai.ChatRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "generate": NativeRequest,
    "sampling_params": NativeSampling,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}


@pytest.mark.parametrize("route", CLASSES)
def test_what_asks_for_something_that_is_not_done_is_refused(http: httpx.AsyncClient, client: FakeClient, route: str) -> None:
    column = CLASSES[route].column
    assert column is not None
    body = BODIES.get(route, {"text": "a"})
    for name in REFUSED[column]:
        found = error(send(http, "POST", route, json=body | {name: {"some": "thing"}}), 400)
        assert (found["param"], found["code"]) == (name, "unsupported_parameter")
    assert not client.submitted


def test_the_table_refuses_no_field_that_a_body_has() -> None:
    for cls in (*CLASSES.values(), NativeSampling, CountRequest):
        assert cls.column is not None
        assert REFUSED[cls.column].keys() & cls.model_fields.keys() == set(), cls


def test_the_table_has_each_field_once_in_a_column() -> None:
    fields = [(letter, name) for columns, _, names in TABLE for letter in columns.replace(".", "") for name in names.split()]
    assert len(set(fields)) == len(fields) == sum(len(refused) for refused in REFUSED.values())
    for columns, neutral, _ in TABLE:
        assert [letter in (".", place) for letter, place in zip(columns, LETTERS.values(), strict=True)] == [True] * len(LETTERS)
        assert neutral[0] is None


@pytest.mark.parametrize("peer", ["vllm", "sglang"])
@pytest.mark.parametrize(("route", "cls"), BY_COLUMN.items())
def test_no_field_of_the_peers_is_unheard_of(peer: str, route: str, cls: type[Strict]) -> None:
    refused = REFUSED[cls.column] if cls.column is not None else {}
    unknown = set(PEERS[peer][route]) - cls.model_fields.keys() - refused.keys()
    assert unknown <= CHANGES_NOTHING


def test_a_prompt_is_truncated_on_either_side(http: httpx.AsyncClient, client: FakeClient) -> None:
    prompt = {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2}
    for side in (None, "left", "right"):
        assert send(http, "POST", "/v1/completions", json=prompt | {"truncation_side": side}).status_code == 200
    assert [request.prompt for request in client.submitted] == [[7, 8], [7, 8], [5, 6]]


@pytest.mark.parametrize(("fields", "effort", "shown"), [
    ({"reasoning_effort": "low"}, "low", True),
    ({"reasoning": {"effort": "high"}}, "high", True),
    ({"reasoning": {"effort": "high"}, "reasoning_effort": "low"}, "low", True),
    ({"reasoning": {"enabled": False}}, "none", True),
    ({"reasoning": {"exclude": True}}, None, False),
    ({"include_reasoning": False}, None, False),
    ({"thinking": {"type": "disabled"}}, "none", True),
    ({"thinking": {"type": "disabled"}, "reasoning": {"enabled": True}}, None, True),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, None, True),
    ({}, None, True),
])  # fmt: skip
def test_how_reasoning_is_asked_for(fields: dict[str, Any], effort: str | None, shown: bool) -> None:
    body = openai.ChatRequest(messages=USER, **fields)
    assert (body.effort, body.shows_reasoning) == (effort, shown)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(("route", "fields"), [
    ("/v1/messages", {"output_config": {"format": FORMAT}}),
    ("/v1/messages", {"output_format": FORMAT}),
    ("/v1/responses", {"text": {"format": FORMAT | {"name": "a"}}}),
    ("/v1/responses", {"structured_outputs": {"json": SCHEMA}}),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
])  # fmt: skip
def test_a_schema_for_the_answer(http: httpx.AsyncClient, client: FakeClient, route: str, fields: dict[str, Any]) -> None:
    grammar = sampled(http, client, route, **fields).grammar
    assert grammar is not None and grammar.kind == "json_schema" and '"integer"' in grammar.text


def test_output_config_of_messages(http: httpx.AsyncClient) -> None:
    body = MessagesRequest(messages=USER, max_tokens=1, output_config={"effort": "high"}, chat_template_kwargs={"thinking": True})
    chat = body.chat(body.offer())
    assert (chat.effort, chat.chat_template_kwargs) == ("high", {"thinking": True})
    for config in ({"format": {"type": "text"}}, {"effort": "much"}):
        found = error(send(http, "POST", "/v1/messages", json=BODIES["/v1/messages"] | {"output_config": config}), 400)
        assert (found["param"] or found["message"]).startswith("output_config")
