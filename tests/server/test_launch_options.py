"""Options that change what routes answer: a path that a proxy adds, usage in every stream, tokens by their ids, the tokenizer shown."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from mtpserve.config import ServerConfig
from mtpserve.server.app import create_app
from mtpserve.server.page.page import PAGE
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.server.test_errors import send


def served(tokenizer: Tokenizer, **options: Any) -> httpx.AsyncClient:
    app = create_app(FakeClient(), tokenizer, server_config=ServerConfig(**options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize("prefix", ["", "/x/api"])  # the proxy takes the path off, or leaves it in
def test_below_a_path(tokenizer: Tokenizer, prefix: str) -> None:
    http = served(tokenizer, root_path="/x/api")
    assert send(http, "GET", f"{prefix}/health").status_code == 200
    assert send(http, "POST", f"{prefix}/v1/completions", json={"prompt": [5], "max_tokens": 2}).status_code == 200
    assert send(http, "GET", f"{prefix}/").content == PAGE.html
    document = send(http, "GET", f"{prefix}/openapi.json").json()
    assert [server["url"] for server in document["servers"]] == ["/x/api"]
    assert "/v1/completions" in document["paths"]


def test_the_page_asks_for_nothing_by_an_absolute_path() -> None:
    assert b'ask("/' not in PAGE.html and b'fetch("/' not in PAGE.html and b'href="/' not in PAGE.html and b'src="/' not in PAGE.html


@pytest.mark.parametrize(("path", "status"), [
    ("/api/health", 200), ("/health", 200), ("/api", 200), ("/api/v1/models", 401), ("/api/api/flush_cache", 401), ("/apihealth", 401),
])  # fmt: skip
def test_keys_see_the_path_that_routes_see(tokenizer: Tokenizer, path: str, status: int) -> None:
    http = served(tokenizer, root_path="/api", api_key=("k",), admin_api_key=("a",))
    assert send(http, "GET", path).status_code == status
    for managed in ("/flush_cache", "/api/flush_cache"):
        assert send(http, "POST", managed, headers={"x-api-key": "k"}).status_code == 403
        assert send(http, "POST", managed, headers={"x-api-key": "a"}).status_code == 200
    assert send(http, "POST", "/api/api/flush_cache", headers={"x-api-key": "k"}).status_code == 404
    anthropic = send(http, "POST", "/api/v1/messages", headers={"x-api-key": "k"}, json={}).json()
    assert anthropic["type"] == "error"


def test_an_app_that_it_is_mounted_in_adds_a_path(tokenizer: Tokenizer) -> None:
    app = create_app(FakeClient(), tokenizer, server_config=ServerConfig(admin_api_key=("a",)))
    mounted = httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path="/replica"), base_url="http://test")
    assert send(mounted, "GET", "/replica/health").status_code == 200
    assert send(mounted, "POST", "/replica/flush_cache").status_code == 403


@pytest.mark.parametrize(("options", "usage"), [
    (None, True), ({"include_usage": False}, True), ({"continuous_usage_stats": True}, True), ({"include_usage": True}, True),
])  # fmt: skip
@pytest.mark.parametrize("forced", [True, False])
def test_usage_in_every_stream(tokenizer: Tokenizer, options: dict[str, bool] | None, usage: bool, forced: bool) -> None:
    http = served(tokenizer, enable_force_include_usage=forced)
    body = {"prompt": [5], "max_tokens": 4, "stream": True} | ({} if options is None else {"stream_options": options})
    *_, content, last, done = events(send(http, "POST", "/v1/completions", json=body))
    usage = forced or bool(options and options.get("include_usage"))
    assert done == "[DONE]" and (last.get("usage", {}) != {}) == usage and bool(last["choices"]) != usage
    assert bool(content.get("usage")) == (forced and bool(options and options.get("continuous_usage_stats")))


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("general", [True, False])
def test_tokens_by_their_ids(tokenizer: Tokenizer, asked: bool | None, general: bool) -> None:
    http = served(tokenizer, return_tokens_as_token_ids=general)
    body = {"prompt": [5], "max_tokens": 2, "logprobs": 0, "return_tokens_as_token_ids": asked}
    choice = send(http, "POST", "/v1/completions", json=body).json()["choices"][0]
    by_id = general if asked is None else asked
    assert [token.startswith("token_id:") for token in choice["logprobs"]["tokens"]] == [by_id] * 2


def test_the_tokenizer_is_shown_where_it_is_asked_for(tokenizer: Tokenizer) -> None:
    refused = send(served(tokenizer), "GET", "/tokenizer_info")
    assert refused.status_code == 404 and "--enable-tokenizer-info-endpoint" in refused.json()["error"]["message"]
    info = send(served(tokenizer, enable_tokenizer_info_endpoint=True), "GET", "/tokenizer_info").json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast" and "messages" in info["chat_template"]
    assert info["eos_token"] == tokenizer.decode([1], skip_special_tokens=False)
    assert not any(name.endswith("_file") for name in info)


def test_sglangs_name_for_any_model(tokenizer: Tokenizer) -> None:
    http = served(tokenizer)
    user = [{"role": "user", "content": "a"}]
    for route, body in {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": user},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": user, "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": user},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
    }.items():
        answer = send(http, "POST", route, json=body | {"model": "default"})
        assert answer.status_code == 200 and answer.json().get("model", "fake") == "fake", route
        assert send(http, "POST", route, json=body | {"model": "defaults"}).status_code == 404, route
    assert [model["id"] for model in send(http, "GET", "/v1/models").json()["data"]] == ["fake"]
    assert send(http, "GET", "/v1/models/default").json()["id"] == "fake"


def test_what_the_kv_pool_holds(tokenizer: Tokenizer) -> None:
    info = send(served(tokenizer), "GET", "/get_server_info").json()
    assert info["max_total_num_tokens"] == info["internal_states"][0]["max_total_num_tokens"] == 64 * 16


@pytest.mark.parametrize(
    ("most", "asked", "good"), [(20, 20, True), (20, 21, False), (3, 4, False), (0, 0, True), (40, 40, True), (-1, 500, True)]
)
def test_how_many_alternatives(tokenizer: Tokenizer, most: int, asked: int, good: bool) -> None:
    http = served(tokenizer, max_logprobs=most)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for route, body, name in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": asked}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "prompt_logprobs": asked}, "prompt_logprobs"),
        ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": asked}, "top_logprobs"),
        ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": asked}, "top_logprobs_num"),
    ):
        answer = send(http, "POST", route, json=body)
        assert answer.status_code == (200 if good else 400), (route, answer.text)
        if not good:
            error = answer.json()["error"]
            assert error["param"] == name and error["message"].startswith(f"{name} must be in [0, {most}], got {asked}")
