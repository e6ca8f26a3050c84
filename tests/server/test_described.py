"""Every route answers what the OpenAPI document says, in every form that a request can ask for."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI

from mtpserve.config import ServerConfig
from mtpserve.server.app import ROUTES, create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.speaking import SpeakingClient, checkpoint
from tests.server.test_tools import CALL, CITY

USER = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
SAID = f"<think>hm</think>Let me see. {CALL}"
TOLD = [{"name": "get_weather", "input_schema": {}}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_spec_trace": True}),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 3}),
    (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_spec_trace": True},
    ),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 900, "tools": TOOLS}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
    (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 900, "tools": [{"type": "function", "name": "get_weather"}], "metadata": {"a": "b"}},
    ),
    ("/v1/messages", {"messages": USER, "max_tokens": 3}),
    ("/v1/messages", {"messages": USER, "max_tokens": 900, "tools": TOLD, "stop_sequences": ["zzz"]}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4}}),
    ("/generate", {"text": ["a"], "sampling_params": {"max_new_tokens": 9, "stop": "c"}, "return_logprob": True, "logprob_start_len": 0}),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/v1/tokenize", {"prompt": ["a", "b"], "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/detokenize", {"tokens": [[5], [6]]}),
    ("/parse_function_call", {"text": SAID, "tools": TOOLS}),
    ("/separate_reasoning", {"text": SAID}),
    ("/flush_cache", {}),
    ("/abort_request", {"rid": "a"}),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("described")))


def conforming(app: FastAPI, method: str, path: str, body: Any = None, route: str | None = None) -> httpx.Response:
    """The answer, which is as the document says; `route` where the path has a value in it."""

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.request(method, path, json=body)

    response, document = asyncio.run(ask()), app.openapi()
    assert response.status_code == 200, response.text
    told = document["paths"][route or path][method.lower()]["responses"]["200"]["content"]
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in told
    if kind == "application/json":
        schema = told[kind]["schema"]
        assert schema.keys() & {"$ref", "anyOf"}, "which says something"
        jsonschema.validate(response.json(), {**schema, "components": document["components"]})
        assert unknown(response.json(), schema, document["components"]["schemas"]) == []
    return response


def unknown(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    """Fields of objects that the document does not know."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rsplit("/", 1)[1]]
    options = [*schema.get("anyOf", []), schema]
    if isinstance(value, list):
        inner = next((option["items"] for option in options if "items" in option), {})
        return [name for each in value for name in unknown(each, inner, schemas)]
    known = next((schemas[o["$ref"].rsplit("/", 1)[1]] if "$ref" in o else o for o in options if {"$ref", "properties"} & o.keys()), None)
    if not isinstance(value, dict) or known is None or "And every launch option" in known.get("description", ""):
        return []
    fields = known["properties"]
    return [*(value.keys() - fields.keys()), *(n for name, each in value.items() for n in unknown(each, fields.get(name, {}), schemas))]


@pytest.mark.parametrize("speaks", [False, True])
def test_answers_are_as_the_document_says(tokenizer: Tokenizer, speaks: bool) -> None:
    client = SpeakingClient(tokenizer, [SAID]) if speaks else FakeClient()
    app = create_app(client, tokenizer, server_config=ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"))
    found = set()
    for path, body in ASKED:
        if speaks and ("prompt_logprobs" in body or body.get("return_logprob") or body.get("echo")):
            continue  # this one scores no prompts
        response = conforming(app, "POST", path, body)
        found.add(path)
        if path == "/v1/responses":
            place, route = f"{path}/{response.json()['id']}", path + "/{id}"
            conforming(app, "GET", place, route=route)
            conforming(app, "DELETE", place, route=route)
    if not speaks:
        assert found == {path for method, paths, *_ in ROUTES for path in paths if method == "POST" and "{" not in path}
        for method, paths, *_ in ROUTES:
            for path in paths:
                if method == "GET" and "responses" not in path:
                    route = path.replace(":path", "")
                    conforming(app, "GET", route.replace("{id}", "fake"), route=route)


def test_a_field_that_is_not_described_would_be_seen(tokenizer: Tokenizer) -> None:
    schemas = create_app(FakeClient(), tokenizer).openapi()["components"]["schemas"]
    listed = {"anyOf": [{"$ref": "#/components/schemas/Generated"}, {"items": {"$ref": "#/components/schemas/Generated"}, "type": "array"}]}
    assert unknown([{"text": "", "meta_info": {"new": 1}}, {"more": 1}], listed, schemas) == ["new", "more"]
