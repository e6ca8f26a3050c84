"""`/health?verbose=true`: what is known of the draft model, with status 200 whatever that is; and the same as metrics."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from mtpserve.core.stats.engine_stats import DraftHealth
from tests.server.fake_client import FakeClient
from tests.server.metric_text import without_model


def get(http: httpx.AsyncClient, path: str) -> httpx.Response:
    return asyncio.run(http.get(path))


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (DraftHealth(), {"state": "off", "start_acceptance": None, "floor": 0.0, "faults": 0, "reason": None}),
        (
            DraftHealth("suspended", 0.75, 0.2, 2, "all of them are token 0"),
            {"state": "suspended", "start_acceptance": 0.75, "floor": 0.2, "faults": 2, "reason": "all of them are token 0"},
        ),
    ],
)
def test_what_is_known_of_the_draft_model(http: httpx.AsyncClient, client: FakeClient, known: DraftHealth, told: dict[str, Any]) -> None:
    client.engine.stats.draft_health = known
    for path in ("/health", "/ready"):
        assert get(http, path).json() == {"status": "ok"}
        response = get(http, f"{path}?verbose=true")
        engines = [{"engine": 0, "state": "up", "restarts": 0, "reason": None, "ranks": 1}]
        assert (response.status_code, response.json()) == (200, {"status": "ok", "drafting": told, "engines": engines})
    values = dict(re.findall(r"^mtpserve_spec_(faults_total|suspended) (\S+)$", without_model(get(http, "/metrics").text), re.MULTILINE))
    assert float(values["faults_total"]) == told["faults"] and float(values["suspended"]) == (known.state == "suspended")


def test_verbose_is_yes_or_no(http: httpx.AsyncClient) -> None:
    assert get(http, "/health?verbose=false").json() == {"status": "ok"}
    assert get(http, "/health?verbose=loudly").status_code in (400, 422)
