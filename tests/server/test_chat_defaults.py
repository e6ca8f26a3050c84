"""Chats of a model for which nobody names any sampling; completions and token APIs keep the raw distribution."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASKED = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: ASKED,
    MESSAGES: ASKED | {"model": "fake"},
    RESPONSES: {"max_output_tokens": 4, "input": "hello"},
}


@pytest.fixture
def tokenizer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Of a checkpoint that names nothing."""
    monkeypatch.setattr(tokenizer, "defaults", {})
    return tokenizer


GENERAL = (0.7, 0.95, 0, 0.05)
RAW = (1.0, 1.0, 0, 0.0)


def laws(client: FakeClient, tokenizer: Tokenizer, requests: list[tuple[str, dict[str, Any]]], **model: Any) -> tuple[list[Any], Any]:
    """What each request is sampled with, and the model that /v1/models lists."""
    app = create_app(client, tokenizer, EngineConfig(model=ModelConfig(**model)))

    async def ask() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            for route, body in requests:
                assert (await http.post(route, json=body)).status_code == 200
            stats = (await http.get("/stats")).json()["default_sampling"]
            listed = (await http.get("/v1/models")).json()["data"][0]["default_sampling"]
            assert listed == stats, "the page's and the API's"
            return listed

    listed = asyncio.run(ask())
    found = [request.sampling for request in client.submitted]
    return [(each.temperature, each.top_p, each.top_k, each.min_p) for each in found], listed


@pytest.mark.parametrize("route", BODIES)
def test_each_chat_api_has_the_general_values(client: FakeClient, tokenizer: Tokenizer, route: str) -> None:
    asked = [(route, BODIES[route]), (route, BODIES[route] | {"temperature": 0.9}), (route, BODIES[route] | {"top_p": 0.5})]
    found, listed = laws(client, tokenizer, asked)
    assert found == [GENERAL, (0.9, 1.0, 0, 0.0), (1.0, 0.5, 0, 0.0)], "a request that names a part of its law gets no part of another"
    assert listed == {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.05, "source": "mtpserve"}


def test_other_fields_are_no_law(client: FakeClient, tokenizer: Tokenizer) -> None:
    assert laws(client, tokenizer, [(CHAT, ASKED | {"seed": 3, "presence_penalty": 0.5, "temperature": None})])[0] == [GENERAL]


def test_completions_and_token_apis_keep_the_raw_law(client: FakeClient, tokenizer: Tokenizer) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
        ("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}),
    ]
    assert laws(client, tokenizer, asked)[0] == [RAW, RAW]


def test_a_published_model_has_its_cards_values(client: FakeClient, tokenizer: Tokenizer) -> None:
    found, listed = laws(client, tokenizer, [(CHAT, ASKED)], model="demo", served_model_name=("SmolLM2-135M-Instruct",))
    assert found == [(0.2, 0.9, 0, 0.0)]
    assert (listed["temperature"], listed["source"]) == (0.2, "model card")


@pytest.mark.parametrize("name", ["vllm", "openai"])
def test_the_raw_law_is_an_option(client: FakeClient, tokenizer: Tokenizer, name: str) -> None:
    found, listed = laws(client, tokenizer, [(CHAT, ASKED)], sampling_defaults=name)
    assert found == [RAW]
    assert listed == json.loads('{"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "source": "raw"}')


def test_the_log_says_it_in_the_line_of_the_formats(client: FakeClient, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mtpserve"):
        laws(client, tokenizer, [])
    lines = [record.getMessage() for record in caplog.records if "tool calls" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith("; chats: temperature 0.7, top_p 0.95, min_p 0.05 (neither checkpoint nor model card says)")
