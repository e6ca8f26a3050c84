"""Keys, ids, the log, browsers, and how long anything may take: the app with its options, over a fake engine."""

from __future__ import annotations

import asyncio
import gzip
import hmac
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from mtpserve.config import ServerConfig
from mtpserve.core.errors import ConfigError
from mtpserve.server.app import create_app
from mtpserve.server.http.access import OPEN, with_keys
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.server.test_errors import COMPLETIONS, error, send

Serving = Callable[..., httpx.AsyncClient]
HELLO = {"prompt": "hello", "max_tokens": 3}


@pytest.fixture
def serving(client: FakeClient, tokenizer: Tokenizer) -> Serving:
    def start(**options: Any) -> httpx.AsyncClient:
        app = create_app(client, tokenizer, server_config=with_keys(ServerConfig(**options)))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")

    return start


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def paths(http: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Of every route that the app has, whoever added it."""
    app: Any = http._transport.app  # type: ignore[attr-defined]
    routes = [route for route in app.routes if isinstance(route, Route)]
    return [(method, re.sub(r"{.*}", "x", route.path)) for route in routes for method in (route.methods or set()) - {"HEAD"}]


def test_every_path_needs_the_key(serving: Serving, client: FakeClient) -> None:
    http = serving(api_key=("one", "two"))
    found = paths(http)
    assert {("POST", "/generate"), ("GET", "/stats")} <= set(found) and ("GET", "/openapi.json") in found
    for method, path in [*found, ("POST", "/health/"), ("OPTIONS", COMPLETIONS), ("GET", "http://test//health"), ("GET", "/nowhere")]:
        if path not in OPEN:
            assert error(send(http, method, path), 401)["code"] == "invalid_api_key", (method, path)
    for path in OPEN:
        assert send(http, "GET", path).status_code == 200
    for host in ("test/health", "test/health?x=", "test/health#", "/health"):  # what a framework would make a URL of
        assert error(send(http, "POST", COMPLETIONS, json=HELLO, headers={"host": host}), 401)["code"] == "invalid_api_key"
    for wrong in (
        {},
        bearer(""),
        bearer("on"),
        bearer("onee"),
        bearer("Ünes"),
        {"authorization": "Basic one"},
        {"x-api-key": "tw"},
        bearer("on") | {"x-api-key": ""},
    ):
        encoded = {name: value.encode("latin-1") for name, value in wrong.items()}
        response = send(http, "POST", COMPLETIONS, json=HELLO, headers=encoded)
        assert error(response, 401)["type"] == "authentication_error" and response.headers["www-authenticate"] == "Bearer"
    assert not client.submitted
    dummies = (bearer(""), bearer("dummy"), {"authorization": "Basic one"})
    either = [dummy | {"x-api-key": "two"} for dummy in dummies] + [bearer("one") | {"x-api-key": "dummy"}]
    for right in (bearer("one"), bearer("two"), {"authorization": "bearer  one"}, {"x-api-key": "two"}, *either):
        assert send(http, "POST", COMPLETIONS, json=HELLO, headers=right).status_code == 200


def test_keys_are_compared_whole_and_all_of_them(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it takes says nothing of a key: each comparison is that of the library, over digests, and none is left out."""
    http, compared = serving(api_key=("one", "two", "three")), list[tuple[bytes, bytes]]()
    same = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or same(a, b))
    for given, status in (("one", 200), ("o", 401)):
        compared.clear()
        assert send(http, "POST", COMPLETIONS, json=HELLO, headers=bearer(given)).status_code == status
        assert len(compared) == 3 and all(len(key) == 32 for pair in compared for key in pair)


def test_management_has_its_own_key(serving: Serving) -> None:
    http = serving(api_key=("user",), admin_api_key=("admin",))
    for method, path in (("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/reset_prefix_cache")):
        assert send(http, method, path).status_code == 401
        assert error(send(http, method, path, headers=bearer("user")), 403)["code"] == "admin_key_required"
        assert send(http, method, path, headers=bearer("admin")).status_code == 200
    assert send(http, "POST", COMPLETIONS, json=HELLO, headers=bearer("admin")).status_code == 200
    only = serving(admin_api_key=("admin",))
    assert send(only, "POST", COMPLETIONS, json=HELLO).status_code == 200
    assert send(only, "POST", "/abort_request", json={"abort_all": True}).status_code == 403
    assert send(only, "POST", "/flush_cache%0A").status_code == 404  # a route's pattern would match in front of the line break
    assert send(serving(api_key=("user",)), "POST", "/flush_cache", headers=bearer("user")).status_code == 200


