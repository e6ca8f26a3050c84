"""Every error has OpenAI's shape, names its field, and is small, whatever was sent."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mtpserve.config import ModelConfig, ServerConfig
from mtpserve.server.app import create_app
from mtpserve.server.chat.bodies import CompletionRequest, GenerationRequest
from mtpserve.server.chat.conversation import MAX_MESSAGES, ChatMessage
from mtpserve.server.schema.unsupported import REFUSED
from mtpserve.text.grammars.grammar import LLGuidanceCompiler
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.server.fake_engine import CONTEXT, VOCAB
from tests.text import tiny

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LEAK = re.compile(r"0x[0-9a-f]{6,}|site-packages|/usr/|/root/|/home/|\.py\b|Traceback|line \d+, in")
USER = [{"role": "user", "content": "hello"}]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert len(response.content) < 8000
    content = response.json()
    if response.url.path.startswith("/v1/messages"):  # Anthropic's clients look for this too
        assert content.pop("type") == "error"
    assert content.keys() == {"error"}
    assert content["error"].keys() == {"message", "type", "param", "code"}
    assert content["error"]["message"] and content["error"]["code"]
    assert not LEAK.search(response.text)
    return dict(content["error"])


def send(http: httpx.AsyncClient, method: str, path: str, **more: Any) -> httpx.Response:
    return asyncio.run(http.request(method, path, **more))


def refused(http: httpx.AsyncClient, path: str, request: Any, status: int = 400) -> dict[str, Any]:
    return error(send(http, "POST", path, json=request), status)


def test_routes_and_methods(http: httpx.AsyncClient) -> None:
    assert "/nowhere" in error(send(http, "GET", "/nowhere"), 404)["message"]
    error(send(http, "GET", "/healthy/"), 404)
    error(send(http, "GET", COMPLETIONS), 405)
    assert error(send(http, "GET", "/v1/models/other"), 404)["code"] == "model_not_found"
    assert error(send(http, "GET", "/a%0d%0ab"), 404)["message"].isprintable()


def test_another_model(http: httpx.AsyncClient) -> None:
    found = refused(http, COMPLETIONS, {"model": "other", "prompt": "a"}, 404)
    assert (found["code"], found["param"], found["type"]) == ("model_not_found", "model", "invalid_request_error")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"[" * 100_000,
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"\x00",
        b'{"seed": ' + b"1" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_bodies_that_are_no_request(http: httpx.AsyncClient, route: str, content: bytes) -> None:
    error(send(http, "POST", route, content=content, headers={"content-type": "application/json"}), 400)


def test_a_body_of_another_type_is_told_what_is_expected(http: httpx.AsyncClient) -> None:
    assert "application/json" in error(send(http, "POST", COMPLETIONS, data={"prompt": "a"}), 400)["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long(http: httpx.AsyncClient, declared: bool) -> None:
    async def chunks() -> Any:
        for _ in range(9):
            yield b" " * (1 << 20)

    content = b" " * (9 << 20) if declared else chunks()
    error(send(http, "POST", COMPLETIONS, content=content, headers={"content-type": "application/json"}), 413)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "64"),
        ("max_tokens", True),
        ("max_tokens", 10**9),
        ("max_tokens", 10**30),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 10**30),
        ("min_tokens", 10**30),
        ("min_p", 2),
        ("repetition_penalty", 1e-320),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", "a" * 257),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [5] * 1025),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [True]),
        ("prompt", [VOCAB]),
        ("prompt", [-1]),
        ("prompt", [10**40]),
        ("prompt", ["a"] * 129),
        ("prompt", [None] * 5000),
        ("prompt", {"a": 1}),
        ("prompt", "a b " * 20000),
        ("prompt", [5] * CONTEXT),
        ("n", 10**30),
        ("rid", "a b"),
        ("rid", "x" * 129),
        ("user", 5),
        ("user", "x" * 513),
        ("metadata", {"a": 1}),
        ("metadata", {"a" * 65: "b"}),
        ("metadata", {str(i): "" for i in range(17)}),
        ("cache_salt", ""),
        ("priority", 1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("return_token_ids", 1),
        ("priority", 2**31),
        ("priority", 0.5),
        ("speculative", {"depth": 1}),
        ("suffix", "end"),
        ("best_of", 0),
        ("logprobs", 21),
        ("logprobs", True),
    ],
)
def test_fields_out_of_bounds_are_named(http: httpx.AsyncClient, client: FakeClient, field: str, value: Any) -> None:
    found = refused(http, COMPLETIONS, {"prompt": "a"} | {field: value})
    assert found["param"] == field
    assert field in found["message"]
    assert not client.submitted


def test_what_nobody_has_heard_of_is_left_out(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mtpserve.server.schema.base"):
        response = send(http, "POST", COMPLETIONS, json={"prompt": "a", "unheard\nof": 1, "stream": True, "stream_options": {"new": 1}})
    assert response.status_code == 200
    assert [record.getMessage() for record in caplog.records if "unheard" in record.getMessage()] == [
        r"CompletionRequest: ignored fields: 'unheard\nof'"
    ]
    for fields in ({"user": "me"}, {"metadata": {"a": "b"}}, {"cache_salt": "x"}, {"prompt_cache_key": "x"}, {"store": False}):
        assert send(http, "POST", COMPLETIONS, json={"prompt": "a"} | fields).status_code == 200


def test_prompts_and_choices_are_bounded_together(http: httpx.AsyncClient, app: FastAPI, client: FakeClient) -> None:
    app.state.service.tokenizer = Untouchable()
    assert "1024" in refused(http, COMPLETIONS, {"prompt": ["a"] * 9, "n": 128})["message"] and not client.submitted


def test_a_limit_is_named_as_the_client_did(http: httpx.AsyncClient, app: FastAPI) -> None:
    app.state.service.server_config = ServerConfig(clamp_max_tokens=False)
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (0, CONTEXT, 10**30):
            assert refused(http, CHAT, {"messages": USER, name: value})["param"] == name
    assert refused(http, CHAT, {"messages": USER, "min_tokens": 10**30})["param"] == "min_tokens"  # which no limit bounds here
    too_many = {"sampling_params": {}, "text": "a", "return_logprob": True, "top_logprobs_num": 25}
    for route, body in ((CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 25}), ("/generate", too_many)):
        assert refused(http, route, body)["message"].endswith("got 25: see --max-logprobs"), "an option that exists"


GRAMMARS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "guided_json": {}}, "guided_json"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"grammar": "x"}}, "structured_outputs"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
    (CHAT, {"messages": USER, "guided_grammar": "x"}, "guided_grammar"),
    (CHAT, {"messages": USER, "json_schema": "{}"}, "json_schema"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}, "text"),
    ("/generate", {"text": "a", "sampling_params": {"json_schema": "{}"}}, "json_schema"),
    ("/generate", {"text": "a", "sampling_params": {"structural_tag": "{}"}}, "structural_tag"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "request_", "param"), GRAMMARS, ids=str)
def test_what_the_engine_cannot_compile_is_named_as_the_client_did(
    http: httpx.AsyncClient, client: FakeClient, path: str, request_: dict[str, Any], param: str, stream: bool
) -> None:
    compiler = LLGuidanceCompiler(ModelConfig().directory, 2048, [1])
    client.engine.compile = lambda spec: compiler.compile(replace(spec, kind="regex", text="("))  # type: ignore[assignment,arg-type,return-value,method-assign]
    assert refused(http, path, request_ | {"stream": stream})["param"] == param


def test_not_a_number_is_refused(http: httpx.AsyncClient) -> None:
    for number in ("NaN", "Infinity"):
        content = f'{{"prompt": "a", "temperature": {number}}}'.encode()
        error(send(http, "POST", COMPLETIONS, content=content, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize("field", sorted(REFUSED["chat"]))
def test_what_is_not_supported_is_refused_by_name(http: httpx.AsyncClient, field: str) -> None:
    for value in (3.5, {"type": "json_object"}, [{"x": 1}]):
        assert refused(http, CHAT, {"messages": USER, field: value})["param"] == field


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hello",
        [],
        [123],
        [{}],
        [{"role": 123, "content": "a"}],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}],
        [{"role": "user", "content": {"text": "a"}}],
        [{"role": "user", "content": "a", "tool_calls": [{"id": 1}]}],
        [{"role": "user", "content": "a b " * 20000}],
        [{"role": "user", "content": "a"}] * 50000,
    ],
)
def test_messages_that_cannot_be(http: httpx.AsyncClient, client: FakeClient, messages: Any) -> None:
    assert refused(http, CHAT, {"messages": messages})["param"].startswith("messages")
    assert not client.submitted


def test_what_is_long_is_refused_before_it_is_looked_at_one_by_one(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of some megabytes keeps nobody else waiting: its length is known at once."""
    many = [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)
    monkeypatch.setattr(ChatMessage, "for_template", None)
    for route, field in ((CHAT, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input"), ("/tokenize", "messages")):
        found = send(http, "POST", route, json={field: many, "max_tokens": 1} if route != "/v1/responses" else {field: many})
        assert found.status_code == 400 and str(MAX_MESSAGES) in found.json()["error"]["message"], found.text
    wrong = {f"no id {i}": 1 for i in range(1025)}
    assert (
        refused(http, COMPLETIONS, {"prompt": "a", "logit_bias": wrong})["message"] == "logit_bias must be at most 1024 entries, got 1025"
    )


def test_a_context_that_is_too_small_has_its_code(http: httpx.AsyncClient) -> None:
    for request in ({"prompt": [5] * CONTEXT}, {"prompt": "a", "max_tokens": CONTEXT}, {"prompt": "a" * 9 * CONTEXT}):
        assert refused(http, COMPLETIONS, request)["code"] == "context_length_exceeded"


def test_many_errors_are_cut(http: httpx.AsyncClient) -> None:
    fields = sorted(CompletionRequest.model_fields.keys() - {"prompt"})
    found = refused(http, COMPLETIONS, {name: ["y" * 10000, {"z": 1.5}] for name in fields})
    assert re.search(r"and \d+ more$", found["message"])
    assert found["param"] == next(iter(GenerationRequest.model_fields))


def test_a_model_without_a_template_still_completes(client: FakeClient, tmp_path: Any) -> None:
    app = create_app(client, Tokenizer(tiny.write(tmp_path, template=None)))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        return await http.post(CHAT, json={"messages": USER}), await http.post(COMPLETIONS, json={"prompt": "a"})

    chat, completion = asyncio.run(ask())
    assert "/v1/completions" in error(chat, 400)["message"]
    assert completion.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_refusals(http: httpx.AsyncClient, client: FakeClient, stream: bool) -> None:
    assert refused(http, COMPLETIONS, {"prompt": "a", "seed": 400, "stream": stream})["param"] == "seed"
    response = send(http, "POST", COMPLETIONS, json={"prompt": "a", "seed": 429, "stream": stream})
    assert error(response, 429)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1


def test_a_request_that_fails(http: httpx.AsyncClient) -> None:
    assert "finite" in refused(http, COMPLETIONS, {"prompt": "a", "seed": 500}, 500)["message"]
    *chunks, last = events(send(http, "POST", COMPLETIONS, json={"prompt": "a", "seed": 500, "stream": True}))
    assert "finite" in last["error"]["message"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_a_dead_engine(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.pause = 0.001

    async def ask() -> list[httpx.Response]:
        stream = asyncio.create_task(http.post(CHAT, json={"messages": USER, "stream": True}))
        whole = asyncio.create_task(http.post(CHAT, json={"messages": USER}))
        await asyncio.sleep(0.05)
        client.dead = "the engine process was killed by SIGKILL"
        return [await stream, await whole, await http.get("/health"), await http.post(COMPLETIONS, json={"prompt": "a"})]

    stream, *others = asyncio.run(ask())
    assert "SIGKILL" in events(stream)[-1]["error"]["message"]
    assert [error(response, 503)["code"] for response in others] == ["engine_dead"] * 3


def test_draining(http: httpx.AsyncClient, app: FastAPI, client: FakeClient) -> None:
    client.pause = 0.001

    async def ask() -> list[httpx.Response]:
        running = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 200}))
        await asyncio.sleep(0.05)
        app.state.service.draining = True
        return [await http.get("/health"), await http.post(COMPLETIONS, json={"prompt": "a"}), await running]

    health, refusal, running = asyncio.run(ask())
    assert error(health, 503)["code"] == error(refusal, 503)["code"] == "shutting_down"
    assert refusal.headers["retry-after"]
    assert running.status_code == 200


def test_before_it_drains_routers_alone_are_told(http: httpx.AsyncClient, app: FastAPI) -> None:
    app.state.service.leaving = True
    for path in ("/health", "/ready", "/health_generate", "/v1/loads", "/get_load"):
        assert "about to shut down" in error(asyncio.run(http.get(path)), 503)["message"]
    assert asyncio.run(http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 4})).status_code == 200
    assert asyncio.run(http.get("/stats")).json()["draining"] is True


