"""The page at `/docs` without a browser: what it may load, that every route has a place on it, and that its examples are answered."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI

from mtpserve.config import EngineConfig, LoRAConfig, ServerConfig
from mtpserve.server.app import BODIES, ROUTES, create_app
from mtpserve.server.http.rendering import REFERENCE
from mtpserve.server.page.page import DOCS, PAGE
from mtpserve.server.schema.texts import EXAMPLES
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.test_page import get

TEXT = DOCS.html.decode()


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_markup(http: httpx.AsyncClient) -> None:
    answer = get(http, "/docs")
    assert answer.status_code == 200 and answer.content == DOCS.html and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'" and policy["connect-src"] == "'self'"
    assert all(re.fullmatch(r"'sha256-[\w+/]+=*'", policy[f"{tag}-src"]) for tag in ("script", "style"))
    assert policy["script-src"] != dict(part.split(" ", 1) for part in PAGE.headers["Content-Security-Policy"].split("; "))["script-src"]
    assert set(re.findall(r"\w+://[^\"'\s)]+", TEXT)) == {"http://www.w3.org/2000/svg"}, "a name, which no browser asks"
    assert set(re.findall(r'\b(?:src|href)="([^"]*)"', TEXT)) == {"data:,", "./", "openapi.json"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|\sstyle=|\son[a-z]+=\"", TEXT)
    assert "{{" not in TEXT
    assert {path: get(http, path).status_code for path in ("/redoc", "/docs/oauth2-redirect", "/docs/")} == {
        "/redoc": 404,
        "/docs/oauth2-redirect": 404,
        "/docs/": 307,  # to /docs
    }


def test_every_route_is_in_one_group_and_says_what_it_does(app: FastAPI) -> None:
    document = app.openapi()
    names = [tag["name"] for tag in document["tags"]]
    operations = {(method.upper(), path): told for path, methods in document["paths"].items() for method, told in methods.items()}
    assert set(operations) == {(method, re.sub(":path", "", path)) for method, paths, *_ in ROUTES for path in paths}
    for told in operations.values():
        assert len(told["tags"]) == 1 and told["tags"][0] in names and told["description"].startswith(told["summary"])
    # A summary is understood without the routes around it; only names of one route have one summary.
    summaries = {told["summary"] for told in operations.values()}
    assert len(summaries) == len({endpoint for *_, endpoint, _ in ROUTES})
    assert not [
        text for text in summaries if re.match(r"(What|Like|Such|The same|Those|Its|It|That)\b", text) or not 2 < len(text.split()) < 16
    ]
    groups = {path: told["tags"][0] for (_, path), told in operations.items()}
    assert (groups["/v1/chat/completions"], groups["/v1/messages"], groups["/generate"], groups["/stats"]) == (*names[:3], names[3])


def test_the_examples_of_bodies_are_answered(tokenizer: Tokenizer) -> None:
    """Every body that says what it needs has one; it fits the schema, and each of its routes takes it."""
    app = create_app(FakeClient(), tokenizer, engine_config=EngineConfig(lora=LoRAConfig(enable_lora=True)))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    document = app.openapi()
    schemas, tried = document["components"]["schemas"], set()
    assert set(EXAMPLES) == {body.__name__ for body in BODIES if body.__name__ != "ProfileRequest"}
    for path, methods in document["paths"].items():
        for told in methods.values():
            schema = told.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            reference = schema.get("anyOf", [schema])[0].get("$ref")  # null: the body may be left out
            if reference is None or reference.endswith("/ProfileRequest"):
                continue
            app.state.service.client.engine.stats.paused = app.state.service.client.engine.stats.sleeping = 0
            name = reference.removeprefix(REFERENCE.format(name=""))
            (example,) = schemas[name]["examples"]
            jsonschema.validate(example, {"components": document["components"], "$ref": reference})
            answer = post(http, path, example)
            assert answer.status_code == 200, (path, answer.text)
            tried.add(name)
    assert tried == set(EXAMPLES)


def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    return asyncio.run(http.post(path, json=body))


@pytest.mark.parametrize("root", ["", "/models/one"])
def test_the_page_and_its_document_are_under_the_same_path(tokenizer: Tokenizer, root: str) -> None:
    app = create_app(FakeClient(), tokenizer, server_config=ServerConfig(root_path=root, api_key=("secret",)))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    assert get(http, f"{root}/docs").content == DOCS.html  # without the key, which it asks for
    assert get(http, f"{root}/openapi.json").status_code == 401
    assert b'href="docs"' in get(http, f"{root}/").content
