"""The page at `/` without a browser: its headers, what it may load, its colours, and the numbers that it reads."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.server.page.assembled import content
from mtpserve.server.page.page import PAGE
from mtpserve.text.chat_sampling import ChatSampling
from tests.server.fake_client import FakeClient
from tests.server.test_launch import free_port, launched

LIBRARY = content("highlight.min.js")  # of others, as it was published
TEXT = PAGE.html.decode().replace(LIBRARY, "")
AA = 4.5  # WCAG's contrast for text of ordinary size


def get(http: httpx.AsyncClient, path: str) -> httpx.Response:
    return asyncio.run(http.get(path))


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(http: httpx.AsyncClient) -> None:
    answer = get(http, "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"  # no string becomes markup
    assert "unsafe" not in answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        inside = answer.text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_library_that_colours_code_is_the_published_one_with_its_licence_and_is_small() -> None:
    assert "highlight.js 11.12.0" in LIBRARY[:100] and "BSD 3-Clause License" in LIBRARY and "Redistributions of source code" in LIBRARY
    assert LIBRARY in PAGE.html.decode() and len(LIBRARY) < 62_000
    # Its functions that write markup, which the policy forbids, are not called, and no end of a script is in it.
    assert set(re.findall(r"\bhljs\.(\w+)", TEXT)) == {"configure", "registerAliases", "getLanguage", "highlight"}
    assert not re.search("</script|<script[\\s/>]", LIBRARY)


def test_the_page_loads_nothing_and_writes_no_markup() -> None:
    assert set(re.findall(r"https?://[^\"'\s)]+", TEXT)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)=\"(?!data:,|docs\"|#race\")", TEXT)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|\sstyle=|\son[a-z]+=\"", TEXT
    )


def test_no_two_parts_of_the_script_use_one_name() -> None:
    """The files are one script, where a second function of a name would silently take the place of the first."""
    names = re.findall(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", TEXT, re.MULTILINE)
    assert len(names) > 100 and {name for name in names if names.count(name) > 1} == set()


def test_every_element_that_the_script_and_the_labels_mean_is_there() -> None:
    ids = re.findall(r'\bid="([\w-]+)"', TEXT)
    assert len(ids) == len(set(ids))
    meant = re.findall(r'(?:\$|say|chart)\("([\w-]+)"', TEXT) + re.findall(r'(?:for|aria-labelledby)="([\w-]+)"', TEXT)
    assert meant and set(meant) <= set(ids)
    inputs = re.findall(r'<(?:textarea|input|select)[^>]*\bid="([\w-]+)"', TEXT)
    labelled = set(re.findall(r'for="([\w-]+)"', TEXT)) | set(re.findall(r'<label[^>]*><input[^>]*id="([\w-]+)"', TEXT))
    assert set(inputs) == labelled


def luminance(colour: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(scheme: str) -> None:
    found = re.findall(r"--([\w-]+): light-dark\(#(\w{6}), #(\w{6})\)", TEXT)
    digits = {name: light if scheme == "light" else dark for name, light, dark in found}
    colours = {name: tuple(bytes.fromhex(digits[name])) for name in digits}
    pairs = [(text, ground) for text in ("text", "muted", "good", "bad", "warn") for ground in ("ground", "panel")]
    pairs += [
        ("text", "warn-ground"),
        ("text", "bad-ground"),
        ("panel", "text"),
        ("text", "bubble"),
        ("text", "raised"),
        ("muted", "track"),
    ]
    pairs += [(name, "code") for name in colours if name.startswith("h-")]
    poor = {pair: ratio for pair in pairs if (ratio := contrast(colours[pair[0]], colours[pair[1]])) < AA}
    strength = max(int(percent) for percent in re.findall(r"--strength: (\d+)%", TEXT)) / 100
    for source in ("mtp", "ngram", "prediction", "grammar"):
        mixed = tuple(strength * a + (1 - strength) * b for a, b in zip(colours[source], colours["ground"], strict=True))
        if (ratio := contrast(colours["text"], mixed)) < AA:
            poor["text", source] = ratio
    assert not poor


def test_stats_are_the_engines_own(http: httpx.AsyncClient, client: FakeClient) -> None:
    asyncio.run(http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 4}))
    answer = get(http, "/stats")
    body = answer.json()
    assert answer.headers["cache-control"] == "no-store"
    assert body["stats"] == asdict(client.engine.stats)
    assert body["stats"]["accepted_tokens_total"] == 2
    assert (body["model"], body["speculative_steps"], body["context_length"], body["page_size"]) == ("fake", 2, 4096, 16)
    assert (body["dead"], body["draining"], body["warnings"]) == (None, False, [])
    # What the script takes from it is there.
    assert set(re.findall(r"\bstate\.(\w+)", TEXT)) - {"error"} <= body.keys()
    assert set(re.findall(r"\b(?:now|then|stats)\.(\w+)", TEXT)) <= body["stats"].keys()


def test_stats_have_the_tiers_below_the_device(http: httpx.AsyncClient, client: FakeClient) -> None:
    assert get(http, "/stats").json()["tiers"] == {}
    client.engine.pretend_tiers()
    found = get(http, "/stats").json()["tiers"]
    host = {"pages": 120, "pages_total": 400, "loaded_pages": 30, "write_gb_per_second": 2.0, "read_gb_per_second": 4.0}
    disk = {"pages": None, "pages_total": None, "loaded_pages": 10, "write_gb_per_second": 0.5, "read_gb_per_second": 0.25}
    assert found == {"host": host | {"failed_transfers": 0}, "disk": disk | {"failed_transfers": 1}}
    # What the script takes from them is there.
    assert set(re.findall(r"\btier\.(\w+)", TEXT)) == host.keys() | {"failed_transfers"}


def test_before_anything_was_moved_host_memory_is_empty(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.engine.stats.tier_pages, client.engine.stats.tier_pages_total = {"host": 0}, {"host": 400}
    ((name, tier),) = get(http, "/stats").json()["tiers"].items()
    assert (name, tier["pages"], tier["loaded_pages"], tier["read_gb_per_second"]) == ("host", 0, 0, None)
    state = get(http, "/server_info").json()["internal_states"][0]
    assert (state["tier_pages"], state["tier_pages_total"], state["loaded_pages"]) == ({"host": 0}, {"host": 400}, {})


def test_stats_say_what_is_wrong(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.card = replace(client.card, lossy=True)
    client.dead = "the engine process was killed by SIGKILL"
    body = get(http, "/stats").json()
    assert body["dead"] == client.dead
    assert [warning.split(":")[0] for warning in body["warnings"]] == ["LOSSY"]


def test_while_the_model_loads_a_browser_gets_the_page_that_waits(checkpoint: Path) -> None:
    port = free_port()
    with launched(checkpoint, "--port", str(port), ready=False, FAKE_ENGINE="slow"):
        for _ in range(100):
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/")
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        assert answer.status_code == 503
        assert answer.content == PAGE.html
        assert "content-security-policy" in answer.headers
        waiting = httpx.get(f"http://127.0.0.1:{port}/stats")
        assert waiting.status_code == 503
        assert waiting.json()["error"]["message"] == "the model is loading"


def test_another_model_without_a_chat_template_says_so(http: httpx.AsyncClient, app: FastAPI) -> None:
    service = app.state.service
    service.tokenizer = SimpleNamespace(has_chat_template=False, defaults={"temperature": 0.6, "top_k": 20})
    service.engine_config = EngineConfig(model=ModelConfig(model="/models/other"))
    service.chat_sampling = ChatSampling("checkpoint", {"temperature": 0.6, "top_k": 20})
    body = get(http, "/stats").json()
    assert body["about"] == "This checkpoint has no chat template. It continues text and cannot hold a conversation."
    assert body["default_sampling"] == {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "source": "checkpoint"}