def test_a_bug_says_nothing_of_the_inside(http: httpx.AsyncClient, app: FastAPI) -> None:
    app.state.service.tokenizer = None
    found = refused(http, COMPLETIONS, {"prompt": "a"}, 500)
    assert found == json.loads('{"message": "internal error", "type": "server_error", "param": null, "code": "internal_error"}')


class Untouchable:
    """A tokenizer that nobody may use."""

    defaults: dict[str, Any] = {}  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the tokenizer's {name} was used")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 129), ("n", 0), ("best_of", 129), ("max_tokens", CONTEXT), ("max_tokens", 0), ("temperature", -1), ("top_p", 2),
        ("top_k", -2), ("min_p", 2), ("seed", 2**63), ("stop", ["a"] * 17), ("stop", "a" * 257), ("stop_token_ids", [5] * 1025),
        ("stop_token_ids", [VOCAB]),
        ("logit_bias", {str(i): 1 for i in range(1025)}), ("logit_bias", {str(VOCAB): 1}), ("allowed_token_ids", [-1]),
        ("bad_words", ["a"] * 257), ("bad_words", ["a" * 257]), ("prompt_logprobs", 21), ("min_tokens", 9), ("timeout", 0), ("rid", "a b"),
        ("response_format", {"type": "json"}), ("regex", "a" * (1 << 20) + "a"), ("prediction", {"type": "x"}),
        ("speculative", {"num_steps": 64}),
        ("prompt", "a" * 9 * CONTEXT), ("prompt", ["a"] * 129), ("messages", [{"role": "user", "content": "a" * 9 * CONTEXT}]),
        ("messages", []), ("top_logprobs", 2), ("logprobs", 21),
    ],
)  # fmt: skip
def test_bounds_hold_before_anything_is_tokenized(http: httpx.AsyncClient, app: FastAPI, field: str, value: Any) -> None:
    app.state.service.tokenizer, app.state.service.server_config = Untouchable(), ServerConfig(clamp_max_tokens=False)
    bodies = {COMPLETIONS: {"prompt": "a", "max_tokens": 8}, CHAT: {"messages": USER, "max_tokens": 8}}
    routes = {"prompt": [COMPLETIONS], "messages": [CHAT], "top_logprobs": [CHAT]}.get(field, [COMPLETIONS, CHAT])
    for route in routes:
        assert refused(http, route, bodies[route] | {field: value})["param"] == field


def test_nothing_in_a_request_is_fetched(http: httpx.AsyncClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"
        image = [{"type": "image_url", "image_url": {"url": url}}]
        for content in (image, f"![image]({url})", [{"type": "text", "text": f'<img src="{url}">'}]):
            send(http, "POST", CHAT, json={"messages": [{"role": "user", "content": content}], "max_tokens": 2})
        for route in (COMPLETIONS, "/generate"):
            send(http, "POST", route, json={"prompt": url, "text": url, "image_data": url, "max_tokens": 2, "lora_path": url})
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()
