"""Every route renders what it declares, and nothing else, in every form that a request can ask for; the OpenAPI document says the same."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from mtpserve.config import EngineConfig, LoRAConfig, ServerConfig
from mtpserve.server import about
from mtpserve.server.anthropic.messages import MessageEvent
from mtpserve.server.app import COMPONENTS, ROUTES, create_app
from mtpserve.server.http import sse
from mtpserve.server.http.rendering import JSON
from mtpserve.server.openai.objects import Chunk
from mtpserve.server.openai.responses.response_objects import ResponseEvent
from mtpserve.server.sglang.generate import Generated
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.speaking import SpeakingClient, checkpoint
from tests.server.test_tools import CALL, CITY

USER = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
SAID = f"<think>hm</think>Let me see. {CALL}"
TOLD = [{"name": "get_weather", "input_schema": {}}]
STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "logprobs": 1, "return_spec_trace": True}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 900, "tools": TOOLS, "stream_options": {"include_usage": True}}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 900, "tools": [{"type": "function", "name": "get_weather"}]}),
    ("/v1/messages", {"messages": USER, "max_tokens": 900, "tools": TOLD}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4, "n": 2}}),
]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_spec_trace": True}),
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
    ("/v1/responses/input_tokens", {"input": "a"}),
    ("/v1/responses/compact", {"model": "default", "input": "a"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 3}),
    ("/v1/messages", {"messages": USER, "max_tokens": 900, "tools": TOLD, "stop_sequences": ["zzz"]}),
    *((path, body | {"stream": True}) for path, body in STREAMED),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4}}),
    ("/generate", {"text": ["a"], "sampling_params": {"max_new_tokens": 9, "stop": "c"}, "return_logprob": True, "logprob_start_len": 0}),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 3, "n": 2, "logprobs": 1, "prompt_logprobs": 1}}),
    ("/invocations", {"prompt": "a"}),
    ("/invocations", {"messages": USER, "max_tokens": 4, "stream": True}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/v1/tokenize", {"prompt": ["a", "b"], "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/detokenize", {"tokens": [[5], [6]]}),
    ("/parse_function_call", {"text": SAID, "tools": TOOLS}),
    ("/separate_reasoning", {"text": SAID}),
    ("/v1/spec", {"num_steps": 1}),
    ("/flush_cache", {}),
    ("/reset_prefix_cache", {}),
    ("/abort_request", {"rid": "a"}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "adapters/a"}),
    ("/load_lora_adapter", {"lora_name": "b", "lora_path": "adapters/b"}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("/unload_lora_adapter", {"lora_name": "b"}),
    ("/update_weights_from_disk", {"model_path": "/m", "abort_all_requests": True}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}),
    ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}),
    ("/init_weights_update_group", {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}),
    ("/destroy_weights_update_group", {}),
    ("/get_weights_by_name", {"name": "a"}),
    ("/weights_checker", {}),
    ("/update_weight_version", {"new_version": "v2"}),
    ("/start_profile", {}),
    ("/stop_profile", {}),
    ("/pause_generation", {"mode": "in_place"}),
    ("/continue_generation", {}),
    ("/release_memory_occupation", {"tags": ["kv_cache"]}),
    ("/resume_memory_occupation", {}),
    ("/sleep", {}),
    ("/wake_up", {}),
    ("/pause", {}),
    ("/resume", {}),
]


PLAIN = ((dict,), (list[float], list[list[float]]))  # answers that are no objects of this server's


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("described")))


class Rendering:
    """What was rendered while a request was answered: whole answers, and what streams consist of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        whole, part = JSON.render, sse.event
        monkeypatch.setattr(JSON, "render", lambda response, content: whole(response, self.saw(content)))
        monkeypatch.setattr(sse, "event", lambda content: part(self.saw(content)))

    def saw(self, content: Any) -> Any:
        self.seen.append(content)
        return content

    def check(self, app: FastAPI, method: str, path: str, body: Any = None, route: str | None = None) -> httpx.Response:
        """The answer consists of what its route declares; `route` where the path has a value in it."""

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
                return await http.request(method, path, json=body)

        self.seen.clear()
        response = asyncio.run(ask())
        assert response.status_code == 200, response.text
        kinds = declared(method, route or path)
        match response.headers["content-type"].partition(";")[0]:
            case "application/json":
                (content,) = self.seen
                assert_rendered(response.content, content, kinds)
            case "text/event-stream":
                lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
                for line, each in zip(lines, self.seen, strict=True):
                    assert_rendered(line.removeprefix("data: ").encode(), each, (Chunk, ResponseEvent, MessageEvent, Generated))
            case kind:
                assert (isinstance(kinds, type) and kinds.media_type == kind) or path == "/metrics", "no JSON"
        return response


