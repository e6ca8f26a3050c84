"""Whatever JSON a client sends, the answer is one of the documented ones, and never 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, strategies as st

from mtpserve.config import ServerConfig
from mtpserve.server.app import ROUTES, create_app
from mtpserve.server.schema.unsupported import REFUSED
from mtpserve.text.tokenizer import Tokenizer
from tests import selection
from tests.server.fake_client import FakeClient
from tests.server.fake_engine import VOCAB
from tests.server.test_errors import error

EDGES = [0, 1, 16, VOCAB - 1, VOCAB, 2**63, 10**30, -1, "user", "assistant", "function", "required", "auto", "object", "", "\ud800", "\x00"]
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "include_usage", "function", "name", "parameters", "properties", "tool_calls", "arguments"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(EDGES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 3}},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/responses/compact": {"model": "default", "input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/spec": {"num_steps": 1},
    "/abort_request": {"abort_all": True},
    "/start_profile": {},
    "/pause_generation": {},
    "/continue_generation": {},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 3}},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/unload_lora_adapter": {"lora_name": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/update_weights_from_disk": {"model_path": "a"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AAAA"]},
    "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2]]},
    "/init_weights_update_group": {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2},
    "/destroy_weights_update_group": {},
    "/get_weights_by_name": {"name": "a"},
    "/weights_checker": {},
    "/update_weight_version": {"new_version": "a"},
    "/parse_function_call": {"text": "a", "tools": []},
    "/separate_reasoning": {"text": "a"},
}


@pytest.fixture
def app(client: FakeClient, tokenizer: Tokenizer) -> FastAPI:
    """That knows how calls are written: else most requests with tools end at once."""
    return create_app(client, tokenizer, server_config=ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"))


def post(app: FastAPI, path: str, fields: dict[str, Any]) -> httpx.Response:
    stats = app.state.service.client.engine.stats
    stats.paused = stats.sleeping = 0  # an earlier example may have left it so

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=True), base_url="http://test") as http:
            content = json.dumps(GOOD[path] | fields).encode()
            return await http.post(path, content=content, headers={"content-type": "application/json"})

    return asyncio.run(ask())


def check(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert response.status_code in (400, 404, 408), response.text  # 408: a timeout of its own
        error(response, response.status_code)


def typed(schema: dict[str, Any], schemas: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of the type that the document promises to take, of any size."""
    if "$ref" in schema:
        return typed(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    if "anyOf" in schema:
        return st.one_of([typed(one, schemas) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(-2, 5) | st.integers() | st.sampled_from([VOCAB, 2**63, 10**30])
        case "number":
            return st.floats(-2, 3) | st.floats() | st.integers()
        case "string":
            return st.text(max_size=8) | st.sampled_from(["user", "text", "content", "mine", "a" * 300, "\ud800"])
        case "array":
            return st.lists(typed(schema.get("items", {}), schemas), max_size=4)
        case "object" if "properties" in schema:
            return st.fixed_dictionaries({}, optional={name: typed(one, schemas) for name, one in schema["properties"].items()})
        case "object":
            inner = schema.get("additionalProperties")
            return st.dictionaries(st.sampled_from(["type", "a", "7"]), typed(inner, schemas) if isinstance(inner, dict) else ANYTHING)
    return ANYTHING


def bodies(app: FastAPI, path: str) -> dict[str, st.SearchStrategy[Any]]:
    document = app.openapi()
    schemas = document["components"]["schemas"]
    taken = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    reference = taken.get("anyOf", [taken])[0]["$ref"]  # a body may be left out
    return {name: typed(schema, schemas) for name, schema in schemas[reference.rsplit("/", 1)[1]]["properties"].items()}


def test_every_body_is_covered() -> None:
    assert {paths[0] for _, paths, endpoint, _ in ROUTES if "body" in endpoint.__annotations__} == GOOD.keys()


EXAMPLES = selection.examples(250)


@EXAMPLES
@given(st.data(), st.sampled_from(sorted(GOOD)))
def test_no_json_is_a_server_error(app: FastAPI, data: st.DataObject, path: str) -> None:
    names = st.sampled_from(sorted({*bodies(app, path), *(name for fields in REFUSED.values() for name in fields)}))
    check(post(app, path, data.draw(st.dictionaries(names, ANYTHING, max_size=3))))


@EXAMPLES
@given(st.data(), st.sampled_from(sorted(GOOD)))
def test_no_values_of_the_right_types_are_a_server_error(app: FastAPI, data: st.DataObject, path: str) -> None:
    fields = bodies(app, path)
    chosen = data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True))
    check(post(app, path, {name: data.draw(fields[name]) for name in chosen}))


SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["string", "object", "#/$defs/a", "array", "", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "a", "$ref", "$defs", "anyOf", "enum", "const", "required", "pattern", "not"]), inner
        )
    ),
    max_leaves=10,
)


@selection.examples(200)
@given(st.sampled_from(["hermes", "qwen3_coder", "glm45", None]), st.lists(SCHEMAS, min_size=1, max_size=2), st.booleans(), st.booleans())
def test_no_schema_of_a_tool_is_a_server_error(
    client: FakeClient, tokenizer: Tokenizer, format: str | None, schemas: list[Any], forced: bool, constrained: bool
) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i, schema in enumerate(schemas)]
    more = {"tool_choice": "required"} if forced else {"regex": "a"} if constrained else {}
    app = create_app(client, tokenizer, server_config=ServerConfig(tool_call_parser=format))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=True), base_url="http://test") as http:
            return await http.post("/v1/chat/completions", json=GOOD["/v1/chat/completions"] | {"tools": tools} | more)

    response = asyncio.run(ask())
    assert response.status_code in (200, 400), response.text
    if response.status_code != 200:
        assert response.json()["error"]["param"].startswith("tool")
