"""A thinking budget in the words of vLLM, SGLang, Anthropic, DeepSeek and OpenRouter, as the engine gets it."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from mtpserve.config import ServerConfig
from mtpserve.core.sampling import ThinkingBudget
from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.server.speaking import SpeakingClient, checkpoint

USER = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 50}
SPELLINGS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"thinking_token_budget": 7}),
    ("/v1/chat/completions", CHAT | {"thinking": {"type": "enabled", "budget_tokens": 7}}),
    ("/v1/chat/completions", CHAT | {"reasoning": {"max_tokens": 7}}),
    ("/v1/chat/completions", CHAT | {"custom_params": {"thinking_budget": 7}}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 50, "thinking_token_budget": 7}),
    ("/v1/messages", CHAT | {"thinking": {"type": "enabled", "budget_tokens": 7}}),
    ("/v1/completions", {"prompt": "<think>", "max_tokens": 50, "thinking_token_budget": 7}),
    ("/generate", {"text": "<think>", "sampling_params": {"max_new_tokens": 50, "custom_params": {"thinking_budget": 7}}}),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("budgets")))


def budget(tokenizer: Tokenizer, route: str, body: dict[str, Any], reasoning: str = "qwen3") -> ThinkingBudget | None:
    client = SpeakingClient(tokenizer, ["<think>so</think>yes"])
    app = create_app(client, tokenizer, server_config=ServerConfig(reasoning_parser=reasoning))
    with TestClient(app) as http:
        answer = http.post(route, json={"model": "default", **body})
    assert answer.status_code == 200, answer.text
    sampling = client.submitted[-1].sampling
    assert sampling.thinking_token_budget is None  # the grammar has it now
    return None if sampling.grammar is None else sampling.grammar.thinking


@pytest.mark.parametrize(("route", "body"), SPELLINGS)
def test_each_spelling_is_a_limit_in_the_grammar(tokenizer: Tokenizer, route: str, body: dict[str, Any]) -> None:
    is_open = "messages" not in body and "input" not in body
    closing_ids = tuple(tokenizer.encode("</think>", special=False))
    assert budget(tokenizer, route, body) == ThinkingBudget(7, "<think>", "</think>", closing_ids, is_open)
    assert budget(tokenizer, route, body, "none") is None  # no reasoning is known: nothing is limited


def test_the_answer_s_own_constraint_stays(tokenizer: Tokenizer) -> None:
    client = SpeakingClient(tokenizer, ["<think>so</think>{}"])
    app = create_app(client, tokenizer, server_config=ServerConfig(reasoning_parser="openai_gptoss"))
    body = CHAT | {"thinking_token_budget": 3, "response_format": {"type": "json_object"}}
    with TestClient(app) as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    grammar = client.submitted[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "json_object" and "analysis" in grammar.front and grammar.thinking is not None
    ids, marker = grammar.thinking.closing_ids, tokenizer.marker_id("<|start|>")
    assert marker in ids and tokenizer.decode(ids, skip_special_tokens=False) == "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_a_budget_that_cannot_be_reached_costs_nothing(tokenizer: Tokenizer) -> None:
    assert budget(tokenizer, "/v1/chat/completions", CHAT | {"thinking_token_budget": 50}) is None


@pytest.mark.parametrize("value", [-1, "many", True, 1.5])
def test_a_bad_budget_is_named(tokenizer: Tokenizer, value: object) -> None:
    app = create_app(SpeakingClient(tokenizer, ["x"]), tokenizer, server_config=ServerConfig(reasoning_parser="qwen3"))
    with TestClient(app) as http:
        for field in ({"thinking_token_budget": value}, {"custom_params": {"thinking_budget": value}}):
            answer = http.post("/v1/chat/completions", json=CHAT | field)
            assert answer.status_code == 400 and "budget" in answer.json()["error"]["message"], answer.text