def declared(method: str, path: str) -> Any:
    return next(kinds for asked, paths, _, kinds in ROUTES if asked == method and path in paths)


def assert_rendered(sent: bytes, content: Any, kinds: tuple[Any, ...]) -> None:
    """`content` is of one of these types, and so are all of its parts."""
    kind = list[type(content[0])] if isinstance(content, list) else type(content)  # type: ignore[misc]
    assert kind in kinds, f"{kind} is not declared"
    if kind is not Chunk:  # whose log-probabilities are of either kind
        assert msgspec.json.encode(msgspec.json.decode(sent, type=kind)) == sent


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> Rendering:
    return Rendering(monkeypatch)


@pytest.mark.parametrize("speaks", [False, True])
def test_routes_answer_what_they_declare(tokenizer: Tokenizer, rendering: Rendering, speaks: bool) -> None:
    client = SpeakingClient(tokenizer, [SAID]) if speaks else FakeClient()
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3", enable_tokenizer_info_endpoint=True, profile_dir="profiles")
    app = create_app(client, tokenizer, EngineConfig(lora=LoRAConfig(lora_modules=("sql=adapters/sql",))), config)
    asked = set()
    for path, body in ASKED:
        if speaks and ("prompt_logprobs" in body or body.get("return_logprob") or body.get("echo")):
            continue  # this one scores no prompts
        response = rendering.check(app, "POST", path, body)
        asked.add(path)
        if path == "/v1/responses" and not body.get("stream"):
            place, route = f"{path}/{response.json()['id']}", path + "/{id}"
            rendering.check(app, "GET", f"{place}/input_items", route=f"{route}/input_items")
            rendering.check(app, "GET", place, route=route)
            rendering.check(app, "DELETE", place, route=route)
    if not speaks:
        assert asked == {path for method, paths, *_ in ROUTES for path in paths if method == "POST" and "{" not in path}
        for method, paths, *_ in ROUTES:
            for path in paths:
                if method == "GET" and "responses" not in path:
                    query = "?name=a" if path == "/get_weights_by_name" else ""
                    rendering.check(app, "GET", path.replace("{id:path}", "fake") + query, route=path)


def test_an_answer_that_is_not_declared_is_seen(tokenizer: Tokenizer, rendering: Rendering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about, "Healthy", lambda status: {"status": status})
    with pytest.raises(AssertionError, match="is not declared"):
        rendering.check(create_app(FakeClient(), tokenizer), "GET", "/health")


def test_a_part_of_another_type_is_seen() -> None:
    wrong = about.Version(7)  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        assert_rendered(msgspec.json.encode(wrong), wrong, (about.Version,))


def test_the_document_describes_what_is_declared(tokenizer: Tokenizer) -> None:
    document = create_app(FakeClient(), tokenizer).openapi()
    schemas = document["components"]["schemas"]
    for method, paths, _, kinds in ROUTES:
        for path in paths:
            told = document["paths"][path.replace(":path", "")][method.lower()]["responses"]
            if isinstance(kinds, tuple) and kinds not in PLAIN:
                schema = told["200"]["content"]["application/json"]["schema"]
                named = [each.get("items", each)["$ref"].rsplit("/", 1)[1] for each in schema.get("anyOf", [schema])]
                assert named == [getattr(kind, "__args__", (kind,))[0].__name__ for kind in kinds]
                assert all(schemas[name]["type"] == "object" for name in named)
            error = told["4XX"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
            assert error == ("AnthropicError" if path.startswith("/v1/messages") else "ErrorAnswer")
    assert not [name for name in re.findall(r"#/components/schemas/(\w+)", json.dumps(document)) if name not in schemas]
    assert schemas["Generated"]["required"] == ["text", "output_ids", "meta_info"], "but not `index`"


def test_requests_and_answers_share_no_name(tokenizer: Tokenizer) -> None:
    """The document has one list of names: an answer would take a body's place."""
    bodies = FastAPI.openapi(create_app(FakeClient(), tokenizer))["components"]["schemas"]
    assert bodies.keys() & COMPONENTS.keys() == set()
