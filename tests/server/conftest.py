"""A tokenizer, an app on a fake engine, and an HTTP client for it that opens no socket."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, routing

from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.server import pictures
from tests.server.browsing import browser, chromium, demo, opened  # noqa: F401 (fixtures)
from tests.server.fake_client import FakeClient
from tests.text import tiny

# Most tests make an app. What FastAPI reads in the signatures of its endpoints is the same for each, and three quarters of its time.
routing.get_dependant = cache(routing.get_dependant)


@pytest.fixture(scope="session", autouse=True)
def noted_pictures() -> Iterator[None]:
    """With MTPSERVE_SCREENSHOTS=1 tests write pictures into docs/: notes of which page they are."""
    began = time.time()
    yield
    if os.environ.get("MTPSERVE_SCREENSHOTS"):
        pictures.record(began)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("checkpoint"), temperature=0.6, top_p=0.95)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def app(client: FakeClient, tokenizer: Tokenizer) -> FastAPI:
    return create_app(client, tokenizer)


@pytest.fixture
def http(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


def events(response: httpx.Response) -> list[Any]:
    """The objects of a stream, "[DONE]" as itself."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
