"""The page at `/docs` in a real browser, against the real server with the demo model: what a person opens, filters and copies."""

from __future__ import annotations

import shlex
from typing import Any

import httpx
import pytest

from tests.server.browsing import PHONE, WIDE, Open, Running, sound, wait_for

READY = "#routes[aria-busy=false]"
CHAT = "[id='post/v1/chat/completions']"


def called(command: str) -> httpx.Response:
    """What the command would ask of the server."""
    name, url, *rest = shlex.split(command.replace("\\\n", ""))
    assert name == "curl" and set(rest[::2]) <= {"-H", "-d"}
    options = list(zip(rest[::2], rest[1::2], strict=True))
    headers = dict(value.split(": ", 1) for option, value in options if option == "-H")
    data = next((value for option, value in options if option == "-d"), None)
    return httpx.request("GET" if data is None else "POST", url, headers=headers, content=data, timeout=60)


def test_routes_are_found_opened_and_copied(demo: Running, opened: Open) -> None:
    page = opened(demo, view="", path="/docs", ready=READY)
    document = httpx.get(demo.url + "/openapi.json").json()
    routes = [method + path for path, methods in document["paths"].items() for method in methods]
    shown = page.eval_on_selector_all("details.route", "all => all.map((each) => each.id)")
    assert sorted(shown) == sorted(routes)
    assert page.locator("section > h2").all_text_contents() == [tag["name"] for tag in document["tags"]]
    page.fill("#filter", "post top_k speculative")
    wait_for(r"^\d+ of", page, "#found")
    found = page.eval_on_selector_all("details.route:not([hidden])", "all => all.map((each) => each.id)")
    assert "post/v1/chat/completions" in found and "post/tokenize" not in found and "get/stats" not in found
    page.focus(f"{CHAT} summary")
    page.keyboard.press("Enter")
    temperature = page.locator(f"{CHAT} tr", has=page.locator("td:first-child code", has_text="temperature"))
    temperature.wait_for()
    schema = document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]
    assert temperature.locator("td").all_text_contents() == ["temperature", "number", "≥ 0, ≤ 100", "", schema["description"]]
    page.locator(f"{CHAT} .below summary", has_text="ChatMessage").first.click()
    page.locator(f"{CHAT} .below td:first-child code", has_text="role").first.wait_for()
    assert called(page.text_content(f"{CHAT} > div > pre")).json()["choices"][0]["message"]["role"] == "assistant"
    page.goto(demo.url + "/#watch")
    page.click("footer a")
    page.wait_for_selector(READY)
    assert page.url == demo.url + "/docs"


def test_every_route_can_be_shown_and_every_command_without_an_id_works(demo: Running, opened: Open) -> None:
    """Commands with -X have no body that could be wrong; nobody may set this server's depth, and its tokenizer is not shown."""
    page = opened(demo, view="", path="/docs", ready=READY)
    page.evaluate("document.querySelectorAll('details.route').forEach((each) => { each.open = true; })")
    page.wait_for_function("[...document.querySelectorAll('details.route')].every((each) => each.querySelector(':scope > div > pre'))")
    commands = page.eval_on_selector_all(
        "details.route", "all => all.map((each) => [each.id, each.querySelector(':scope > div > pre').textContent])"
    )
    for id, command in commands:
        if "{" not in id and "-X" not in command and id not in ("post/v1/spec", "get/tokenizer_info"):
            answer = called(command)
            assert answer.status_code == 200, (command, answer.text)
    assert "undefined" not in page.inner_text("main") and "[object" not in page.inner_text("main")


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_it_can_be_read_and_operated_everywhere(demo: Running, opened: Open, size: dict[str, int], scheme: str) -> None:
    page = opened(demo, size, scheme, "post/v1/chat/completions", "/docs", READY)
    page.wait_for_selector(f"{CHAT}[open] > div")
    page.evaluate("document.querySelectorAll('.route[open] details').forEach((each) => { each.open = true; })")
    page.wait_for_selector(f"{CHAT} .nested .nested")
    sound(page)


def test_a_key_is_asked_for_when_the_document_needs_one(demo: Running, opened: Open) -> None:
    """Behind a proxy that offers the server under a path and asks for the key."""

    def proxied(route: Any) -> None:
        path = route.request.url.split("/models/one")[1]
        if path == "/openapi.json" and route.request.headers.get("authorization") != "Bearer secret":
            route.fulfill(status=401, json={"error": {"message": "a key is needed"}})
        else:
            route.fulfill(response=route.fetch(url=demo.url + path))

    page = opened(demo, view="", path="/docs", ready=READY)
    page.route("**/models/one/**", proxied)
    page.goto(demo.url + "/models/one/docs")
    page.wait_for_selector("#key-form:not([hidden])")
    assert page.locator("details.route").count() == 0
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    wait_for("refuses this key", page, "#key-note")
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector(READY)
    page.click(f"{CHAT} summary")
    page.wait_for_selector(f"{CHAT} > div > pre")
    command = page.text_content(f"{CHAT} > div > pre")
    assert f"{demo.url}/models/one/v1/chat/completions" in command and "$MTPSERVE_API_KEY" in command and "secret" not in command