def test_keys_from_files_and_never_shown(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret-1\nsecret-2\n")
    http = serving(api_key=("secret-0",), api_key_file=str(file), admin_api_key_file=str(file))
    for key in ("secret-0", "secret-1", "secret-2"):
        told = send(http, "GET", "/server_info", headers=bearer(key))
        assert told.status_code == 200 and "secret" not in told.text
    file.write_text("\n")
    for bad in (file, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=str(bad)):
            serving(api_key_file=str(bad))


def test_ids_come_back(serving: Serving) -> None:
    http = serving(api_key=("k",))
    given = {"x-request-id": "mine-1.2:3_4"}
    for path, headers, status in (("/health", given, 200), ("/v1/models", given, 401), ("/nowhere", given | bearer("k"), 404)):
        response = send(http, "GET", path, headers=headers)
        assert (response.status_code, response.headers["x-request-id"]) == (status, "mine-1.2:3_4")
        assert response.headers["request-id"] == "mine-1.2:3_4"  # Anthropic's clients read this one
    for bad in ("", "a b", "x" * 129, "ä"):
        made = send(http, "GET", "/health", headers={"x-request-id": bad.encode("latin-1")}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", made)
    app: Any = http._transport.app  # type: ignore[attr-defined]
    app.state.service.tokenizer = None
    broken = send(http, "POST", COMPLETIONS, json=HELLO, headers=given | bearer("k"))
    assert (broken.status_code, broken.headers["x-request-id"], broken.headers["request-id"]) == (500, "mine-1.2:3_4", "mine-1.2:3_4")


@pytest.mark.parametrize("log_requests", [False, True])
def test_the_log_holds_prompts_only_where_it_is_told_to(serving: Serving, caplog: pytest.LogCaptureFixture, log_requests: bool) -> None:
    http = serving(api_key=("hush",), log_requests=log_requests)
    with caplog.at_level(logging.INFO, "mtpserve"):
        send(http, "POST", f"{COMPLETIONS}?q=hush", json=HELLO | {"stop": "never"}, headers=bearer("hush") | {"x-request-id": "mine"})
        send(http, "GET", "/a%0d%0aERROR forged", headers=bearer("hush"))
        send(http, "GET", "/health")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("mtpserve.")]
    assert sum("hello" in line and "never" in line for line in lines) == log_requests
    assert [line for line in lines if re.fullmatch(r"127\.0\.0\.1:123 POST /v1/completions 200 \d\.\d{3} s mine", line)]
    assert not [line for line in lines if "hush" in line or "\n" in line or "\r" in line or "/health" in line]


def test_browsers_are_let_in_where_it_is_told(serving: Serving) -> None:
    asked = {"origin": "http://page", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    closed = send(serving(), "OPTIONS", COMPLETIONS, headers=asked)
    assert closed.status_code == 405 and "access-control-allow-origin" not in closed.headers
    http = serving(allowed_origins=("http://page",), api_key=("k",))
    assert send(http, "OPTIONS", COMPLETIONS, headers=asked).headers["access-control-allow-origin"] == "http://page"
    assert send(http, "GET", "/v1/models", headers=asked).headers["access-control-allow-origin"] == "http://page"  # a 401 is readable
    other = send(http, "OPTIONS", COMPLETIONS, headers=asked | {"origin": "http://other"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["http://page", "*"])
def test_libraries_in_a_browser_may_send_headers_of_their_own(serving: Serving, origin: str) -> None:
    http = serving(allowed_origins=(origin,))
    names = "authorization,anthropic-version,anthropic-dangerous-direct-browser-access,content-type,traceparent,x-api-key,x-stainless-os"
    asked = {"origin": "http://page", "access-control-request-method": "POST", "access-control-request-headers": names}
    answer = send(http, "OPTIONS", COMPLETIONS, headers=asked)
    allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
    assert answer.status_code == 200 and allowed >= set(names.split(","))
    shown = send(http, "POST", COMPLETIONS, json=HELLO, headers={"origin": "http://page"}).headers["access-control-expose-headers"]
    assert {"request-id", "x-request-id", "retry-after"} <= set(shown.split(", "))


def test_a_body_is_as_long_as_the_option_says(serving: Serving) -> None:
    http = serving(max_request_bytes=100)
    assert error(send(http, "POST", COMPLETIONS, json=HELLO | {"user": "x" * 90}), 413)["code"] == "request_too_large"
    assert send(http, "POST", COMPLETIONS, json=HELLO).status_code == 200


@pytest.mark.parametrize("route", [COMPLETIONS, pytest.param("/generate", marks=pytest.mark.thorough)])
def test_patience_ends(serving: Serving, client: FakeClient, route: str) -> None:
    client.pause = 0.05
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 4000}
    body = body if route == COMPLETIONS else {"text": "a", "sampling_params": {"max_new_tokens": 4000}}
    for http, more in ((serving(request_timeout=0.3), {}), (serving(), {"timeout": 0.3}), (serving(request_timeout=9), {"timeout": 0.3})):
        response = send(http, "POST", route, json=body | more)
        assert error(response, 408)["code"] == "deadline_exceeded" and response.headers["x-should-retry"] == "false"
        *chunks, last = events(send(http, "POST", route, json=body | more | {"stream": True}))
        assert chunks and last["error"]["code"] == "deadline_exceeded"
    client.pause = 0.5
    for stream in (False, True):
        response = send(serving(queue_timeout=0.1), "POST", route, json=body | {"stream": stream})
        assert error(response, 503)["code"] == "overloaded" and response.headers["retry-after"]
    assert not client.engine.live
    for bad in (0, -1, "1", 10**6):
        assert error(send(serving(), "POST", route, json=body | {"timeout": bad}), 400)["param"] == "timeout"


def test_a_silent_stream_says_that_it_lives(serving: Serving, client: FakeClient) -> None:
    client.pause = 0.25
    http = serving(sse_keep_alive_interval=0.1)
    text = send(http, "POST", COMPLETIONS, json=HELLO | {"stream": True}).text
    parts = [part for part in text.split("\n\n") if part]
    assert parts.count(": waiting") >= 2 and parts[0] == ": waiting" and parts[-1] == "data: [DONE]"
    assert len([part for part in parts if part.startswith("data: {")]) == 2

    async def leave() -> None:
        task = asyncio.create_task(http.post(COMPLETIONS, json=HELLO | {"max_tokens": 4000, "stream": True}))
        while not client.engine.live:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert not client.engine.live


@pytest.mark.parametrize(("method", "path", "meant"), [
    ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
    ("POST", "//v1/completions", "/v1/completions"),
    ("POST", "/v1//completions", "/v1/completions"),
    ("POST", "/chat/completions", "/v1/chat/completions"),
    ("POST", "/v1/v1/messages", "/v1/messages"),
    ("POST", "/messages/count_tokens", "/v1/messages/count_tokens"),
    ("GET", "/v1/models/", "/v1/models"),
    ("GET", "/v1/v1/models/a%20b/c%23d", "/v1/models/a%20b/c%23d"),
    ("GET", "/v1/health?verbose=true", "/health?verbose=true"),
])  # fmt: skip
@pytest.mark.parametrize("root", ["", "/api"])
def test_a_wrong_base_url_is_led_to_the_path_that_exists(serving: Serving, method: str, path: str, meant: str, root: str) -> None:
    answer = send(serving(root_path=root), method, f"http://test{path}")
    assert (answer.status_code, answer.headers["location"]) == (307, root + meant)


def test_a_redirected_request_is_answered_and_needs_its_key(serving: Serving) -> None:
    http = serving(api_key=("one",))
    http.follow_redirects = True
    assert send(http, "POST", "/completions/", json=HELLO, headers=bearer("one")).json()["object"] == "text_completion"
    assert error(send(http, "POST", "/completions/", json=HELLO), 401)["code"] == "invalid_api_key"
    for nowhere in ("/v1", "/v1/", "/v1/nowhere", "//test/nowhere", "/v2/completions"):
        assert error(send(http, "GET", f"http://test{nowhere}", headers=bearer("one")), 404)["code"] == "not_found"


@pytest.mark.parametrize("route", [COMPLETIONS, "/v1/messages"])
def test_a_compressed_body_is_refused_by_its_encoding(serving: Serving, route: str) -> None:
    http = serving()
    packed = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = send(http, "POST", route, content=gzip.compress(json.dumps(HELLO).encode()), headers=packed)
    assert answer.status_code == 415 and answer.headers["accept-encoding"] == "identity"
    found = answer.json()["error"]
    assert "'gzip'" in found["message"] and found["code"] == "unsupported_encoding"
    plain = {"content-encoding": "identity"}
    assert send(http, "POST", COMPLETIONS, json=HELLO, headers=plain).status_code == 200
